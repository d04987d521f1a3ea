"""Which rows are train and which are eval?

Knows a seed and what the user said first; does not know formats. Imports records, and the export's counts.
"""
