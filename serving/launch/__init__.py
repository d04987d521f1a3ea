"""How do we start SGLang and keep it alive? Profiles, flags, the command, the supervisor, its log."""
