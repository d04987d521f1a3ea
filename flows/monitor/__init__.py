"""How does a run look from a terminal? Its tables, what fits on the screen, and the live view.

Knows rich and what one look at a folder found; writes nothing, asks no server, knows no Prefect. Imports
aggregate and records; only the command line imports it.
"""
