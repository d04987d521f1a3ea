"""The files of an export: one module a format."""
