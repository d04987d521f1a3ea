"""JSON in and out with every digit of an integer.

Knows orjson, which is fast, reads an integer past 64 bits as a float and refuses to write one; does not know
what is read. Invariant: an integer comes out as it went in; all other values are as orjson has them.
"""

import json
import math
from typing import Any

import orjson

# From here on, up and down, orjson makes floats of integers.
_MAX_EXACT, _MIN_EXACT = 2.0**64, -(2.0**63)
_MAX_INTEGER, _MIN_INTEGER = 2**64 - 1, -(2**63)


def loads(text: bytes | str) -> Any:
    """Parse strictly; an integer of over 308 digits is no number to orjson.

    Raises:
        ValueError: the text is no JSON, or is nested too deep.
    """
    value = orjson.loads(text)
    try:
        return json.loads(text) if has_rounded(value) else value
    except RecursionError as exc:
        raise ValueError("it is nested too deep") from exc


def dumps(value: Any, option: int | None = None) -> bytes:
    """The JSON of a value.

    Raises:
        TypeError: it has none, or is nested too deep.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # for a long integer, or for what has no JSON at all
        return orjson.dumps(_spell_long(value), option=option)


def parse_float(text: str) -> float:
    """For Python's json: a number that is too large is an error, as orjson has it, and not infinity.

    Raises:
        ValueError: it is.
    """
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def has_rounded(value: Any) -> bool:
    """Whether there is a float in it that orjson may have made of an integer."""
    if type(value) is dict:
        value = value.values()
    elif type(value) is not list:
        return type(value) is float and (value >= _MAX_EXACT or value <= _MIN_EXACT)
    for one in value:  # noqa: SIM110  any() over a generator takes twice as long
        if type(one) is not str and has_rounded(one):
            return True
    return False


def is_long(value: int) -> bool:
    """Whether an integer has more than the 64 bits that most readers of JSON have for one."""
    return not _MIN_INTEGER <= value <= _MAX_INTEGER


def _spell_long(value: Any) -> Any:
    """The same with long integers as what orjson takes for their JSON."""
    try:
        if type(value) is int and is_long(value):
            float(value)  # raises where it could not be read again
            return orjson.Fragment(str(value).encode())
        if isinstance(value, dict):
            return {key: _spell_long(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [_spell_long(one) for one in value]
    except RecursionError as exc:
        raise TypeError("it is nested too deep") from exc
    except OverflowError as exc:
        raise TypeError("it has an integer of over 308 digits") from exc
    return value
