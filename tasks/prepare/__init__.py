"""Which prompts are asked, in which order? Sources, adapters, choice and order of prompts, preview.

Knows datasets and their rows. Imports tokens and records; no HTTP client, and no Prefect but in task.py.
"""
