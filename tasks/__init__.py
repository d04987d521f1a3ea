"""How does a run work? A folder for each step; its `task.py` is the Prefect task, the rest is plain Python.

A step imports only those before it: records, tokens, prepare, generate, warm_up, aggregate, export. The
modules `artifacts` and `checkpoints` are the Prefect side that several steps share. Empty, for importing a
step must not import Prefect.
"""
