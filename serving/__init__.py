"""How we talk to, start and watch an SGLang server. Knows no Prefect and no dataset."""
