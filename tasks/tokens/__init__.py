"""What does the model see? Tokenizer, chat template, rendering, special tokens, masks, trajectories.

Knows token ids and how they come about. Imports records; no HTTP client and no Prefect.
"""
