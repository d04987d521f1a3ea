"""A small real model on the CPU behind SGLang's protocol.

Knows llama.cpp (through xllamacpp) and the wire shapes of SGLang 0.5.23; knows no Prefect and no dataset.
Imports launch's process helpers, and no client. Invariant: a client written for SGLang's `/generate` cannot
tell the difference, except by the speed.
"""
