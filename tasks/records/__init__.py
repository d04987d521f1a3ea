"""What is on disk? Rows, append-only logs, prompt files, run.json, progress, locks, atomic files and folders.

Knows files and their formats. Imports no other step, no HTTP client and no Prefect.
"""
