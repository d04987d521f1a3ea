"""Adapters: one source row in, one prompt out."""
