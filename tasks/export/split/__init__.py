"""Which rows are train and which are eval."""
