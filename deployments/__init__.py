"""Where and when flows run: deployments, the processes that serve them, and `draftmill up`."""
