"""What runs: one flow per file, the parameters they take, and the command line."""
