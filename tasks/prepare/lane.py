"""A lane: a size class of prompts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """Prompts of one size class: how many at once, and how long an answer may be (tokens)."""

    name: str
    concurrency: int
    max_new_tokens: int
