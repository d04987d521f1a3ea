"""SGLang's /generate replies: which are believed, and what each error means."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.client.errors import (
    BadReply,
    ForeignIds,
    GenerationAborted,
    PromptRefused,
    RequestFailed,
    ServerBusy,
    ServerFailed,
    ServerMisconfigured,
    ServerUnreachable,
    ServingError,
)
from serving.client.protocol import GenerationRequest, read_error, read_generation, read_vocab_size

SERVER = "http://127.0.0.1:30000"
REQUEST = GenerationRequest(rid="r-1", input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 8})


def reply(*, meta=(), drop=(), **fields):
    """A good answer of two ids, with some of it changed or left out."""
    info = {
        "id": "r-1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "num_retractions": 0,
    }
    info.update(meta)
    whole = {"text": "hi", "output_ids": [131, 2], "meta_info": info, **fields}
    for name in drop:
        (whole if name in whole else info).pop(name)
    return orjson.dumps(whole)


def read(body):
    return read_generation(body, request=REQUEST, vocab_size=1024, server=SERVER)


def test_good_answer_is_read_whole():
    """Ids, text, finish reason and counts arrive as the server sent them."""
    answer = read(reply())
    assert answer.output_ids == [131, 2]
    assert (answer.text, answer.finish_reason) == ("hi", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 1)
    assert not answer.is_empty


def test_answer_cut_at_its_limit_is_a_good_answer():
    """`length` is kept and named."""
    answer = read(reply(meta={"finish_reason": {"type": "length", "length": 2}}))
    assert answer.finish_reason == "length"


def test_request_body_holds_exactly_what_the_server_knows():
    """A text beside input_ids would be ignored, so only the three fields are sent."""
    assert orjson.loads(REQUEST.to_body()) == {
        "rid": "r-1",
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 8},
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        reply()[: len(reply()) // 2],
        reply()[:-1],
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        reply(drop=["meta_info"]),
        reply(meta_info=None),
        reply(meta_info=[1]),
        orjson.dumps([orjson.loads(reply())]),
    ],
)
def test_half_or_foreign_json_is_a_bad_reply(body):
    """Whatever is not a whole object with meta_info is refused, and names the request."""
    with pytest.raises(BadReply, match="r-1"):
        read(body)


@pytest.mark.parametrize(
    "finish",
    [
        None,
        "",
        "abortion",
        {},
        {"type": None},
        {"type": "tool_calls"},
        {"type": ["stop"]},
        ["stop"],
        1,
        {"a": 1},
    ],
)
def test_unknown_finish_reason_is_a_bad_reply(finish):
    """A finish reason of any shape but stop and length is refused; null is the middle of a stream."""
    with pytest.raises(BadReply, match="finish_reason"):
        read(reply(meta={"finish_reason": finish}))


def test_missing_finish_reason_is_a_bad_reply():
    """A reply that does not say how it ended is refused."""
    with pytest.raises(BadReply, match="finish_reason"):
        read(reply(drop=["finish_reason"]))


@pytest.mark.parametrize("finish", [{"type": "abort", "message": "Aborted"}, {"type": "abort"}, "abort"])
@pytest.mark.parametrize("output_ids", [[131], [], None])
def test_abort_that_comes_as_200_is_never_an_answer(finish, output_ids):
    """An abort is told apart from garbage, whatever partial text comes with it."""
    with pytest.raises(GenerationAborted):
        read(reply(meta={"finish_reason": finish}, output_ids=output_ids))


@pytest.mark.parametrize(
    "ids",
    [
        None,
        "131,2",
        {"0": 131, "1": 2},
        [131.0, 2],
        [True, False],
        [131, None],
        ["131", "2"],
        [131, [2]],
        [131, -1],
        [131, 1 << 63],
    ],
)
def test_ids_that_are_not_the_models_are_a_bad_reply(ids):
    """Floats, bools, texts and numbers that no model has are refused."""
    with pytest.raises(BadReply, match="output_ids"):
        read(reply(output_ids=ids))


def test_ids_beyond_the_vocabulary_are_no_fault_of_the_prompt():
    """The server, the id and both sizes are named; the run stops, as nothing but a change can help."""
    with pytest.raises(ForeignIds) as caught:
        read(reply(output_ids=[131, 1500]))
    assert all(part in str(caught.value) for part in (SERVER, "the id 1500", "1,024 ids", "at least 1,501"))
    assert isinstance(caught.value, ServerMisconfigured)
    assert caught.value.requires_user_action


def test_an_answer_that_is_not_whole_says_nothing_of_the_vocabulary():
    """What is garbled is asked again."""
    with pytest.raises(BadReply, match="completion_tokens"):
        read(reply(output_ids=[131, 1500, 1]))


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (b'{"error":{"message":"logit_bias must has keys in [0, 383], got 2147483647."}}', 384),
        (
            b'{"error":{"message":"Only one of json_schema, regex, ebnf, or structural_tag can be set."}}',
            None,
        ),
        (b'{"error":{"message":"top_p must be in [0, 1], got 2."}}', None),
        (b"no JSON", None),
        (b"", None),
    ],
)
def test_the_vocabulary_is_read_out_of_a_refused_bias(body, size):
    """SGLang 0.5.23 names the last id; other refusals do not tell."""
    assert read_vocab_size(body) == size


def test_ids_at_the_ends_of_the_vocabulary_are_good():
    """0 and vocab_size - 1 are ids."""
    assert read(reply(output_ids=[0, 1023])).output_ids == [0, 1023]


@pytest.mark.parametrize("count", [1, 3, 0, None, "2", 2.0, [2]])
def test_count_that_differs_from_the_ids_is_a_bad_reply(count):
    """Server versions exist that put a piece of the prompt into output_ids."""
    with pytest.raises(BadReply, match="completion_tokens"):
        read(reply(meta={"completion_tokens": count}))


def test_bool_is_not_a_count():
    """JSON's true equals 1 in Python; it is not a number of tokens."""
    with pytest.raises(BadReply, match="completion_tokens"):
        read(reply(output_ids=[131], meta={"completion_tokens": True}))


@pytest.mark.parametrize("count", [2, 4, 0, None, "3", 3.0])
def test_prompt_tokens_that_differ_from_what_was_sent_are_a_bad_reply(count):
    """A server that saw another prompt did not answer ours."""
    with pytest.raises(BadReply, match="prompt_tokens"):
        read(reply(meta={"prompt_tokens": count}))


@pytest.mark.parametrize("name", ["completion_tokens", "prompt_tokens", "output_ids"])
def test_missing_count_or_ids_are_a_bad_reply(name):
    """Nothing that a row needs may be missing."""
    with pytest.raises(BadReply):
        read(reply(drop=[name]))


@pytest.mark.parametrize("cached", [None, "many", [1], {}, True])
def test_cached_tokens_never_cost_an_answer(cached):
    """A count that is only told may be anything; it then reads as 0."""
    assert read(reply(meta={"cached_tokens": cached})).cached_tokens == 0


def test_answer_without_text_is_good():
    """A server started with --skip-tokenizer-init sends no text; the ids are what counts."""
    assert read(reply(drop=["text"])).text == ""


@pytest.mark.parametrize(
    ("ids", "finish", "is_empty"),
    [
        ([], "stop", True),
        ([], "length", True),
        ([2], "stop", True),
        ([131], "length", False),
        ([131, 2], "stop", False),
    ],
)
def test_empty_answer_is_one_without_anything_but_the_stop_token(ids, finish, is_empty):
    """One id that reached its limit of one is not empty."""
    answer = read(
        reply(output_ids=ids, meta={"completion_tokens": len(ids), "finish_reason": {"type": finish}})
    )
    assert answer.is_empty is is_empty


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (400, PromptRefused, "http_400"),
        (413, PromptRefused, "http_413"),
        (422, PromptRefused, "http_422"),
        (401, ServerMisconfigured, None),
        (403, ServerMisconfigured, None),
        (404, ServerMisconfigured, None),
        (405, ServerMisconfigured, None),
        (408, ServerFailed, "server_failed"),
        (425, ServerFailed, "server_failed"),
        (429, ServerBusy, "server_busy"),
        (500, ServerFailed, "server_failed"),
        (502, ServerFailed, "server_failed"),
        (503, ServerUnreachable, "server_unreachable"),
        (504, ServerFailed, "server_failed"),
        (204, ServerFailed, "server_failed"),
    ],
)
def test_each_status_means_one_kind_of_error(status, kind, reason):
    """The status alone decides whether asking again can help."""
    error = read_error(status, b"{}", server=SERVER)
    assert type(error) is kind
    assert getattr(error, "reason", None) == reason
    assert getattr(error, "status", status) == status


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (400, {"error": {"message": "input is 600 tokens"}}, "input is 600 tokens"),
        (400, {"error": "unknown field top_q"}, "unknown field top_q"),
        (400, {"object": "error", "message": "bad JSON", "type": "Bad Request", "code": 400}, "bad JSON"),
        (503, {"object": "error", "message": "The request queue is full.", "type": "503"}, "queue is full"),
        (401, {"error": "Unauthorized"}, "Unauthorized"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (500, ["odd"], "odd"),
    ],
)
def test_servers_own_words_are_in_the_message(status, body, text):
    """All four shapes of SGLang's errors are read; the message names the server and the status."""
    message = str(read_error(status, orjson.dumps(body), server=SERVER))
    assert text in message
    assert SERVER in message
    assert str(status) in message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"object":"error","message":"The request queue is full.","type":"503","code":503}', ServerBusy),
        (b'{"error":{"type":"server_error","code":"no_available_workers","message":"x"}}', ServerUnreachable),
        (b"<html>503 Service Unavailable</html>", ServerUnreachable),
        (b"[]", ServerUnreachable),
    ],
)
def test_only_sglangs_own_503_is_a_full_queue(body, kind):
    """A router's says that no server is there, and so does a proxy's."""
    assert type(read_error(503, body, server=SERVER)) is kind


@pytest.mark.parametrize("body", [b"", b"<html>502 Bad Gateway</html>", b"\xff" * 10_000, b"x" * 10_000])
def test_error_without_json_still_makes_a_short_message(body):
    """A proxy's page, no body and binary are quoted in part."""
    assert len(str(read_error(502, body, server=SERVER))) < 400


def test_failures_that_blame_nobody_cost_no_attempt():
    """Only failures that may be the prompt's fault use up its attempts."""
    free = {kind for kind in RequestFailed.__subclasses__() if not kind.costs_attempt}
    assert {kind.__name__ for kind in free} == {"ServerUnreachable", "ServerBusy"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    [
        "output_ids",
        "meta_info",
        "text",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
    ]
)


@given(changes=st.dictionaries(fields, json_values, max_size=3))
def test_no_reply_whatsoever_escapes_the_checks(changes):
    """A 200 with any values in any field is a true answer or one of our errors, never another exception."""
    whole = orjson.loads(reply())
    for name, value in changes.items():
        (whole if name in whole else whole["meta_info"])[name] = value
        if not isinstance(whole["meta_info"], dict):
            break
    try:
        answer = read(orjson.dumps(whole))
    except ServingError:
        return
    assert len(answer.output_ids) == answer.completion_tokens
    assert answer.prompt_tokens == 3
    assert all(type(number) is int for number in (*answer.output_ids, answer.prompt_tokens))


@given(status=st.integers(201, 599), body=st.binary(max_size=60) | json_values.map(orjson.dumps))
def test_any_status_and_body_is_one_of_our_errors(status, body):
    """An error answer never raises while it is read."""
    assert isinstance(read_error(status, body, server=SERVER), ServingError)
