"""What runs? One flow a file, the parameters they take, and what only flows need.

Knows Prefect's runs and every step by its task; does not know how a step works. Imports tasks and serving;
only deployments imports it.
"""
