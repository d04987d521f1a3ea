"""A preview as text for a terminal or a pipe.

Knows styles and how ids become text; does not know where they come from. Invariant: what is trained on stands
between ⟦ and ⟧, with or without colour, and nothing else does.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from tasks.prepare.preview import PROMPT, REPLACED, TRAINED, Shown

_LONGEST = 400  # ids of one kind in a row that are shown whole
_KEPT = 150  # of a longer stretch, at each end
_BROKEN = "\ufffd"  # what a part of a character is decoded to
_EDGES = {TRAINED: ("⟦", "⟧"), REPLACED: ("⟨", "⟩")}
_STYLES = {PROMPT: "dim", TRAINED: "bold green", REPLACED: "dim"}
_SPECIAL_STYLES = {PROMPT: "cyan", TRAINED: "bold reverse green", REPLACED: "cyan"}
# A row may hold what a terminal would obey: escape sequences, carriage returns.
_SPELLED_OUT = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class TokenView:
    """Makes text of ids, with special tokens in a style of their own."""

    def __init__(self, tokenizer: Any, decode: Callable[[Sequence[int]], str], *, whole: bool) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})  # <think> too, which is not marked special
        self._special = frozenset([*tokenizer.all_special_ids, *added])
        self._anchor = list(tokenizer.all_special_ids[:1])
        self._decode = decode
        self._whole = whole

    def to_text(self, shown: Shown) -> Text:
        """The title, the notes, and the ids as text; long stretches lose their middle."""
        text = Text()
        text.append(f"── {spell_out(shown.title)}", "bold")
        for note in shown.notes:
            text.append(f"\n{spell_out(note)}", "yellow")
        text.append("\n")
        places = np.flatnonzero(np.diff(shown.kinds)) + 1
        for start, end in itertools.pairwise([0, *places.tolist(), len(shown.ids)]):
            if start < end:
                self._add_stretch(text, shown.ids[start:end], int(shown.kinds[start]), shown.awaits_answer)
        if shown.awaits_answer:
            text.append("▌the target answers here", "bold green")
        return text

    def _add_stretch(self, text: Text, ids: Sequence[int], kind: int, is_plain: bool) -> None:
        opening, closing = _EDGES.get(kind, ("", ""))
        style = "" if is_plain and kind == PROMPT else _STYLES[kind]
        text.append(opening, "bold magenta")
        if self._whole or len(ids) <= _LONGEST:
            self._add_ids(text, ids, style, _SPECIAL_STYLES[kind])
        else:
            head, tail = self._find_ends(ids)
            self._add_ids(text, head, style, _SPECIAL_STYLES[kind])
            text.append(f" … {len(ids) - len(head) - len(tail):,} tokens … ", "yellow")
            self._add_ids(text, tail, style, _SPECIAL_STYLES[kind])
        text.append(closing, "bold magenta")

    def _find_ends(self, ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Both ends of a stretch, cut where no character is: one has four bytes at most."""
        heads = [ids[: _KEPT - n] for n in range(4)]
        tails = [ids[n - _KEPT :] for n in range(4)]
        head = next((one for one in heads if not self._to_string(one).endswith(_BROKEN)), heads[0])
        tail = next((one for one in tails if not self._to_string(one).startswith(_BROKEN)), tails[0])
        return head, tail

    def _add_ids(self, text: Text, ids: Sequence[int], style: str, special_style: str) -> None:
        for is_special, group in itertools.groupby(ids, self._special.__contains__):
            text.append(spell_out(self._to_string(group)), special_style if is_special else style)

    def _to_string(self, ids: Iterable[int]) -> str:
        """Decoded together, for a token may be half a character.

        And behind a special token, for some tokenizers drop a blank at the beginning of a text.
        """
        before = self._decode(self._anchor) if self._anchor else ""
        return self._decode([*self._anchor, *ids])[len(before) :]


def spell_out(text: str) -> str:
    """The text with control characters spelled out; line breaks and tabs stay."""
    return text.translate(_SPELLED_OUT)
