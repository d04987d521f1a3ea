"""SGLang's sampling parameters: checked, and said in llama.cpp's words.

Knows both vocabularies and SGLang 0.5.23's ranges; knows no HTTP and no request.
Invariant: a parameter is honoured or refused with 400, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.embedded.errors import ContractError, RequestError

DEFAULT_MAX_NEW_TOKENS = 128
"""What SGLang uses, without a word, when `max_new_tokens` is absent."""

_GREEDY_BELOW = 1e-6
_TOP_K_ALL = 1 << 30
_MAX_STOP_STRINGS = 32
_MAX_SAMPLES = 64

_INTEGERS = frozenset({"max_new_tokens", "min_new_tokens", "top_k", "n", "beam_width", "sampling_seed"})
_NUMBERS = frozenset(
    {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
)
_FLAGS = frozenset({"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
_GRAMMARS = frozenset({"json_schema", "regex", "ebnf", "structural_tag", "stop_regex"})
_OTHERS = frozenset({"stop", "stop_token_ids", "logit_bias", "stream_interval", "custom_params", "watermark"})
_TAKEN_AS_THEY_ARE = (_NUMBERS | _FLAGS | {"top_k", "n", "sampling_seed"}) - {"spaces_between_special_tokens"}
_KNOWN = _INTEGERS | _NUMBERS | _FLAGS | _GRAMMARS | _OTHERS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling parameters, within range."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    """None asks for as many as the context holds."""
    max_new_tokens_given: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    def to_llama(self) -> dict[str, Any]:
        """Return the part of a llama.cpp `/completion` body that does not change from segment to segment."""
        greedy = self.temperature < _GREEDY_BELOW
        return {
            "temperature": 0.0 if greedy else self.temperature,
            "top_k": 0 if not 1 <= self.top_k < _TOP_K_ALL else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            # SGLang divides by the temperature first; llama.cpp would do it last, which changes top-p.
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "ignore_eos": self.ignore_eos,
            "logit_bias": [list(pair) for pair in self.logit_bias],
        }


def parse_sampling_params(raw: Any, *, vocab_size: int) -> SamplingParams:
    """Check the `sampling_params` object of one request.

    Raises:
        ContractError: a name is unknown or a value has the wrong type.
        RequestError: a value is out of range, or the engine cannot do what it asks.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise ContractError(f"invalid type: {type(raw).__name__}, expected sampling_params as an object")
    for name, value in raw.items():
        _check_type(name, value)
    given = {name: value for name, value in raw.items() if value is not None}
    _refuse_unsupported(given)
    params = SamplingParams(
        max_new_tokens=raw.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        max_new_tokens_given="max_new_tokens" in given,
        stop=_strings(given.get("stop", ())),
        stop_token_ids=frozenset(given.get("stop_token_ids", ())),
        logit_bias=_biases(given.get("logit_bias", {}), vocab_size),
        **{name: given[name] for name in _TAKEN_AS_THEY_ARE & given.keys()},
    )
    _check_ranges(params)
    return params


def _check_type(name: str, value: Any) -> None:
    if name not in _KNOWN:
        listed = ", ".join(f"`{known}`" for known in sorted(_KNOWN))
        raise ContractError(f"unknown field `{name}`, expected one of {listed}")
    if value is None:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    expected = ""
    if name in _INTEGERS and not is_integer:
        expected = "an integer"
    elif name in _NUMBERS and not (is_integer or isinstance(value, float)):
        expected = "a number"
    elif name in _FLAGS and not isinstance(value, bool):
        expected = "a boolean"
    elif name == "stop" and not (isinstance(value, str) or _is_list_of(value, str)):
        expected = "a string or a list of strings"
    elif name == "stop_token_ids" and not _is_list_of(value, int):
        expected = "a list of integers"
    elif name == "logit_bias" and not isinstance(value, Mapping):
        expected = "an object of numbers by token id"
    if expected:
        raise ContractError(f"invalid type: {type(value).__name__} for `{name}`, expected {expected}")


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    asked = [name for name in (*sorted(_GRAMMARS), "custom_params", "watermark") if given.get(name)]
    if given.get("min_new_tokens"):
        asked.append("min_new_tokens")
    if given.get("beam_width", 1) != 1:
        asked.append("beam_width")
    if asked:
        raise RequestError(f"the embedded engine does not support {', '.join(asked)}")


def _check_ranges(params: SamplingParams) -> None:
    wrong = ""
    if not math.isfinite(params.temperature) or params.temperature < 0:
        wrong = f"temperature must be a non-negative finite number, got {params.temperature}."
    elif not 0 < params.top_p <= 1:
        wrong = f"top_p must be in (0, 1], got {params.top_p}."
    elif not 0 <= params.min_p <= 1:
        wrong = f"min_p must be in [0, 1], got {params.min_p}."
    elif params.top_k != -1 and params.top_k < 1:
        wrong = f"top_k must be -1 (disable) or at least 1, got {params.top_k}."
    elif not -2 <= params.frequency_penalty <= 2:
        wrong = f"frequency_penalty must be in [-2, 2], got {params.frequency_penalty}."
    elif not -2 <= params.presence_penalty <= 2:
        wrong = f"presence_penalty must be in [-2, 2], got {params.presence_penalty}."
    elif not 0 < params.repetition_penalty <= 2:
        wrong = f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {params.repetition_penalty}."
    elif params.max_new_tokens is not None and params.max_new_tokens < 0:
        wrong = f"max_new_tokens must be at least 0, got {params.max_new_tokens}."
    elif not 1 <= params.n <= _MAX_SAMPLES:
        wrong = f"n must be in [1, {_MAX_SAMPLES}], got {params.n}."
    elif len(params.stop) > _MAX_STOP_STRINGS:
        wrong = f"at most {_MAX_STOP_STRINGS} stop strings are allowed, got {len(params.stop)}"
    if wrong:
        raise RequestError(wrong)


def _strings(value: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else tuple(value)
    return tuple(text for text in values if text)


def _biases(raw: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, value in raw.items():
        if not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise ContractError("invalid value for `logit_bias`, expected an object of numbers by token id")
        if int(key) >= vocab_size:
            raise RequestError(f"logit_bias must has keys in [0, {vocab_size - 1}], got {key}.")
        biases.append((int(key), float(value)))
    return tuple(biases)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
