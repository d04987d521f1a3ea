"""The special tokens that a chat template uses, and those around a thought.

Knows tokenizers and templates; does not know servers. Invariant: a token named here occurs in the template,
or is one id of the tokenizer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOOKS_SPECIAL = re.compile(r"<\|[^\s|<>{}'\"]{1,60}\|>|</?think>|◁/?think▷")
_THOUGHTS = (  # how models open and close a thought: DeepSeek, Qwen and Kimi K2; Kimi-VL; Seed; Magistral
    ("<think>", "</think>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)
_SWITCHES = ("thinking", "enable_thinking")
_CLOSED_AT_ONCE = 3  # ids: a line break or two and the closing token are no thought


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """What opens and closes a thought, as ids."""

    name: str
    open_id: int
    close_id: int

    def is_open(self, input_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought, which its template has opened."""
        return _last(input_ids, self.open_id) > _last(input_ids, self.close_id)

    def has_thought(self, input_ids: Sequence[int], output_ids: Sequence[int]) -> bool:
        """Whether an answer, or at least its beginning, is thinking."""
        if self.open_id in output_ids:
            return True
        return self.is_open(input_ids) and self.close_id not in output_ids[:_CLOSED_AT_ONCE]


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text with nothing added, as a rendered prompt is tokenized."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def find_special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens of the tokenizer that its chat template names, and others that look like such."""
    template = _template_text(tokenizer.chat_template)
    named = [
        getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token") if name in template
    ]
    known = [token for token in _known_tokens(tokenizer) if token in template]
    return list(dict.fromkeys([*filter(None, named), *known, *_LOOKS_SPECIAL.findall(template)]))


def find_added_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that were added to the tokenizer's own vocabulary, with their ids."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return added


def find_split_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens of the chat template that their own tokenizer splits, with how many ids each is."""
    known = {token.strip() for token in _known_tokens(tokenizer)}
    counts = {
        token: len(encode_plain(tokenizer, token))
        for token in find_special_tokens(tokenizer)
        if token in known
    }
    return {token: count for token, count in counts.items() if count != 1}


def find_think_tokens(tokenizer: Any) -> ThinkTokens | None:
    """The pair that the tokenizer has as single ids; None for a model that does not think."""
    for opening, closing in _THOUGHTS:
        ids = [encode_plain(tokenizer, token) for token in (opening, closing)]
        if all(len(one) == 1 and one[0] != getattr(tokenizer, "unk_token_id", None) for one in ids):
            return ThinkTokens(opening, ids[0][0], ids[1][0])
    return None


def asks_to_think(chat_template_kwargs: Mapping[str, Any]) -> bool | None:
    """What a dataset's switch says; None when it has none."""
    for name in _SWITCHES:
        if isinstance(value := chat_template_kwargs.get(name), bool):
            return value
    return None


def _known_tokens(tokenizer: Any) -> list[str]:
    named = dict.fromkeys([*tokenizer.all_special_tokens, *find_added_tokens(tokenizer)])
    return [token for token in named if token.strip()]


def _template_text(template: Any) -> str:
    """A tokenizer may have one template or several by name."""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _last(ids: Sequence[int], wanted: int) -> int:
    return max((place for place, one in enumerate(ids) if one == wanted), default=-1)
