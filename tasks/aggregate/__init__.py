"""How far is a run, and what is wrong? Statistics, progress, problems, the report.

Knows what is on disk and asks no server. How far a run is, is known in two ways: from its logs (`stats_scan`,
`log_watch`) and, for the Prefect UI, from its checkpoints (`watch_run`). Imports warm_up and what is before
it; no Prefect but in task.py and through `tasks.checkpoints`.
"""
