"""One SGLang server over HTTP.

Knows paths, time-outs and how httpx failures translate; does not retry, count or choose servers. Control
calls go through httpx, answers through the hot path.
Invariant: a method returns a checked value or raises a `ServingError`; no library's error escapes.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from serving.client.errors import (
    BadReply,
    RequestFailed,
    RequestTimedOut,
    ServerMisconfigured,
    ServerUnreachable,
    ServingError,
)
from serving.client.hot_path import HotPath
from serving.client.protocol import (
    REFUSED,
    Generation,
    GenerationRequest,
    ServerLoad,
    read_error,
    read_generation,
    read_load,
    read_vocab_size,
)

CONTROL_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 10.0
_NO_MODELS_ID = 2**31 - 1


class SGLangClient:
    """Talks to one base URL.

    Args:
        base_url: a server or a router; no trailing path.
        vocab_size: ids of an answer must be below it.
        api_key: sent as a bearer token; never logged.
        request_timeout_s: how long one answer may take in all.
        max_connections: requests that may be in flight at once.
        transport: an httpx transport to use for everything, answers too (tests script one).

    Raises:
        ServerMisconfigured: the URL or the key cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        vocab_size: int = 1 << 31,
        api_key: str | None = None,
        request_timeout_s: float = 3600.0,
        max_connections: int = 1024,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s
        headers = _to_headers(api_key)
        self._hot_path = None
        if transport is None:
            self._hot_path = HotPath(
                self.base_url,
                headers=headers,
                timeout_s=request_timeout_s,
                connect_timeout_s=CONNECT_TIMEOUT_S,
            )
        try:
            self._http = httpx.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                timeout=httpx.Timeout(request_timeout_s, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(
                    max_connections=max_connections, max_keepalive_connections=max_connections
                ),
                transport=transport,
                trust_env=False,  # a proxy of the environment must never see prompts meant for this address
            )
        except httpx.InvalidURL as exc:
            raise ServerMisconfigured(f"{self.base_url}: not a usable URL ({exc})") from exc

    async def generate(self, request: GenerationRequest) -> Generation:
        """Ask for one answer.

        Raises:
            RequestFailed: may be asked again; see its subclasses.
            PromptRefused: the server will never take this prompt.
            ServerMisconfigured: wrong key or path, or ids that the target does not have.
        """
        if self._hot_path is not None:
            status, content = await self._hot_path.post("/generate", request.to_body())
        else:
            reply = await self._post_json("/generate", request.to_body())
            status, content = reply.status_code, reply.content
        if status != httpx.codes.OK:
            raise read_error(status, content, server=self.base_url)
        return read_generation(content, request=request, vocab_size=self._vocab_size, server=self.base_url)

    async def probe(self, prompt: list[int] | str, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """The server's whole answer to one prompt, with the prompt ids it saw; for checks before a run.

        A prompt that is text is tokenized by the server.
        """
        body = {
            "rid": f"probe-{uuid.uuid4().hex}",
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": dict(sampling_params),
            "return_prompt_token_ids": True,
        }
        return self._read_object(await self._post_json("/generate", orjson.dumps(body)), "/generate")

    async def is_ready(self) -> bool:
        """Whether GET /ready answers 200; instant, unlike /health, which runs a generation.

        A router calls the page /readiness: it is ready while one server behind it is.
        """
        return await self.explain_not_ready() is None

    async def explain_not_ready(self) -> str | None:
        """None when ready, else why not, in a few words."""
        answers = []
        for path in ("/ready", "/readiness"):
            try:
                reply = await self._send("GET", path, timeout=CONTROL_TIMEOUT_S)
            except RequestFailed as exc:
                return str(exc)
            if reply.status_code == httpx.codes.OK:
                return None
            answers.append(f"{path} answered {reply.status_code}")
            if reply.status_code != httpx.codes.NOT_FOUND:
                break
        return f"{self.base_url}: {', '.join(answers)}"

    async def is_router(self) -> bool:
        """Whether it has no /ready of its own, as smg and sglang-router; only asked of one that is ready."""
        reply = await self._send("GET", "/ready", timeout=CONTROL_TIMEOUT_S)
        return reply.status_code == httpx.codes.NOT_FOUND

    async def model_info(self) -> dict[str, Any]:
        """GET /model_info: model_path, tokenizer_path, weight_version.

        A router has the page under its old name and asks one server behind it; empty from one without it.
        """
        return await self._get_first("/model_info", "/get_model_info")

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info, found as `model_info` is.

        Holds the api key and the launch command in clear: redact before storing.
        """
        return await self._get_first("/server_info", "/get_server_info")

    async def ask_vocab_size(self) -> int | None:
        """How many ids the served model has; None from a server or a router that does not tell.

        SGLang 0.5.23 has no page that says it, but names it when it refuses a logit_bias for an id that the
        model does not have. Nothing is generated: a router that drops the bias passes on two grammars at
        once, which are refused too.
        """
        params = {"logit_bias": {str(_NO_MODELS_ID): 0.0}, "json_schema": "{}", "regex": "."}
        request = GenerationRequest(f"vocabulary-{uuid.uuid4().hex}", [0], {"max_new_tokens": 1, **params})
        reply = await self._post_json("/generate", request.to_body(), timeout=CONTROL_TIMEOUT_S)
        if reply.status_code in REFUSED:
            return read_vocab_size(reply.content)
        if reply.status_code != httpx.codes.OK:
            raise read_error(reply.status_code, reply.content, server=self.base_url)
        return None

    async def detokenize(self, ids: Sequence[int]) -> str | None:
        """The server's own text for ids, special tokens too; None from one that does not tell (a router)."""
        body = orjson.dumps({"tokens": list(ids), "skip_special_tokens": False})
        reply = await self._post_json("/detokenize", body, timeout=CONTROL_TIMEOUT_S)
        if reply.status_code != httpx.codes.OK:
            return None
        text = self._read_object(reply, "/detokenize").get("text")
        return text if isinstance(text, str) else None

    async def load(self) -> ServerLoad | None:
        """GET /v1/loads: what the server is doing; None from one that does not tell (a router).

        SGLang answers it from shared memory: a frozen scheduler's last figures go on being told, as does
        /ready's 200. That they no longer change is what shows it.
        """
        reply = await self._send("GET", "/v1/loads", timeout=CONTROL_TIMEOUT_S)
        if reply.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            return None
        return read_load(self._read_object(reply, "/v1/loads"), server=self.base_url)

    async def is_making_progress(self) -> bool:
        """Whether one token comes back in time: the only proof of life after a stall."""
        request = GenerationRequest(f"life-{uuid.uuid4().hex}", [0], {"max_new_tokens": 1, "temperature": 0})
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self.generate(request)
        except (TimeoutError, ServingError):
            return False
        return True

    async def abort(self, rid: str) -> None:
        """Ask the server to abort one request; an unknown rid is no error there."""
        await self._send("POST", "/abort_request", json={"rid": rid}, timeout=CONTROL_TIMEOUT_S)

    async def close(self) -> None:
        """Close all connections; the server frees the slots of requests still in flight."""
        await self._http.aclose()
        if self._hot_path is not None:
            await self._hot_path.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _get_first(self, *paths: str) -> dict[str, Any]:
        for path in paths:
            reply = await self._send("GET", path, timeout=CONTROL_TIMEOUT_S)
            if reply.status_code != httpx.codes.NOT_FOUND:
                return self._read_object(reply, path)
        return {}

    def _read_object(self, reply: httpx.Response, path: str) -> dict[str, Any]:
        if reply.status_code != httpx.codes.OK:
            raise read_error(reply.status_code, reply.content, server=self.base_url + path)
        try:
            value = orjson.loads(reply.content)
        except orjson.JSONDecodeError as exc:
            raise BadReply(f"{self.base_url}{path}: not JSON", server=self.base_url, status=200) from exc
        if not isinstance(value, dict):
            raise BadReply(f"{self.base_url}{path}: not an object", server=self.base_url, status=200)
        return value

    async def _post_json(self, path: str, body: bytes, **options: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return await self._send("POST", path, content=body, headers=headers, **options)

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            # httpx bounds each read; an answer that trickles in would never end.
            async with asyncio.timeout(options.get("timeout", self._request_timeout_s)):
                return await self._http.request(method, path, **options)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
            raise ServerMisconfigured(f"{self.base_url}: not a usable URL ({exc})") from exc
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as exc:
            raise RequestTimedOut(
                f"{self.base_url}{path}: no answer in time ({type(exc).__name__})", server=self.base_url
            ) from exc
        except httpx.DecodingError as exc:
            raise BadReply(
                f"{self.base_url}{path}: the body cannot be decoded ({exc})", server=self.base_url, status=200
            ) from exc
        except httpx.TransportError as exc:
            what = str(exc) or type(exc).__name__
            was_sent = not isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
            raise ServerUnreachable(
                f"{self.base_url}: {what}", server=self.base_url, was_sent=was_sent
            ) from exc


def _to_headers(api_key: str | None) -> dict[str, str]:
    """The key as a header; checked here, for h11 puts a header it refuses into its error, key and all."""
    key = (api_key or "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ServerMisconfigured("the api key holds characters that an HTTP header cannot carry")
    return {"Authorization": f"Bearer {key}"}
