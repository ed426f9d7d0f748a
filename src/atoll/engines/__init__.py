"""Runs on many machines by one command: `atoll up RECIPE --on ENGINE`.

`deployment.py` says what the processes of a run are; an engine says how its scheduler starts, watches and ends them. No file here
trains or merges: the commands are `atoll syncer` and `atoll learner`.
"""
