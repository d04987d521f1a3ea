"""The client of one server: what it sends, and how every failure of the wire translates."""

import asyncio
import contextlib
import traceback

import httpx
import orjson
import pytest
from fake_sglang import NOT_A_ROUTERS, FakeServer, expected_answer, wait_until

from serving.client import sglang as client_module
from serving.client.errors import (
    BadReply,
    ForeignIds,
    GenerationAborted,
    PromptRefused,
    RequestTimedOut,
    ServerBusy,
    ServerFailed,
    ServerMisconfigured,
    ServerUnreachable,
    ServingError,
)
from serving.client.protocol import GenerationRequest
from serving.client.sglang import SGLangClient

URL = "http://127.0.0.1:30000"
KEY = "sk-very-secret"
PROMPT = [5, 6, 7]


def request(rid="r-1", max_new_tokens=200):
    return GenerationRequest(rid, PROMPT, {"max_new_tokens": max_new_tokens, "temperature": 1.0})


def ask(handler, call=lambda client: client.generate(request()), **options):
    """Run one call against a scripted handler; returns its value or raises."""

    async def scenario():
        async with SGLangClient(URL, transport=httpx.MockTransport(handler), **options) as client:
            return await call(client)

    return asyncio.run(scenario())


def ask_server(server, call=lambda client: client.generate(request()), **options):
    """The same against a fake server on a real socket."""

    async def scenario():
        url = await server.start()
        try:
            async with SGLangClient(url, vocab_size=1024, **options) as client:
                return await call(client)
        finally:
            await server.stop()

    return asyncio.run(scenario())


def ask_bytes(answer, **options):
    """Ask a socket that gives these bytes, piece by piece, to whoever sends a request."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in answer:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    async def scenario():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with SGLangClient(url, **options) as client:
                return await client.generate(request())
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.sleep(0.05)  # the last handler sees its connection closed

    return asyncio.run(scenario())


def raising(error):
    def handler(_):
        raise error

    return handler


def answering(status, body=b"{}", **headers):
    def handler(_):
        return httpx.Response(status, content=body, headers=headers)

    return handler


def test_real_answer_arrives_as_the_server_made_it():
    """Over a socket, ids and finish reason are exactly the server's."""
    server = FakeServer()
    answer = ask_server(server)
    ids, finish = expected_answer(PROMPT, 200, server.mean_tokens)
    assert (answer.output_ids, answer.finish_reason) == (ids, finish["type"])
    assert server.seen[0]["input_ids"] == PROMPT


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), ServerUnreachable),
        (httpx.ConnectTimeout("slow"), ServerUnreachable),
        (httpx.PoolTimeout("full"), ServerUnreachable),
        (httpx.ReadError(""), ServerUnreachable),
        (httpx.WriteError("broken pipe"), ServerUnreachable),
        (httpx.CloseError("closed"), ServerUnreachable),
        (httpx.RemoteProtocolError("no response"), ServerUnreachable),
        (httpx.LocalProtocolError("odd"), ServerUnreachable),
        (httpx.ProxyError("proxy"), ServerUnreachable),
        (httpx.ReadTimeout(""), RequestTimedOut),
        (httpx.WriteTimeout(""), RequestTimedOut),
        (httpx.UnsupportedProtocol("ftp"), ServerMisconfigured),
        (httpx.InvalidURL("bad"), ServerMisconfigured),
        (httpx.DecodingError("gzip"), BadReply),
    ],
)
@pytest.mark.parametrize("method", ["generate", "model_info", "server_info", "probe", "abort"])
def test_every_httpx_error_becomes_ours_and_names_the_server(error, kind, method):
    """No httpx error leaves the client, whichever method was called."""
    arguments = {"generate": [request()], "probe": [PROMPT, {}], "abort": ["r-1"]}.get(method, [])
    with pytest.raises(ServingError, match=URL) as caught:
        ask(raising(error), lambda client: getattr(client, method)(*arguments))
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error


def test_refused_connection_is_an_unreachable_server():
    """A port that nobody listens on says so, with the URL."""
    server = FakeServer()

    async def stopped_first(client):
        await server.stop()
        return await client.generate(request())

    with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:\d+"):
        ask_server(server, stopped_first)


@pytest.mark.parametrize("fault", ["reset", "torn"])
def test_connection_that_breaks_in_mid_answer_is_an_unreachable_server(fault):
    """A reset and a body that ends early are the connection's fault; nothing of the body is kept."""
    with pytest.raises(ServerUnreachable):
        ask_server(FakeServer(script=[fault]))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("half", BadReply),
        ("wrong_count", BadReply),
        ("foreign_id", ForeignIds),
        ("abort", GenerationAborted),
        ("status_500", ServerFailed),
        ("status_503", ServerBusy),
        ("away", ServerUnreachable),
    ],
)
def test_bad_answer_over_a_socket_is_told_apart(fault, kind):
    """What the fake server does wrong is named by the type of the error."""
    with pytest.raises(kind):
        ask_server(FakeServer(script=[fault]))


def test_refused_prompt_carries_its_status():
    """A 400 is about the prompt and is no reason to ask again."""
    with pytest.raises(PromptRefused, match="poison") as caught:
        ask_server(FakeServer(poison=6))
    assert caught.value.status == 400


def test_silent_server_times_out():
    """A request without an answer ends after request_timeout_s and may be asked again."""
    with pytest.raises(RequestTimedOut, match="/generate"):
        ask_server(FakeServer(script=["hang"]), request_timeout_s=0.2)


def test_answer_that_trickles_in_times_out_as_a_whole():
    """The time-out bounds the answer, not each of its pieces."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    with pytest.raises(RequestTimedOut):
        ask_bytes([head, *[b"x"] * 200], request_timeout_s=0.3)


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\ngarbage"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<html"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"],
    ],
)
def test_body_that_cannot_be_read_is_a_bad_reply(answer):
    """A broken encoding or a page that is no JSON is retried like any bad answer."""
    with pytest.raises(BadReply):
        ask_bytes(answer)


@pytest.mark.parametrize(
    "answer", [[], [b"SSH-2.0-OpenSSH_9.6\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]]
)
def test_peer_that_speaks_no_http_is_an_unreachable_server(answer):
    """Silence, another protocol and an early end are translated."""
    with pytest.raises(ServerUnreachable):
        ask_bytes(answer)


@pytest.mark.parametrize("url", ["http://[::1", "ftp://x", "127.0.0.1:30000", "", "http://ex\nample"])
def test_unusable_url_is_a_misconfigured_server(url):
    """A URL that can never work is said to be one, at the latest when it is used."""

    async def scenario():
        async with SGLangClient(url) as client:
            await client.generate(request())

    with pytest.raises(ServerMisconfigured, match="not a usable URL"):
        asyncio.run(scenario())


def test_host_that_does_not_exist_is_unreachable():
    """A name that does not resolve may resolve later."""

    async def scenario():
        async with SGLangClient("http://no-such-host.invalid:1") as client:
            await client.generate(request())

    with pytest.raises(ServerUnreachable, match=r"no-such-host\.invalid"):
        asyncio.run(scenario())


def test_key_is_sent_as_a_bearer_token():
    """A server that wants the key gets it with every request, white space around it removed."""
    answer = ask_server(FakeServer(api_key=KEY), api_key=f" {KEY}\n")
    assert answer.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("key", [None, "", "wrong"])
def test_wrong_key_is_a_misconfigured_server(key):
    """A 401 stops the run: no prompt can succeed."""
    with pytest.raises(ServerMisconfigured, match="Unauthorized"):
        ask_server(FakeServer(api_key=KEY), api_key=key)


def test_without_a_key_no_header_is_sent():
    """Nothing is made up where no key is given."""
    seen = []

    def handler(request):
        seen.append(request.headers)
        return httpx.Response(200)

    ask(handler, lambda client: client.is_ready(), api_key="")
    assert "authorization" not in seen[0]


def errors_with_key(key):
    """The errors of a client with this key in many situations."""
    handlers = [
        *map(raising, (httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.DecodingError("gzip"))),
        *[answering(status) for status in (200, 400, 401, 500, 503)],
    ]
    for handler in handlers:
        with contextlib.suppress(AssertionError), pytest.raises(ServingError) as caught:
            ask(handler, api_key=key)
        yield caught.value
    with pytest.raises(ServingError) as caught:
        ask_server(FakeServer(script=["reset"]), api_key=key)
    yield caught.value


@pytest.mark.parametrize("key", [KEY, f"{KEY}\n", f"{KEY}\r\nX-Evil: 1", f"{KEY}\x00", f"{KEY}é", f"a {KEY}"])
def test_key_is_in_no_error_and_no_repr(key):
    """A key, even one that cannot be a header (h11 quotes those), shows in no message and no traceback."""
    try:
        client = SGLangClient(URL, api_key=key)
    except ServerMisconfigured as exc:
        errors = [exc]
    else:
        assert KEY not in repr(client)
        asyncio.run(client.close())
        errors = list(errors_with_key(key))
    for error in errors:
        shown = "".join(traceback.format_exception(error))
        assert KEY not in shown + repr(error) + repr(vars(error))


def test_proxy_of_the_environment_is_not_used(monkeypatch):
    """Prompts go to the address that was given, whatever the environment says."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask_server(FakeServer()).prompt_tokens == len(PROMPT)


def test_netrc_of_the_environment_is_not_used(monkeypatch, tmp_path):
    """No credentials are taken from a file nobody mentioned."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    seen = []

    def handler(request):
        seen.append(request.headers)
        return httpx.Response(200)

    ask(handler, lambda client: client.is_ready())
    assert "authorization" not in seen[0]


@pytest.mark.parametrize(
    ("handler", "ready"),
    [
        (answering(200), True),
        (answering(503), False),
        (answering(404), False),
        (raising(httpx.ConnectError("refused")), False),
        (raising(httpx.ReadTimeout("slow")), False),
        (raising(httpx.DecodingError("gzip")), False),
    ],
)
def test_ready_is_a_yes_or_a_no(handler, ready):
    """Asking whether a server is ready raises nothing, and the reason of a no names the server."""
    assert ask(handler, lambda client: client.is_ready()) is ready
    why = ask(handler, lambda client: client.explain_not_ready())
    assert (why is None) if ready else (URL in why)


def test_trailing_slash_of_the_url_does_not_matter():
    """`/generate` follows the base URL with one slash; a path of a router is kept."""
    paths = []

    def handler(request):
        paths.append(request.url.path)
        return httpx.Response(200)

    async def scenario():
        for url in (URL, f"{URL}/", f"{URL}/router/"):
            async with SGLangClient(url, transport=httpx.MockTransport(handler)) as client:
                await client.is_ready()

    asyncio.run(scenario())
    assert paths == ["/ready", "/ready", "/router/ready"]


@pytest.mark.parametrize("body", [b"[]", b"null", b"<html>", b""])
@pytest.mark.parametrize("method", ["model_info", "server_info"])
def test_page_that_is_no_object_is_a_bad_reply(body, method):
    """Information pages are objects or errors."""
    with pytest.raises(BadReply, match=f"/{method}"):
        ask(answering(200, body), lambda client: getattr(client, method)())


def test_information_pages_are_read():
    """model_info and server_info come as the server sends them."""

    async def both(client):
        return await client.model_info(), await client.server_info()

    model, server = ask_server(FakeServer(), both)
    assert model["model_path"] == "fake"
    assert server["context_length"] == 2048


def test_a_routers_pages_are_found_under_their_other_names():
    """As smg answers: ready, what it serves and its settings are there, a load of its own is not."""

    async def everything(client):
        pages = await client.model_info(), await client.server_info(), await client.load()
        return await client.is_ready(), await client.is_router(), *pages

    router = FakeServer(missing=NOT_A_ROUTERS)
    ready, is_router, model, server, load = ask_server(router, everything)
    assert (ready, is_router, load) == (True, True, None)
    assert model["model_path"] == "fake"
    assert server["context_length"] == 2048
    assert not ask_server(FakeServer(), lambda client: client.is_router())


def test_a_router_without_servers_is_not_ready():
    """Its own page says so."""
    router = FakeServer(missing=NOT_A_ROUTERS)
    router.ready = False
    assert "/readiness answered 503" in ask_server(router, lambda client: client.explain_not_ready())


def test_pages_that_are_nowhere_are_empty():
    """What they would have said is not known."""
    for method in ("model_info", "server_info"):
        assert ask(answering(404), lambda client, method=method: getattr(client, method)()) == {}


def test_probe_returns_the_prompt_ids_that_the_server_saw():
    """A check before a run can compare what was sent with what arrived."""
    reply = ask_server(FakeServer(), lambda client: client.probe(PROMPT, {"max_new_tokens": 4}))
    assert reply["prompt_token_ids"] == PROMPT
    assert len(reply["output_ids"]) <= 4


def test_abort_names_the_request():
    """The rid goes to /abort_request; an unknown one is no error."""
    bodies = []

    def handler(request):
        bodies.append((request.url.path, orjson.loads(request.content)))
        return httpx.Response(200)

    ask(handler, lambda client: client.abort("r-9"))
    assert bodies == [("/abort_request", {"rid": "r-9"})]


def test_cancelled_request_frees_its_connection():
    """Cancelling more requests than there are connections leaves the client usable."""
    server = FakeServer(script=["hang"] * 6)

    async def cancel_some(client):
        for _ in range(3):
            tasks = [asyncio.create_task(client.generate(request())) for _ in range(2)]
            await wait_until(lambda: server.in_flight == 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.break_connections()
            await wait_until(lambda: not server.in_flight)
        return await client.generate(request())

    assert ask_server(server, cancel_some, max_connections=2).prompt_tokens == len(PROMPT)


def test_150_requests_share_one_client():
    """As many connections as allowed are used at once."""
    server = FakeServer()

    async def all_at_once(client):
        server.gate.clear()
        tasks = [asyncio.create_task(client.generate(request(f"r-{i}"))) for i in range(150)]
        await wait_until(lambda: server.in_flight == 150)
        server.gate.set()
        return await asyncio.gather(*tasks)

    assert len(ask_server(server, all_at_once, max_connections=150)) == 150
    assert server.most_in_flight == 150


RANK = {
    "num_running_reqs": 16, "num_waiting_reqs": 4, "max_running_requests": 16, "token_usage": 0.25,
    "timestamp": 1.0, "num_used_tokens": 4144, "total_prefill_uncached_tokens": 90, "decode_moments": [259.0],
}  # fmt: skip


def ask_load(reply, status=200):
    return ask(lambda _: httpx.Response(status, json=reply), lambda client: client.load())


def test_load_is_summed_over_ranks():
    """The fullest rank's memory counts; requests add up."""
    load = ask_load({"loads": [RANK, {**RANK, "token_usage": 0.5, "num_waiting_reqs": 0}]})
    assert (load.running, load.waiting, load.max_running, load.token_usage) == (32, 4, 32, 0.5)


@pytest.mark.parametrize(
    ("change", "is_work"),
    [
        ({"timestamp": 2.0}, False),  # an idle server's goes on
        ({"num_used_tokens": 4145}, True),
        ({"decode_moments": [260.0]}, True),
        ({"total_prefill_uncached_tokens": 91}, True),
        ({"num_running_reqs": 15}, True),
    ],
)
def test_work_is_what_tokens_change(change, is_work):
    """Two looks differ when something was done between them."""
    before, now = ask_load({"loads": [RANK]}), ask_load({"loads": [{**RANK, **change}]})
    assert (before.work != now.work) == is_work


@pytest.mark.parametrize("status", [404, 405])
def test_server_without_loads_tells_none(status):
    """A router has no such page."""
    assert ask_load({"detail": "Not Found"}, status) is None


@pytest.mark.parametrize(
    "reply", [{}, {"loads": []}, {"loads": [{}]}, {"loads": [{**RANK, "token_usage": "x"}]}, []]
)
def test_load_that_is_none_is_a_bad_reply(reply):
    """Named with its page."""
    with pytest.raises(BadReply, match="/v1/loads"):
        ask_load(reply)


def test_life_is_a_token_that_comes_back(monkeypatch):
    """A server that takes requests and answers none has none, nor has one that refuses."""
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_S", 0.2)
    assert ask_server(FakeServer(), lambda client: client.is_making_progress())
    assert not ask_server(FakeServer(script=["hang"]), lambda client: client.is_making_progress())
    assert not ask_server(FakeServer(script=["status_500"]), lambda client: client.is_making_progress())


def test_unreachable_says_whether_the_request_was_sent():
    """Only what was with a server can have killed it."""
    with pytest.raises(ServerUnreachable) as refused:
        asyncio.run(ask_closed_port())
    assert not refused.value.was_sent
    with pytest.raises(ServerUnreachable) as broken:
        ask_server(FakeServer(script=["reset"]))
    assert broken.value.was_sent


async def ask_closed_port():
    """Ask a port where nobody listens any more."""
    server = FakeServer()
    url = await server.start()
    await server.stop()
    async with SGLangClient(url) as client:
        await client.generate(request())


def test_the_vocabulary_is_asked_and_nothing_is_generated():
    """None from a server that does not tell; a wrong key is an error as anywhere."""
    for tells, size in ((True, 700), (False, None)):
        server = FakeServer(vocab_size=700, tells_vocab=tells)
        assert ask_server(server, lambda client: client.ask_vocab_size()) == size
        assert (server.paths["/generate"], server.seen) == (1, [])
    with pytest.raises(ServerMisconfigured, match="401"):
        ask_server(FakeServer(api_key="right"), lambda client: client.ask_vocab_size(), api_key="wrong")


def test_a_server_that_answers_whatever_it_is_asked_tells_no_vocabulary():
    """A 200 holds no size."""
    reply = httpx.Response(200, json={"text": "", "output_ids": [1], "meta_info": {}})
    assert ask(lambda _: reply, lambda client: client.ask_vocab_size()) is None


@pytest.mark.parametrize(
    ("status", "reply", "text"),
    [
        (200, {"text": "<think>"}, "<think>"),
        (200, {"text": ["a"]}, None),
        (404, {"detail": "Not Found"}, None),
    ],
)
def test_a_server_has_a_text_for_ids_or_does_not_tell(status, reply, text):
    """Special tokens are shown."""

    def handle(asked):
        assert orjson.loads(asked.content) == {"tokens": [5, 6], "skip_special_tokens": False}
        return httpx.Response(status, json=reply)

    assert ask(handle, lambda client: client.detokenize([5, 6])) == text
