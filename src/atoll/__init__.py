"""Atoll: one model, many islands of compute that never wait for each other."""
