"""How do prompts become answers? Window, feed, dispatch, retries, conversations, budget and forecast.

Knows servers through `serving.client`. Imports prepare and what is before it; no Prefect but in task.py.
"""
