"""How it runs: thin Prefect tasks around plain functions.

Kept empty: importing the core must not pull Prefect in.
"""
