"""Which files has an export? One module a format, each a `Sink` of tasks/export/files.py.

Knows the bytes of its format; does not know where rows come from. Imports files and split of the export,
records and tokens.
"""
