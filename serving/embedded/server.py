"""The HTTP front: SGLang's endpoints over an engine.

Knows sockets, paths and status codes; knows nothing of sampling. One thread per connection, which is plenty
for an engine that makes a hundred tokens a second, and costs no dependency.
Invariant: a request body is read whole before anything is answered, so a kept-alive connection stays in step.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import orjson

from serving.embedded import protocol
from serving.embedded.engine import Answer, Engine, Request
from serving.embedded.errors import EmbeddedError, EngineError, RequestError
from serving.embedded.protocol import GenerateCall, ServedModel
from serving.embedded.sampling import SamplingParams

VERSION = "embedded-0.5.23"
"""The SGLang version whose protocol is spoken, marked as not being SGLang."""

_MAX_BODY_BYTES = 64 << 20
_BACKLOG = 512

logger = logging.getLogger(__name__)


class EmbeddedHttpServer(ThreadingHTTPServer):
    """A server that is bound at once, so that a taken port is noticed before a model is loaded.

    Connections are refused until `open_for` is called, as they are by SGLang while it loads.
    """

    daemon_threads = True
    request_queue_size = _BACKLOG
    engine: Engine
    served: ServedModel

    def __init__(self, host: str, port: int, *, allow_remote: bool = False) -> None:
        """Bind the address; port 0 takes a free one.

        Raises:
            EmbeddedError: the port is taken, or the host is not loopback and `allow_remote` is off.
        """
        if not allow_remote and not _is_loopback(host):
            raise EmbeddedError(
                f"host {host!r} is not a loopback address, and the embedded engine has no authentication: "
                "use 127.0.0.1, or pass --allow-remote on a network you trust"
            )
        self._in_flight = 0
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError as exc:
            self.server_close()
            raise EmbeddedError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc

    @property
    def url(self) -> str:
        """The base URL."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    @property
    def in_flight(self) -> int:
        """How many requests have been read and not yet answered in full."""
        return self._in_flight

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as in flight."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def open_for(self, engine: Engine, served: ServedModel) -> None:
        """Start to accept connections; `serve_forever` answers them."""
        self.engine, self.served = engine, served
        self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a handler raised; a client that went away is no error."""
        if isinstance(sys.exception(), ConnectionError):
            logger.debug("%s went away", client_address)
        else:
            logger.exception("a request of %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "draftmill-embedded"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body leave in one packet
    server: EmbeddedHttpServer

    def do_GET(self) -> None:
        body = self._read_body()
        if body is None:
            return
        path = urlsplit(self.path).path
        methods = _ROUTES.get(path)
        if methods is None:
            self._reply_json({"detail": "Not Found"}, HTTPStatus.NOT_FOUND)
        elif self.command not in methods:
            self._reply_json({"detail": "Method Not Allowed"}, HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            with self.server.counted():
                self._answer(methods[self.command], body)
                self.wfile.flush()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815 - names in the base class

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        logger.debug(format, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is not even HTTP in the shape of every other error."""
        self.close_connection = True
        self._reply_json({"detail": message or explain or HTTPStatus(code).phrase}, HTTPStatus(code))

    def ready(self, _body: bytes) -> None:
        self._reply(b"")

    def health(self, _body: bytes) -> None:
        engine = self.server.engine
        if engine.load().running:  # tokens are coming: as SGLang does, do not queue a probe behind them
            self._reply(b"")
            return
        probe = Request(
            f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], SamplingParams(max_new_tokens=1, temperature=0)
        )
        [answer] = engine.generate([probe], gone=self._is_client_gone)
        self._reply(b"", HTTPStatus.OK if answer.output_ids else HTTPStatus.SERVICE_UNAVAILABLE)

    def model_info(self, _body: bytes) -> None:
        self._reply_json(protocol.model_info(self.server.served))

    def server_info(self, _body: bytes) -> None:
        self._reply_json(protocol.server_info(self.server.served, self.server.engine, VERSION))

    def models(self, _body: bytes) -> None:
        self._reply_json(protocol.models_list(self.server.served, self.server.engine))

    def loads(self, _body: bytes) -> None:
        self._reply_json(protocol.loads(self.server.engine, VERSION))

    def flush_cache(self, _body: bytes) -> None:
        if self.server.engine.flush_cache():
            self._reply(b"Cache flushed.\n", content_type="text/plain; charset=utf-8")
        else:
            self._reply(b"Flush cache failed.\n", HTTPStatus.BAD_REQUEST, "text/plain; charset=utf-8")

    def abort_request(self, body: bytes) -> None:
        wanted = protocol.parse_json_object(body)
        if wanted.get("abort_all") is True:
            self.server.engine.abort_all()
        elif isinstance(rid := wanted.get("rid"), str):
            self.server.engine.abort(rid)
        self._reply(b"")

    def generate(self, body: bytes) -> None:
        engine = self.server.engine
        call = protocol.parse_generate(protocol.parse_json_object(body), engine)
        if call.stream:
            self._stream(call)
            return
        answers = engine.generate(call.requests, gone=self._is_client_gone)
        bodies = [
            protocol.answer_json(answer, request, return_prompt_token_ids=call.return_prompt_token_ids)
            for answer, request in zip(answers, call.requests, strict=True)
        ]
        self._reply_json(bodies[0] if call.single else bodies)

    def _stream(self, call: GenerateCall) -> None:
        """Send server-sent events; each carries the whole text and all ids so far, as SGLang's do."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        [request] = call.requests

        def send(answer: Answer) -> None:
            self._send_event(
                orjson.dumps(
                    protocol.answer_json(
                        answer, request, return_prompt_token_ids=call.return_prompt_token_ids
                    )
                )
            )

        try:
            [last] = self.server.engine.generate([request], gone=self._is_client_gone, on_partial=send)
            send(last)
        except (RequestError, EngineError) as exc:  # the status line is long gone: the error is an event
            code = exc.status if isinstance(exc, RequestError) else HTTPStatus.INTERNAL_SERVER_ERROR
            error = {"message": str(exc), "type": "invalid_request_error", "code": code, "retryable": False}
            self._send_event(orjson.dumps({"error": error}))
        self._send_event(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _send_event(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        self.wfile.flush()

    def _answer(self, handle: Callable[[_Handler, bytes], None], body: bytes) -> None:
        try:
            handle(self, body)
        except RequestError as exc:
            self._reply_json(exc.body(), HTTPStatus(exc.status))
        except EngineError as exc:
            logger.exception("the engine failed")
            self._reply_json({"error": {"message": str(exc)}}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _read_body(self) -> bytes | None:
        """Return the body, or None after having refused it."""
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if "Transfer-Encoding" in self.headers or length < 0:
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
            return None
        if length > _MAX_BODY_BYTES:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {_MAX_BODY_BYTES} bytes")
            return None
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return None
        return body

    def _reply_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._reply(orjson.dumps(value), status, "application/json")

    def _reply(
        self, body: bytes, status: HTTPStatus = HTTPStatus.OK, content_type: str | None = None
    ) -> None:
        self.send_response(status)
        if content_type is not None:
            self.send_header("Content-Type", content_type)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(_ROUTES[urlsplit(self.path).path]))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _is_client_gone(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


_ROUTES: dict[str, dict[str, Callable[[_Handler, bytes], None]]] = {
    "/ready": {"GET": _Handler.ready},
    "/health": {"GET": _Handler.health},
    "/health_generate": {"GET": _Handler.health},
    "/model_info": {"GET": _Handler.model_info},
    "/get_model_info": {"GET": _Handler.model_info},
    "/server_info": {"GET": _Handler.server_info},
    "/get_server_info": {"GET": _Handler.server_info},
    "/v1/models": {"GET": _Handler.models},
    "/v1/loads": {"GET": _Handler.loads},
    "/flush_cache": {"GET": _Handler.flush_cache, "POST": _Handler.flush_cache},
    "/abort_request": {"POST": _Handler.abort_request},
    "/generate": {"POST": _Handler.generate, "PUT": _Handler.generate},
}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
