"""How far is a run, and what is wrong? One scan and one state of a run; statistics, problems, report.

Knows what is on disk and asks no server. Imports warm_up and what is before it; no Prefect but in task.py.
"""
