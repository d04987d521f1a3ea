"""How far a dataset is: what the response log says, in a form that is cheap to save and to extend.

Knows which prompts are done and the running totals; does not know files or Prefect. Invariant:
`Progress` built from a checkpoint plus the tail of the log equals `Progress` built from the whole log.
"""

import base64
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.records.rows import Rejected, Response

CHECKPOINT_FORMAT = 2
_CHUNK = 4096  # positions looked at together: a long stretch of done ones costs 1 ms a million

_CHECKPOINT_FIELDS = (
    *("format", "prompts_key", "prompts", "byte_offset", "rejected_offset", "rows", "prompt_tokens"),
    *("completion_tokens", "duplicates", "finish_reasons", "rejected", "done", "set_aside", "updated_at"),
)


class CheckpointMismatchError(ValueError):
    """A checkpoint that does not belong to these files; the caller scans everything instead."""


@dataclass(slots=True)
class Progress:
    """Totals of one dataset's log and a bitmap over its prompt order.

    `done` is uint8 (prompts,): 1 where a response is on disk. `set_aside` is uint8 (prompts,): 1 where
    the prompt is rejected for good. `lengths` is what the length forecast keeps of the answers so far.
    """

    done: np.ndarray
    set_aside: np.ndarray
    byte_offset: int = 0
    rejected_offset: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    duplicates: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    _reopened: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._reopened = np.zeros_like(self.set_aside)

    @classmethod
    def empty(cls, prompts: int) -> "Progress":
        """Nothing done yet."""
        return cls(done=np.zeros(prompts, np.uint8), set_aside=np.zeros(prompts, np.uint8))

    def add_response(self, response: Response, *, position: int | None, byte_offset: int) -> bool:
        """Count a row that is on disk up to byte_offset; False when its prompt was done already.

        A row whose prompt is not in the prompt file (the source was changed) counts its tokens too.
        """
        self.byte_offset = byte_offset
        if position is not None:
            if self.done[position]:
                self.duplicates += 1
                return False
            self.done[position] = 1
            self.set_aside[position] = 0
        self.rows += 1
        self.prompt_tokens += response.prompt_tokens
        self.completion_tokens += response.completion_tokens
        self.finish_reasons[response.finish_reason] += 1
        return True

    def add_rejected(self, rejected: Rejected, *, position: int | None, byte_offset: int) -> None:
        """Count a line of rejected.jsonl; permanent ones are not asked again."""
        self.rejected_offset = byte_offset
        self.rejected[rejected.reason] += 1
        if position is not None and rejected.permanent and not self.done[position]:
            self.set_aside[position] = 1
            self._reopened[position] = 0

    def is_open(self, position: int) -> bool:
        """Whether the prompt at a position still needs an answer."""
        return not (self.done[position] or (self.set_aside[position] and not self._reopened[position]))

    def find_open(self, start: int, *, limit: int, skip: np.ndarray | None = None) -> list[int]:
        """The first `limit` open positions from `start` on, or all there are; as `is_open` says now.

        `skip` is uint8 (prompts,): 1 where a position is passed over.
        """
        found: list[int] = []
        while start < len(self.done) and len(found) < limit:
            part = slice(start, start + _CHUNK)
            closed = self._closed(part)
            open_here = np.flatnonzero((closed if skip is None else closed | skip[part]) == 0)
            found += (open_here[: limit - len(found)] + start).tolist()
            start += _CHUNK
        return found

    def open_flags(self) -> np.ndarray:
        """uint8 (prompts,): 1 where a position is open."""
        flags: np.ndarray = 1 - self._closed(slice(None))
        return flags

    def reopen_set_aside(self) -> None:
        """Ask once more, in this process only, what was rejected for good; checkpoints do not tell."""
        self._reopened = self.set_aside.copy()

    @property
    def open_prompts(self) -> int:
        """How many prompts still need an answer."""
        return int(len(self.done) - np.count_nonzero(self._closed(slice(None))))

    def _closed(self, part: slice) -> np.ndarray:
        closed: np.ndarray = self.done[part] | (self.set_aside[part] & (1 - self._reopened[part]))
        return closed

    def to_checkpoint(self, *, prompts_key: str, updated_at: str) -> dict[str, Any]:
        """A JSON-able snapshot with its digest; `prompts_key` names the prompt file it belongs to."""
        snapshot = {
            "format": CHECKPOINT_FORMAT,
            "prompts_key": prompts_key,
            "prompts": len(self.done),
            "byte_offset": self.byte_offset,
            "rejected_offset": self.rejected_offset,
            "rows": self.rows,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "duplicates": self.duplicates,
            "finish_reasons": dict(self.finish_reasons),
            "rejected": dict(self.rejected),
            "done": _pack(self.done),
            "set_aside": _pack(self.set_aside),
            "updated_at": updated_at,
        }
        return {**snapshot, "sha256": _hash_snapshot(snapshot)}

    @classmethod
    def from_checkpoint(cls, data: Mapping[str, Any], *, prompts_key: str, prompts: int) -> "Progress":
        """Read a snapshot back.

        Raises:
            CheckpointMismatchError: another prompt file or format, or a damaged snapshot.
        """
        if data.get("format") != CHECKPOINT_FORMAT:
            raise CheckpointMismatchError(f"checkpoint format {data.get('format')!r} is not known here")
        if data.get("prompts_key") != prompts_key or data.get("prompts") != prompts:
            raise CheckpointMismatchError("the checkpoint belongs to other prompts")
        if data.get("sha256") != _hash_snapshot(data):
            raise CheckpointMismatchError("the checkpoint is damaged: its digest does not match")
        try:
            return cls(
                done=_unpack(data["done"], prompts),
                set_aside=_unpack(data["set_aside"], prompts),
                byte_offset=int(data["byte_offset"]),
                rejected_offset=int(data["rejected_offset"]),
                rows=int(data["rows"]),
                prompt_tokens=int(data["prompt_tokens"]),
                completion_tokens=int(data["completion_tokens"]),
                duplicates=int(data["duplicates"]),
                finish_reasons=Counter({str(k): int(v) for k, v in data["finish_reasons"].items()}),
                rejected=Counter({str(k): int(v) for k, v in data["rejected"].items()}),
            )
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as exc:
            raise CheckpointMismatchError(f"the checkpoint is damaged: {exc!r}") from exc


def _hash_snapshot(snapshot: Mapping[str, Any]) -> str:
    """SHA-256 over the fields of `to_checkpoint`; what others keep beside them does not count."""
    own = {name: snapshot.get(name) for name in _CHECKPOINT_FIELDS}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def _pack(flags: np.ndarray) -> str:
    return base64.b85encode(zlib.compress(np.packbits(flags).tobytes(), level=1)).decode()


def _unpack(text: str, count: int) -> np.ndarray:
    packed = zlib.decompress(base64.b85decode(text))
    if len(packed) != (count + 7) // 8:  # unpackbits fills up what is missing with zeros
        raise ValueError(f"{len(packed)} bytes of flags where {count} flags were expected")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count)
