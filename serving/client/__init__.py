"""How do we talk to SGLang? Protocol, errors, the hot path, a pool of servers, stalls."""
