"""From response logs to training data: `run.export_run` makes all of an export, the other modules its parts.

Rows are read and batched (rows, batches), given to a sink for each format (parquet, jsonl, arrow, vocab,
conversations), and described (report, configs). A process that only reads rows imports no sink.
"""
