"""How do we talk to an SGLang server, start it and watch it?

Knows SGLang 0.5.23, processes and ports; does not know Prefect, prompts or datasets. Imports neither tasks
nor flows. `client` imports no other part, `launch` imports client, `embedded` only launch's process helpers.
"""
