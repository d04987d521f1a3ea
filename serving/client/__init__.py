"""How do we talk to SGLang? Protocol, errors, the hot path, a pool of servers, stalls.

Knows the wire of SGLang 0.5.23; does not know prompts, budgets or who started a server. Imports no other
part of serving.
"""
