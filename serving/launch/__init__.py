"""How do we start SGLang and keep it alive? Profiles, flags, the command, the supervisor, its log.

Knows SGLang's flags, words and processes; does not know what the server is asked later. Imports client.
"""
