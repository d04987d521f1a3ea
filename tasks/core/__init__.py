"""What is true: records, logs, budgets, masks. Pure: no Prefect, no HTTP, no clock of its own."""
