"""Can this run succeed? Checks before the first prompt, probes, speed, the plan.

Knows servers through `serving`. Imports generate and what is before it; no Prefect but in task.py.
"""
