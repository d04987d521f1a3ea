"""What can be typed? The commands, and what they share.

Knows typer, texts and exit codes; what a command does is done by flows and tasks. Imports those, and Prefect
only inside a command that needs it: that takes seconds. No flow imports it.
"""
