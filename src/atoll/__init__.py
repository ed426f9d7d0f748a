"""Atoll: one model, many islands of compute that never wait for each other."""

__version__ = "0.1.0"
