"""The embedded engine over real HTTP, held to what SGLang 0.5.23 does; the real model runs."""

from __future__ import annotations

import json
import socket
from itertools import pairwise

import httpx
import pytest
from transformers import AutoTokenizer

from serving.embedded.errors import EmbeddedError
from serving.embedded.server import EmbeddedHttpServer

pytestmark = pytest.mark.embedded

QUESTION = [{"role": "user", "content": "What is 2+2?"}]
ANSWER_IDS = [504, 2988, 288, 451, 8170, 4119, 1732, 314, 216, 36, 30, 2]
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 470}


@pytest.fixture(scope="module")
def tokenizer(engine):
    return AutoTokenizer.from_pretrained(engine.tokenizer_dir)


@pytest.fixture(scope="module")
def prompt(tokenizer) -> list[int]:
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)


def answer(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()


def test_the_known_answer_comes_back(engine, prompt, tokenizer):
    """The demo model answers "What is 2+2?" greedily with the ids that it always gives."""
    body = answer(engine.generate(prompt, rid="two-and-two", temperature=0))
    assert body["output_ids"] == ANSWER_IDS
    assert body["text"] == tokenizer.decode(ANSWER_IDS, skip_special_tokens=True)
    meta = body["meta_info"]
    assert meta["id"] == "two-and-two"
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), len(ANSWER_IDS))
    assert {"cached_tokens", "e2e_latency", "first_token_latency", "queue_time"} <= meta.keys()
    assert meta["weight_version"] == "default"
    assert "prompt_token_ids" not in body


def test_a_prompt_can_be_text(engine, prompt, tokenizer):
    """Text is tokenized by the server; beside input_ids it is ignored."""
    body = {"text": tokenizer.decode(prompt), "sampling_params": {"temperature": 0}}
    assert answer(engine.client.post("/generate", json=body))["output_ids"] == ANSWER_IDS
    body = {"text": "ignored", "input_ids": prompt, "sampling_params": {"temperature": 0}}
    assert answer(engine.client.post("/generate", json=body))["output_ids"] == ANSWER_IDS


def test_prompt_ids_come_back_when_asked_for(engine, prompt):
    """return_prompt_token_ids shows the ids that the server saw."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
    assert answer(engine.client.post("/generate", json=body))["prompt_token_ids"] == prompt


def test_unknown_top_level_fields_are_ignored(engine, prompt):
    """A field that the server does not know changes nothing."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "no_such_field": 1}
    assert engine.client.post("/generate", json=body).status_code == 200


def test_length_finishes(engine, prompt):
    """max_new_tokens cuts the answer and says so; its default is 128."""
    body = answer(engine.generate(prompt, temperature=0, max_new_tokens=3))
    assert body["output_ids"] == ANSWER_IDS[:3]
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    body = answer(engine.generate(prompt, temperature=0, ignore_eos=True))
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"] == 128


def test_stop_strings_and_ids(engine, prompt):
    """Both stop the answer; the ids keep what stopped it, the text does not."""
    body = answer(engine.generate(prompt, temperature=0, stop=["zzz", "classic math"]))
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "classic math"}
    assert body["text"] == "The answer to this "
    assert body["output_ids"] == ANSWER_IDS[:6]
    body = answer(engine.generate(prompt, temperature=0, stop_token_ids=[8170]))
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 8170}
    assert body["text"] == "The answer to this"
    assert body["output_ids"] == ANSWER_IDS[:5]


def test_seeds_repeat(idle, prompt):
    """The same seed gives the same ids, another seed others, and so does none."""

    def sample(seed):
        params = {"temperature": 1.5, "max_new_tokens": 40, "sampling_seed": seed, "ignore_eos": True}
        return tuple(answer(idle.generate(prompt, **params))["output_ids"])

    first = sample(5)
    assert sample(5) == first
    assert len({first, sample(6), sample(None), sample(None)}) == 4


def test_a_penalty_looks_at_the_answer_and_not_at_the_prompt(idle, tokenizer):
    """Like SGLang's, a repetition penalty leaves the prompt's own tokens alone."""
    pattern = tokenizer.encode("one two three one two three one two three one two three one two")
    plain = answer(idle.generate(pattern, temperature=0, max_new_tokens=6))["output_ids"]
    assert plain[0] in pattern
    assert len(set(plain)) == 3
    punished = answer(idle.generate(pattern, temperature=0, max_new_tokens=6, repetition_penalty=2.0))
    assert punished["output_ids"][:3] == plain[:3]
    assert len(set(punished["output_ids"])) == 6


def test_a_logit_bias_is_honoured(engine, prompt):
    """A strongly favoured token is what comes."""
    body = answer(engine.generate(prompt, temperature=0, max_new_tokens=2, logit_bias={"8170": 100}))
    assert body["output_ids"] == [8170, 8170]


def test_a_list_is_answered_in_order(engine, prompt):
    """Several prompts with their own parameters come back as a list, in order."""
    body = {
        "input_ids": [prompt, prompt[:9], prompt],
        "sampling_params": [{"temperature": 0, "max_new_tokens": size} for size in (2, 1, 3)],
        "rid": "batch",
    }
    answers = answer(engine.client.post("/generate", json=body))
    assert [len(one["output_ids"]) for one in answers] == [2, 1, 3]
    assert [one["meta_info"]["id"] for one in answers] == ["batch_0", "batch_1", "batch_2"]
    assert answers[2]["output_ids"] == ANSWER_IDS[:3]


def test_n_gives_different_samples(engine, prompt):
    """Several samples of one prompt are a list, each with its own randomness, the seed notwithstanding."""
    params = {"n": 3, "temperature": 1.5, "max_new_tokens": 20, "sampling_seed": 1, "ignore_eos": True}
    answers = answer(engine.generate(prompt, **params))
    assert len({tuple(one["output_ids"]) for one in answers}) == 3


def test_one_bad_item_fails_the_batch(engine, prompt):
    """A batch is refused whole, and nothing of it runs."""
    body = {"input_ids": [prompt, [999_999]], "sampling_params": {"max_new_tokens": 400}}
    assert engine.client.post("/generate", json=body).status_code == 400
    assert engine.load()["num_running_reqs"] == 0


def test_a_stream_is_cumulative_and_ends_like_the_whole_answer(idle, prompt):
    """Every event carries the whole text and all ids so far, and the last one the finish reason."""
    params = {"temperature": 0, "max_new_tokens": 70, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    with idle.client.stream("POST", "/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len(chunks) >= 3
    for earlier, later in pairwise(chunks):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    whole = answer(idle.generate(prompt, **params))
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 70}


def test_a_refused_stream_carries_the_error_inside(engine):
    """What is wrong with a streamed request comes as an event of a 200."""
    body = {"input_ids": [999_999], "stream": True}
    response = engine.client.post("/generate", json=body)
    first, last = [line for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == 400
    assert last == "data: [DONE]"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": []},
        {"input_ids": [-1]},
        {"input_ids": [49_152]},
        {"input_ids": [1] * 512},
        {"input_ids": [1] * 400, "sampling_params": {"max_new_tokens": 113}},
        {"input_ids": [1], "sampling_params": {"top_p": 0}},
        {"input_ids": [1], "sampling_params": {"regex": "a"}},
        {"input_ids": [1], "return_logprob": True},
        {"input_ids": [1], "return_hidden_states": True},
        {"input_ids": [[1], [2]], "rid": ["only-one"]},
        {"input_ids": [[1], [2]], "rid": ["same", "same"]},
        {"input_ids": [[1], [2]], "stream": True},
    ],
)
def test_a_refusal_has_a_message(engine, body):
    """What is out of bounds or unsupported is 400 {"error": {"message": …}}."""
    response = engine.client.post("/generate", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_the_context_is_usable_to_its_last_token(engine):
    """Prompt and max_new_tokens may fill the context; without max_new_tokens the answer is cut to fit."""
    body = answer(engine.generate([1] * 400, max_new_tokens=112, ignore_eos=True))
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 112}
    body = answer(engine.generate([1] * 500, ignore_eos=True))
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


@pytest.mark.parametrize("params", [{"max_tokens": 5}, {"temperature": "hot"}, "greedy"])
def test_an_unknown_or_mistyped_sampling_parameter_is_a_string_error(engine, params):
    """Breaking the contract of sampling_params is 400 with `error` as a string."""
    response = engine.client.post("/generate", json={"input_ids": [1], "sampling_params": params})
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("path", ["/generate", "/abort_request"])
@pytest.mark.parametrize("content", [b"{broken", b"[1]", b'"text"', b"\xff\xfe"])
def test_bad_json_has_the_openai_shape(engine, path, content):
    """A body that is no JSON object is 400 {"object": "error", …}."""
    response = engine.client.post(path, content=content)
    assert response.status_code == 400
    assert (
        response.json().items()
        >= {"object": "error", "type": "Bad Request", "param": None, "code": 400}.items()
    )
    assert response.json()["message"]


@pytest.mark.parametrize("ids", ["1", [1.5], [True], [[1], "x"], {"a": 1}])
def test_mistyped_input_has_the_openai_shape(engine, ids):
    """input_ids of a wrong type are refused before they are looked at."""
    response = engine.client.post("/generate", json={"input_ids": ids})
    assert response.status_code == 400
    assert response.json()["object"] == "error"


def test_wrong_paths_and_methods(engine):
    """404 and 405 have a `detail`, and the connection stays usable after a body that nobody wanted."""
    response = engine.client.post("/v1/chat/completions", json={"messages": []})
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    response = engine.client.get("/generate")
    assert (response.status_code, response.json()) == (405, {"detail": "Method Not Allowed"})
    assert "POST" in response.headers["allow"]
    assert engine.client.delete("/ready").status_code == 405
    assert engine.client.get("/ready").status_code == 200


def test_a_duplicate_rid_is_refused_while_the_first_runs(idle, prompt, background):
    """A rid in use is a 400, and is free again afterwards."""
    first = background(lambda: idle.generate(prompt, rid="twice", **ENDLESS))
    idle.wait_until(lambda load: load["num_running_reqs"] == 1)
    response = idle.generate(prompt, rid="twice", max_new_tokens=1)
    assert response.status_code == 400
    assert "Duplicate request ID detected: twice" in response.json()["error"]["message"]
    idle.client.post("/abort_request", json={"rid": "twice"})
    assert first.result().status_code == 200
    assert idle.generate(prompt, rid="twice", max_new_tokens=1).status_code == 200


def test_an_abort_frees_the_slot_at_once(idle, prompt, background):
    """An aborted request answers 200 with its partial ids and finish reason abort, well before its end."""
    running = background(lambda: idle.generate(prompt, rid="stop-me", **ENDLESS))
    idle.wait_until(lambda load: load["num_used_tokens"] > len(prompt))
    idle.client.post("/abort_request", json={"rid": "stop-m"})  # a prefix is not a match
    assert idle.load()["num_running_reqs"] == 1
    assert idle.client.post("/abort_request", json={"rid": "stop-me"}).status_code == 200
    body = answer(running.result(timeout_s=10))
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(body["output_ids"]) == body["meta_info"]["completion_tokens"] < 470
    assert idle.load()["num_running_reqs"] == 0


def test_a_waiting_request_can_be_aborted(idle, prompt, background):
    """A request that waits for a slot answers an abort with nothing, and the running ones go on."""
    running = [background(lambda: idle.generate(prompt, **ENDLESS)) for _ in range(idle.slots)]
    idle.wait_until(lambda load: load["num_running_reqs"] == idle.slots)
    waiting = background(lambda: idle.generate(prompt, rid="queued", **ENDLESS))
    idle.wait_until(lambda load: load["num_waiting_reqs"] == 1)
    idle.client.post("/abort_request", json={"rid": "queued"})
    body = answer(waiting.result(timeout_s=10))
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert idle.load()["num_running_reqs"] == idle.slots
    idle.client.post("/abort_request", json={"abort_all": True})
    reasons = [answer(one.result(timeout_s=10))["meta_info"]["finish_reason"]["type"] for one in running]
    assert reasons == ["abort"] * idle.slots


def test_aborting_an_unknown_rid_is_fine(engine):
    """SGLang answers 200 to any abort."""
    for body in ({"rid": "nobody"}, {}, {"rid": None}):
        assert engine.client.post("/abort_request", json=body).status_code == 200


def post_and_hang_up(url: str, body: dict, wait) -> None:
    """Send a request on a bare socket, wait, and close it without reading."""
    host, port = httpx.URL(url).host, httpx.URL(url).port
    raw = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection((host, port)) as connection:
        connection.sendall(head + raw)
        wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(idle, prompt, stream):
    """When the connection closes in the middle of an answer, its slot is free within seconds."""
    body = {"input_ids": prompt, "sampling_params": ENDLESS, "stream": stream}
    post_and_hang_up(idle.url, body, lambda: idle.wait_until(lambda load: load["num_running_reqs"] == 1))
    assert idle.wait_until(lambda load: load["num_running_reqs"] == 0) < 5


def test_a_waiting_client_that_hangs_up_leaves_the_queue(idle, prompt, background):
    """A client that is gone before its turn never takes a slot."""
    running = [background(lambda: idle.generate(prompt, **ENDLESS)) for _ in range(idle.slots)]
    idle.wait_until(lambda load: load["num_running_reqs"] == idle.slots)
    body = {"input_ids": prompt, "sampling_params": ENDLESS}
    post_and_hang_up(idle.url, body, lambda: idle.wait_until(lambda load: load["num_waiting_reqs"] == 1))
    assert idle.wait_until(lambda load: load["num_waiting_reqs"] == 0) < 5
    idle.client.post("/abort_request", json={"abort_all": True})
    for one in running:
        one.result(timeout_s=10)


def test_more_requests_than_slots_all_get_their_own_answer(idle, tokenizer, background):
    """Several times as many requests as slots are answered whole, each for its own prompt."""
    words = ["red", "green", "blue", "black", "white", "brown", "pink"]
    prompts = {word: tokenizer.encode(f"{word}," + f" {word}," * 7) for word in words}
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    calls = {word: background(lambda ids=ids: idle.generate(ids, **params)) for word, ids in prompts.items()}
    for word, call in calls.items():
        body = answer(call.result())
        assert body["text"].strip().startswith(word)
        assert len(body["output_ids"]) == 4
    assert idle.load()["num_running_reqs"] == 0


def test_a_repeated_prompt_is_cached_until_it_is_flushed(idle, tokenizer):
    """cached_tokens counts what was reused, and a flush forgets it."""
    ids = tokenizer.encode("An unusual sentence about walruses, for nobody else to have cached before.")
    cached = [answer(idle.generate(ids, max_new_tokens=1))["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached[1] >= len(ids) - 2 > cached[0]
    assert idle.client.post("/flush_cache").text.startswith("Cache flushed.")
    assert answer(idle.generate(ids, max_new_tokens=1))["meta_info"]["cached_tokens"] == 0


def test_the_cache_is_not_flushed_under_a_running_request(idle, prompt, background):
    """A flush while something runs does nothing and says so."""
    running = background(lambda: idle.generate(prompt, rid="busy", **ENDLESS))
    idle.wait_until(lambda load: load["num_running_reqs"] == 1)
    response = idle.client.get("/flush_cache")
    assert (response.status_code, response.text) == (400, "Flush cache failed.\n")
    idle.client.post("/abort_request", json={"rid": "busy"})
    running.result()


def test_health_endpoints(engine):
    """All three say 200 with an empty body once the engine serves."""
    for path in ("/ready", "/health", "/health_generate"):
        response = engine.client.get(path)
        assert (response.status_code, response.content) == (200, b"")


def test_information_endpoints(engine):
    """They name the model, the tokenizer and the limits; the old names answer the same."""
    info = engine.client.get("/model_info").json()
    assert info["served_model_name"] == "smollm2-135m-instruct"
    assert info["tokenizer_path"] == str(engine.tokenizer_dir)
    assert info["model_type"] == "llama"
    assert engine.client.get("/get_model_info").json() == info
    server = engine.client.get("/server_info").json()
    assert server["context_length"] == engine.context_length
    assert server["max_running_requests"] == engine.slots
    assert server["max_total_num_tokens"] == engine.slots * engine.context_length
    assert server["internal_states"]
    assert engine.client.get("/get_server_info").json()["version"] == server["version"]
    [card] = engine.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (info["served_model_name"], engine.context_length)


def test_loads_follow_the_work(idle, prompt, background):
    """/v1/loads counts what runs, what it holds and how fast it goes."""
    running = background(lambda: idle.generate(prompt, rid="load", **ENDLESS))
    idle.wait_until(lambda load: load["gen_throughput"] > 0 and load["token_usage"] > 0)
    load = idle.load()
    assert load["num_running_reqs"] == 1
    assert load["dp_rank"] == 0
    assert load["max_running_requests"] == idle.slots
    assert load["token_usage"] == pytest.approx(load["num_used_tokens"] / load["max_total_num_tokens"])
    idle.client.post("/abort_request", json={"rid": "load"})
    running.result()
    assert idle.load()["token_usage"] == 0


def test_a_body_over_the_limit_is_refused_unread(engine):
    """A body that claims to be huge is a 413, and the connection closes."""
    host, port = httpx.URL(engine.url).host, httpx.URL(engine.url).port
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        reply = connection.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"detail" in reply


def test_what_is_not_http_does_not_hurt(engine):
    """Garbage on the port is answered or dropped, and the server goes on."""
    host, port = httpx.URL(engine.url).host, httpx.URL(engine.url).port
    for garbage in (
        b"\x16\x03\x01\x00\xa5\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(garbage)
            connection.makefile("rb").read()
    assert engine.client.get("/ready").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_an_address_that_is_not_loopback_is_refused(host):
    """The engine has no authentication, so other machines are let in only on request."""
    with pytest.raises(EmbeddedError, match="--allow-remote"):
        EmbeddedHttpServer(host, 0)


def test_a_remote_address_can_be_allowed():
    """With allow_remote the same address is bound."""
    server = EmbeddedHttpServer("0.0.0.0", 0, allow_remote=True)
    assert server.server_address[0] == "0.0.0.0"
    server.server_close()


def test_a_taken_port_is_told_before_anything_is_loaded(engine):
    """Binding comes first, and names the port."""
    port = httpx.URL(engine.url).port
    with pytest.raises(EmbeddedError, match=str(port)):
        EmbeddedHttpServer("127.0.0.1", port)
