"""One answer in the making: what to ask llama.cpp next, and when it is finished.

Knows SGLang 0.5.23's rules of finishing and trimming; pure, knows no server and no thread.
Invariant: `output_ids` holds every sampled id up to and including the one that finished the answer.

An answer is sampled in segments of 32 ids on one slot whose KV cache carries over, so that it can be aborted
and streamed without llama.cpp's streaming. Greedy ids equal those of one long call.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from serving.embedded.backend import Segment
from serving.embedded.sampling import SamplingParams

SEGMENT_TOKENS = 32

Decode = Callable[[Sequence[int], bool], str]
"""Token ids and whether to skip special tokens, to text."""


class Decoding:
    """The state of one answer.

    Args:
        prompt: The prompt's ids.
        params: The request's sampling parameters.
        limit: The number of ids after which the answer is cut.
        decode: Turns ids into text.
        sample_index: Which of the `n` samples of a prompt this is; each has its own random numbers.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        limit: int,
        decode: Decode,
        sample_index: int = 0,
    ) -> None:
        self.output_ids: list[int] = []
        self.finish_reason: dict[str, Any] | None = {"type": "length", "length": 0} if limit == 0 else None
        self._prompt = list(prompt)
        self._params = params
        self._fixed = params.to_llama()
        self._limit = limit
        self._decode = decode
        seed = params.sampling_seed
        self._seed = os.urandom(16).hex() if seed is None else f"{seed}:{sample_index}"
        # A token is at least one byte, so a stop string lies within its last so many tokens.
        self._tail = 1 + max((len(text.encode()) for text in params.stop), default=0)

    @property
    def all_ids(self) -> list[int]:
        """The prompt and what has been sampled so far."""
        return self._prompt + self.output_ids

    def next_body(self) -> dict[str, Any]:
        """Return the body of the next call to llama.cpp, without the slot."""
        done = len(self.output_ids)
        body = {**self._fixed, "prompt": self.all_ids, "seed": self._segment_seed(done)}
        if self._params.penalises:
            # SGLang's penalties look at the answer alone, llama.cpp's at its last `repeat_last_n` tokens
            # of prompt and answer. They agree only when that number is set anew for every token.
            return {**body, "n_predict": 1, "repeat_last_n": done}
        return {**body, "n_predict": min(SEGMENT_TOKENS, self._limit - done)}

    def feed(self, segment: Segment) -> None:
        """Take a segment in, and decide whether the answer is finished."""
        for token in segment.tokens:
            self.output_ids.append(token)
            self._check(token)
            if self.finish_reason is not None:
                return
        if segment.ended_by_model:
            self.finish_reason = {"type": "stop", "matched": self.output_ids[-1]}
        elif len(self.output_ids) >= self._limit:
            self.finish_reason = {"type": "length", "length": len(self.output_ids)}

    def abort(self) -> None:
        """Finish the answer as aborted, with what there is."""
        self.finish_reason = {
            "type": "abort",
            "message": "Aborted",
            "status_code": None,
            "err_type": None,
        }

    def text(self) -> str:
        """Return the text, without special tokens and without what stopped it.

        While the answer is unfinished, the bytes of an incomplete last character are held back.
        """
        ids = self.output_ids
        matched = None if self.finish_reason is None else self.finish_reason.get("matched")
        if isinstance(matched, int) and not self._params.no_stop_trim:
            ids = ids[:-1]
        text = self._decode(ids, self._params.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            end = text.index(matched) + (len(matched) if self._params.no_stop_trim else 0)
            text = text[:end]
        return text.rstrip("\ufffd") if self.finish_reason is None else text

    def _check(self, token: int) -> None:
        if self._params.stop:
            tail = self._decode(self.output_ids[-self._tail :], False)
            for stop in self._params.stop:
                if stop in tail:
                    self.finish_reason = {"type": "stop", "matched": stop}
                    return
        if token in self._params.stop_token_ids and not self._params.ignore_eos:
            self.finish_reason = {"type": "stop", "matched": token}

    def _segment_seed(self, offset: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{offset}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) & 0x7FFFFFFF
