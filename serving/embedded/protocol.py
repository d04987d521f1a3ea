"""The JSON of `/generate` and of the information endpoints, as SGLang 0.5.23 speaks it.

Knows the wire's names and shapes; knows no socket.
Invariant: a body is turned into requests whole or refused whole, and every answer carries all of its ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from serving.embedded.engine import Answer, Engine, Request
from serving.embedded.errors import RequestError, SchemaError
from serving.embedded.model import ModelFiles
from serving.embedded.sampling import parse_sampling_params

_MAX_BATCH = 1024
_UNSUPPORTED = (
    "image_data",
    "audio_data",
    "video_data",
    "input_embeds",
    "return_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "custom_logit_processor",
    "lora_path",
    "session_params",
)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One POST to `/generate`."""

    requests: list[Request]
    single: bool
    """Answer with an object, not with a list."""
    stream: bool
    return_prompt_token_ids: bool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """How the served model is called, for the information endpoints."""

    name: str
    files: ModelFiles
    model_type: str | None
    architectures: list[str] | None


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Decode a request body; an empty one counts as an empty object.

    Raises:
        SchemaError: it is not a JSON object.
    """
    try:
        value = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError as exc:
        raise SchemaError(f"the body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise SchemaError(f"the body is a JSON {type(value).__name__}, expected an object")
    return value


def parse_generate(body: Mapping[str, Any], engine: Engine) -> GenerateCall:
    """Turn a `/generate` body into requests; unknown top-level fields are ignored, as SGLang does.

    Raises:
        SchemaError: `input_ids` or `text` has the wrong type.
        RequestError: there is no input, or the engine cannot do what is asked.
    """
    asked = [name for name in _UNSUPPORTED if body.get(name)]
    if asked:
        raise RequestError(f"the embedded engine does not support {', '.join(asked)}")
    prompts, single = _parse_prompts(body, engine)
    raw_params = body.get("sampling_params")
    per_prompt = raw_params if isinstance(raw_params, list) else [raw_params] * len(prompts)
    if len(per_prompt) != len(prompts):
        raise RequestError(f"{len(per_prompt)} sampling_params were given for {len(prompts)} prompts")
    params = [parse_sampling_params(raw, vocab_size=engine.vocab_size) for raw in per_prompt]
    samples = [(index, sample) for index, each in enumerate(params) for sample in range(each.n)]
    single = single and len(samples) == 1
    stream = bool(body.get("stream"))
    if stream and not single:
        raise RequestError("the embedded engine streams one answer at a time")
    if len(samples) > _MAX_BATCH:
        raise RequestError(
            f"a batch may ask for {_MAX_BATCH} answers at most, this one asks for {len(samples)}"
        )
    rids = _parse_rids(body.get("rid"), len(samples), single)
    requests = [
        Request(rid, prompts[index], params[index], sample)
        for rid, (index, sample) in zip(rids, samples, strict=True)
    ]
    return GenerateCall(requests, single, stream, bool(body.get("return_prompt_token_ids")))


def answer_json(answer: Answer, request: Request, *, return_prompt_token_ids: bool = False) -> dict[str, Any]:
    """Return the JSON of an answer, or of its part so far."""
    decoding_s = answer.total_s - answer.first_token_s
    body: dict[str, Any] = {
        "text": answer.text,
        "output_ids": answer.output_ids,
        "meta_info": {
            "id": answer.rid,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.output_ids),
            "cached_tokens": answer.cached_tokens,
            "reasoning_tokens": 0,
            "num_retractions": 0,
            "queue_time": answer.queue_s,
            "e2e_latency": answer.total_s,
            "first_token_latency": answer.first_token_s,
            "decode_throughput": len(answer.output_ids) / decoding_s if decoding_s > 0 else 0.0,
            "weight_version": "default",
            "dp_rank": None,
        },
    }
    if return_prompt_token_ids:
        body["prompt_token_ids"] = request.input_ids
    return body


def model_info(served: ServedModel) -> dict[str, Any]:
    """Return the body of `/model_info`."""
    return {
        "model_path": str(served.files.gguf),
        "served_model_name": served.name,
        "tokenizer_path": str(served.files.tokenizer_dir),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "gguf",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": served.model_type,
        "architectures": served.architectures,
    }


def server_info(served: ServedModel, engine: Engine, version: str) -> dict[str, Any]:
    """Return the body of `/server_info`; there is no key or command line in it to leak."""
    return {
        "model_path": str(served.files.gguf),
        "served_model_name": served.name,
        "tokenizer_path": str(served.files.tokenizer_dir),
        "context_length": engine.context_length,
        "max_running_requests": engine.slots,
        "max_total_num_tokens": engine.context_length * engine.slots,
        "max_req_input_len": engine.context_length - 1,
        "device": "cpu",
        "load_format": "gguf",
        "dp_size": 1,
        "tp_size": 1,
        "version": version,
        "internal_states": [{"gen_throughput": engine.load().tokens_per_s}],
    }


def models_list(served: ServedModel, engine: Engine) -> dict[str, Any]:
    """Return the body of `/v1/models`."""
    card = {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "draftmill",
        "root": served.name,
        "parent": None,
        "max_model_len": engine.context_length,
    }
    return {"object": "list", "data": [card]}


def loads(engine: Engine, version: str) -> dict[str, Any]:
    """Return the body of `/v1/loads`: the only rank there is."""
    load = engine.load()
    capacity = engine.context_length * engine.slots
    rank = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens,
        "max_total_num_tokens": capacity,
        "max_running_requests": engine.slots,
        "token_usage": load.used_tokens / capacity,
        "gen_throughput": load.tokens_per_s,
        "utilization": load.running / engine.slots,
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": version,
        "accelerator": "cpu",
        "num_accelerators": 1,
        "loads": [rank],
    }


def _parse_prompts(body: Mapping[str, Any], engine: Engine) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is not None:  # `text` beside it is ignored, as SGLang does
        if _is_ids(ids):
            return [ids], True
        if isinstance(ids, list) and all(_is_ids(item) for item in ids):
            return ids, False
        raise SchemaError("input_ids must be a list of integers, or a list of such lists")
    if isinstance(text, str):
        return [engine.encode(text)], True
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return [engine.encode(item) for item in text], False
    if text is not None:
        raise SchemaError("text must be a string or a list of strings")
    raise RequestError("Either text or input_ids should be provided.")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse_rids(rid: Any, count: int, single: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{index}" for index in range(count)]
    if isinstance(rid, list) and len(rid) == count and all(isinstance(item, str) for item in rid):
        return rid
    raise RequestError(f"rid must be a string, or a list of {count} strings")
