"""From a response to a training sample: which tokens the drafter is trained on.

Knows ids and counts; does not know files or formats. Invariant: `loss_mask` is 1 exactly on the
`output_ids` (stop token included), or on the `loss_spans` of a recorded conversation, position by position:
not shifted, nothing cut, nothing added.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tasks.records.rows import SEQUENCES, Response, read_turn

Inexact = Literal[
    "no_ids", "not_token_ids", "prompt_tokens_differ", "completion_tokens_differ", "bad_loss_spans"
]  # stable codes: they are counted in the manifest


_MIN_SEEN = 2  # array takes true and false for 1 and 0


class NotTokenExact(ValueError):
    """A response whose ids are missing or do not add up; `reason` is a stable code."""

    def __init__(self, reason: Inexact, message: str) -> None:
        super().__init__(message)
        self.reason: Inexact = reason


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One generation, or several turns of one conversation, as a trainer reads it.

    `input_ids` int32 (seq_len,): prompts and answers. `loss_mask` uint8 (seq_len,): 1 on the answers.
    `n_loss` is how many ones it has.
    """

    id: str
    turn: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    n_loss: int
    finish_reason: str

    @property
    def n_tokens(self) -> int:
        """The sequence length."""
        return len(self.input_ids)

    @property
    def output_ids(self) -> np.ndarray:
        """The ids under the mask, int32 (n_loss,)."""
        answer: np.ndarray = self.input_ids[self.loss_mask == 1]
        return answer


def samples_from_response(response: Response) -> list[Sample]:
    """The samples of a row: one, or those of a finished conversation, whose row has `sequences`.

    Each of these has `turn`, `input_ids` and `loss_spans`, half-open parts of `input_ids`.

    Raises:
        NotTokenExact: as sample_from_response; nothing of the row is taken then.
    """
    if SEQUENCES not in response.extra:
        return [sample_from_response(response)]
    samples = [sample_from_response(_to_row(response, sequence)) for sequence in _list_sequences(response)]
    trained = sum(sample.n_loss for sample in samples)
    if trained != response.completion_tokens:
        raise NotTokenExact(
            "completion_tokens_differ",
            f"response {response.id!r}: {trained} generated ids, not {response.completion_tokens}",
        )
    return samples


def sample_from_response(response: Response) -> Sample:
    """Mask a response.

    A row of a recorded conversation has `loss_spans`, [start, end] each, with the whole sequence as its
    `input_ids` and no `output_ids`.

    Raises:
        NotTokenExact: ids are missing or are no token ids, spans are no ascending parts of the sequence,
            or the number of ids is not what was counted.
    """
    if response.input_ids is None or response.output_ids is None:
        raise NotTokenExact("no_ids", f"response {response.id!r} has no token ids")
    ids, n_prompt, n_output = _join_ids(response.id, response.input_ids, response.output_ids)
    spans = [(n_prompt, len(ids))]
    if "loss_spans" in response.extra:
        if n_output:
            raise NotTokenExact("bad_loss_spans", f"response {response.id!r} has loss_spans and output_ids")
        spans = _check_spans(response.id, response.extra["loss_spans"], len(ids))
        n_output = sum(end - start for start, end in spans)
        n_prompt = len(ids) - n_output
    if n_output != response.completion_tokens:
        raise NotTokenExact(
            "completion_tokens_differ",
            f"response {response.id!r}: {n_output} generated ids, not {response.completion_tokens}",
        )
    if n_prompt != response.prompt_tokens:
        raise NotTokenExact(
            "prompt_tokens_differ",
            f"response {response.id!r}: {n_prompt} ids of prompts, not {response.prompt_tokens}",
        )
    loss_mask = _build_mask(spans, len(ids))
    return Sample(response.id, response.turn, ids, loss_mask, n_output, response.finish_reason)


def _list_sequences(response: Response) -> list[Mapping[str, Any]]:
    sequences = response.extra[SEQUENCES]
    if not isinstance(sequences, list) or not all(isinstance(one, Mapping) for one in sequences):
        raise NotTokenExact("bad_loss_spans", f"response {response.id!r} has no list of sequences")
    return sequences


def _to_row(response: Response, sequence: Mapping[str, Any]) -> Response:
    """A sequence as a row of its own."""
    ids, spans = sequence.get("input_ids"), sequence.get("loss_spans")
    try:
        turn = read_turn(sequence)
    except ValueError as exc:
        raise NotTokenExact("bad_loss_spans", f"response {response.id!r}: {exc}") from exc
    n_ids = len(ids) if isinstance(ids, list | np.ndarray) else 0
    checked = _check_spans(response.id, spans, n_ids)
    trained = sum(end - start for start, end in checked)
    return replace(
        response,
        turn=turn,
        input_ids=ids,
        output_ids=[],
        prompt_tokens=n_ids - trained,
        completion_tokens=trained,
        extra={"loss_spans": spans},
    )


def _check_spans(name: str, spans: Any, n_ids: int) -> list[tuple[int, int]]:
    """The spans, when they are ascending and disjoint parts of the sequence."""
    reached = 0
    for span in spans if isinstance(spans, list) else [spans]:
        match span:
            case [start, end] if type(start) is type(end) is int and reached <= start < end <= n_ids:
                reached = end
            case _:
                raise NotTokenExact(
                    "bad_loss_spans",
                    f"response {name!r}: {span!r} is no part of {n_ids} ids behind place {reached}",
                )
    return [(start, end) for start, end in spans]


def _build_mask(spans: Sequence[tuple[int, int]], n_ids: int) -> np.ndarray:
    """Made of bytes: numpy lets go of the interpreter for each span, and has to wait to get it back."""
    parts, reached = [], 0
    for start, end in spans:
        parts += [bytes(start - reached), b"\1" * (end - start)]
        reached = end
    return np.frombuffer(b"".join([*parts, bytes(n_ids - reached)]), np.uint8)


def _join_ids(
    name: str, prompt: list[int] | np.ndarray, output: list[int] | np.ndarray
) -> tuple[np.ndarray, int, int]:
    if isinstance(prompt, np.ndarray) and isinstance(output, np.ndarray | list):
        # int64, and a row without answers of its own has a list of none
        both = (prompt, np.asarray(output, np.int64))
        if any(int(np.bitwise_or.reduce(ids)) >> 31 for ids in both):  # of a negative id it is below 0
            raise NotTokenExact("not_token_ids", f"response {name!r}: an id is no 32-bit number from 0 on")
        return np.concatenate(both, dtype=np.int32, casting="unsafe"), len(prompt), len(output)
    try:
        # array refuses floats, strings and what 32 bits cannot hold; numpy would cut 1.5 to 1 silently
        joined = array("i", prompt)
        n_prompt = len(joined)
        joined.extend(array("i", output))
    except (TypeError, OverflowError) as exc:
        raise NotTokenExact("not_token_ids", f"response {name!r}: {exc}") from exc
    ids = np.frombuffer(joined, np.int32)
    least = int(ids.min()) if len(ids) else _MIN_SEEN
    if least < 0:
        raise NotTokenExact("not_token_ids", f"response {name!r}: a negative id")
    if least < _MIN_SEEN and any(bool in set(map(type, part)) for part in (prompt, output)):
        raise NotTokenExact("not_token_ids", f"response {name!r}: an id is true or false")
    return ids, n_prompt, len(ids) - n_prompt
