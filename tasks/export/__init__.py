"""How do response logs become training data? `export_run` makes an export, the other modules its parts.

Rows are read and batched (rows, batches), given to a sink for each format (formats), and described (report,
card, configs). Knows what is on disk and asks no server. Imports aggregate and what is before it; only
task.py imports Prefect and, for the demo's tokenizer, the embedded engine.
"""
