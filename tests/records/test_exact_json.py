"""JSON whose integers keep their digits."""

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.records import exact_json

LONG = 92233720368547760001
EDGES = [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, LONG, -LONG, 10**300]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(EDGES)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(value=JSON)
@example(value=[-0.0, 1e16, 1e300, 5e-324])
def test_a_value_comes_back_as_it_went_in(value):
    """Integers of any length stay integers, floats stay floats; repr tells 1 from 1.0 and 0.0 from -0.0."""
    assert repr(exact_json.loads(exact_json.dumps(value))) == repr(value)


@pytest.mark.parametrize(
    "number",
    [*map(str, EDGES), "1.10", "1E5", "-0.0", "-0", "0.1000000000000000055", "9.223372036854776e19", "1e-7"],
)
def test_a_number_is_what_python_reads(number):
    """However it is spelled."""
    text = f'{{"a": [{number}]}}'
    assert repr(exact_json.loads(text)) == repr(exact_json.loads(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text", ["1e400", "-1e400", "1" * 400, "NaN", '"\\ud800"', "{", "[" * 3000 + "]" * 3000]
)
def test_what_cannot_be_kept_is_an_error(text):
    """A number that would be infinity, half a character, more depth than there is stack."""
    with pytest.raises(ValueError, match=r".+"):
        exact_json.loads(text)


@pytest.mark.parametrize("value", ["\ud800", b"x", {1: 2}, [LONG, {2}], 10**309, -(10**400)])
def test_what_has_no_json_is_a_type_error(value):
    """As orjson has it, also beside a long integer."""
    with pytest.raises(TypeError):
        exact_json.dumps(value)


def test_deep_values_are_an_error_too():
    """And no end of the process, wherever the limit is."""
    deep = json.loads("[" * 900 + str(LONG) + "]" * 900)
    with pytest.raises(TypeError):
        exact_json.dumps(deep)


def test_options_and_fragments_are_orjsons():
    """Keys in order, a newline, JSON that was made before."""
    value = {"b": LONG, "a": orjson.Fragment(b"[1]")}
    option = orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    assert exact_json.dumps(value, option) == b'{"a":[1],"b":%d}\n' % LONG
