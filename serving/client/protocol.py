"""SGLang's /generate: what we send, what comes back, and when an answer may be believed.

Knows the wire of SGLang 0.5.23; does no I/O. Invariant: a `Generation` has
`len(output_ids) == completion_tokens`, ids inside the vocabulary and the prompt_tokens that were sent.
"""

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from serving.client.errors import (
    BadReply,
    ForeignIds,
    GenerationAborted,
    PromptRefused,
    ServerBusy,
    ServerFailed,
    ServerMisconfigured,
    ServerUnreachable,
    ServingError,
)

FINISH_REASONS = frozenset({"stop", "length"})
REFUSED = frozenset({400, 413, 422})
_MISCONFIGURED = frozenset({401, 403, 404, 405})
_VOCAB_RANGE = re.compile(r"logit_bias\b.*\[0, (\d+)\]")
# Of a rank of /v1/loads; its time stamp goes on in an idle server. decode_moments count steps.
_WORK = ("num_used_tokens", "total_prefill_uncached_tokens", "decode_moments")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt as ids, and how to sample its answer.

    `rid` must be new for every attempt: a concurrent duplicate is refused by the server.
    """

    rid: str
    input_ids: list[int]
    sampling_params: Mapping[str, Any]

    def to_body(self) -> bytes:
        """The JSON body of POST /generate."""
        return orjson.dumps(
            {"rid": self.rid, "input_ids": self.input_ids, "sampling_params": dict(self.sampling_params)}
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked answer; `output_ids` include the stop token, `text` leaves it out."""

    output_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def is_empty(self) -> bool:
        """Nothing was said: no ids, or only the stop token."""
        return self.completion_tokens == 0 or (self.completion_tokens == 1 and self.finish_reason == "stop")


def read_generation(body: bytes, *, request: GenerationRequest, vocab_size: int, server: str) -> Generation:
    """Check a 200 answer to `request` and read it.

    Raises:
        GenerationAborted: finish_reason is abort (SGLang sends it as a 200 with partial text).
        BadReply: anything else that is not a whole answer to this very request.
        ForeignIds: a whole answer, but with ids at or above vocab_size, which is no fault of the prompt.
    """

    def bad(what: str) -> BadReply:
        return BadReply(f"{server}: answer to {request.rid}: {what}", server=server, status=200)

    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise bad(f"not whole JSON ({exc}; {len(body)} bytes)") from exc
    if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
        raise bad("no meta_info")
    meta = reply["meta_info"]
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind == "abort":
        message = finish.get("message") if isinstance(finish, dict) else None
        raise GenerationAborted(
            f"{server}: {request.rid} was aborted by the server ({message})", server=server, status=200
        )
    if not isinstance(kind, str) or kind not in FINISH_REASONS:
        raise bad(f"finish_reason is {finish!r}")
    ids = reply.get("output_ids")
    prompt_tokens, completion_tokens = meta.get("prompt_tokens"), meta.get("completion_tokens")
    cached_tokens = meta.get("cached_tokens") or 0
    if not isinstance(ids, list) or (highest := _find_highest_id(ids)) is None:
        raise bad("output_ids are not a list of ids")
    if type(completion_tokens) is not int or len(ids) != completion_tokens:
        raise bad(f"{len(ids)} output_ids, but completion_tokens is {completion_tokens}")
    if type(prompt_tokens) is not int or prompt_tokens != len(request.input_ids):
        raise bad(f"prompt_tokens is {prompt_tokens}, but {len(request.input_ids)} ids were sent")
    if highest >= vocab_size:
        raise ForeignIds(
            f"{server}: an answer has the id {highest}, but the target has {vocab_size:,} ids: a model of at "
            f"least {highest + 1:,} answers there. No prompt is rejected for it. Correct server.base_urls, "
            "or set target.tokenizer to the served model's own (`draftmill check` compares them), then run "
            "the same command again"
        )
    return Generation(
        output_ids=ids,
        text=str(reply.get("text") or ""),
        finish_reason=kind,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens if type(cached_tokens) is int else 0,  # only told, never relied on
    )


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server says of itself, over all its ranks.

    `token_usage` is the fullest rank's share of KV tokens in use, 0 to 1. `work` changes when a token was
    made or a prompt was read, and with nothing else: it stands still in a frozen server and in an idle one.
    """

    running: int
    waiting: int
    max_running: int
    token_usage: float
    work: tuple[Any, ...]


def read_load(reply: Mapping[str, Any], *, server: str) -> ServerLoad:
    """Read an answer of /v1/loads (SGLang 0.5.23).

    Raises:
        BadReply: it is not one.
    """
    try:
        ranks = reply["loads"]
        return ServerLoad(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            max_running=sum(int(rank["max_running_requests"]) for rank in ranks),
            token_usage=max(float(rank["token_usage"]) for rank in ranks),
            work=tuple(
                (rank["num_running_reqs"], rank["num_waiting_reqs"], *(str(rank.get(name)) for name in _WORK))
                for rank in ranks
            ),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise BadReply(f"{server}: /v1/loads tells no load ({exc!r})", server=server, status=200) from exc


def read_vocab_size(body: bytes) -> int | None:
    """How many ids the served model has, out of the refusal of a logit_bias; None where it does not say."""
    found = _VOCAB_RANGE.search(_error_text(body))
    return int(found[1]) + 1 if found else None


def read_error(status: int, body: bytes, *, server: str) -> ServingError:
    """The error that an answer other than 200 means."""
    message = f"{server}: answered {status} ({_error_text(body)})"
    if status in REFUSED:
        return PromptRefused(message, server=server, status=status)
    if status in _MISCONFIGURED:
        return ServerMisconfigured(message)
    if status == 429 or (status == 503 and _is_sglangs(body)):
        return ServerBusy(message, server=server, status=status)
    if status == 503:  # a router without a server to pass the request on to, or a proxy
        return ServerUnreachable(message, server=server, status=status)
    return ServerFailed(message, server=server, status=status)


def _find_highest_id(ids: list[Any]) -> int | None:
    """The highest id, -1 of none; None where not all are ids. In C: it runs over every id that is made."""
    if not ids:
        return -1
    try:
        values = np.frombuffer(array("I", ids), np.uint32)  # refuses negative and huge ints, floats, None
    except (TypeError, OverflowError):
        return None
    # JSON's true and false pass for 1 and 0 there.
    if values.min() <= 1 and any(isinstance(one, bool) for one in ids):
        return None
    return int(values.max())


def _is_sglangs(body: bytes) -> bool:
    """Whether an error has the shape that SGLang gives its own; one that says 503 so has a full queue.

    smg 1.13 has `{"error": {"type": "server_error", "code": "no_available_workers", …}}`.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(reply, dict) and reply.get("object") == "error"


def _error_text(body: bytes) -> str:
    """The message out of SGLang's four error shapes; a head of the body when it is none of them."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:200].decode("utf-8", "replace") or "no body"
    if not isinstance(reply, dict):
        return str(reply)[:200]
    error = reply.get("error", reply.get("message", reply.get("detail", reply)))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:500]
