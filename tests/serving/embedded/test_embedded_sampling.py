"""The sampling parameters of the embedded engine."""

from __future__ import annotations

import pytest

from serving.embedded.errors import ContractError, RequestError
from serving.embedded.sampling import parse_sampling_params


def parse(**raw):
    return parse_sampling_params(raw, vocab_size=100)


def test_absent_max_new_tokens_means_128_as_in_sglang():
    """Without max_new_tokens the answer is cut at 128, and null asks for all that fits."""
    assert parse().max_new_tokens == 128
    assert parse(max_new_tokens=None).max_new_tokens is None
    assert parse(max_new_tokens=7).max_new_tokens == 7


def test_null_means_the_default():
    """A null parameter is the same as an absent one."""
    assert parse(temperature=None, top_p=None, stop=None, ignore_eos=None) == parse()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 5),
        ("Temperature", 1.0),
        ("temperature", "1"),
        ("top_k", 1.5),
        ("top_k", True),
        ("ignore_eos", 1),
        ("stop", 5),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
    ],
)
def test_unknown_names_and_wrong_types_break_the_contract(name, value):
    """An unknown parameter or a mistyped one is refused with `error` as a string that names it."""
    with pytest.raises(ContractError) as caught:
        parse(**{name: value})
    assert name in caught.value.body()["error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 2),
        ("top_k", 0),
        ("top_k", -2),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("max_new_tokens", -1),
        ("n", 0),
        ("n", 1000),
        ("stop", ["x"] * 33),
        ("logit_bias", {"100": 1.0}),
        ("min_new_tokens", 3),
        ("beam_width", 2),
        ("json_schema", "{}"),
        ("regex", "a+"),
        ("ebnf", "root ::= x"),
        ("structural_tag", "x"),
        ("stop_regex", "a"),
        ("custom_params", {"a": 1}),
    ],
)
def test_out_of_range_and_unsupported_values_are_refused(name, value):
    """A value that SGLang would refuse, or that the engine cannot honour, is a 400 that names it."""
    with pytest.raises(RequestError) as caught:
        parse(**{name: value})
    assert not isinstance(caught.value, ContractError)
    assert name in caught.value.body()["error"]["message"].replace("stop strings", "stop")


def test_neutral_values_of_unsupported_parameters_are_accepted():
    """Clients that always send every parameter are not punished for it."""
    assert parse(min_new_tokens=0, beam_width=1, regex=None, json_schema="", stream_interval=4) == parse()


def test_llama_samples_in_sglangs_order():
    """The temperature comes before top-k, top-p and min-p, and llama.cpp's other samplers are off."""
    body = parse(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1).to_llama()
    assert body["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (0.7, 0, 0.9, 0.1)


def test_a_tiny_temperature_is_greedy():
    """Below 1e-6 SGLang samples greedily, and so does the engine."""
    assert parse(temperature=1e-7).to_llama()["temperature"] == 0.0
    assert parse(temperature=1e-5).to_llama()["temperature"] == 1e-5
