"""POST one body and get one back, thousands of times a second.

Knows aiohttp and how its failures translate; does not know what the bodies mean. Why not httpx here too:
its pool is linear in the connections, which costs 30 times the CPU at 150 of them (docs/adr/0006).
"""

import asyncio
from collections.abc import Mapping

import aiohttp

from serving.client.errors import BadReply, RequestTimedOut, ServerMisconfigured, ServerUnreachable

# uvicorn closes a connection that was idle for 5 s; leaving it first avoids a request on a closing one.
_KEEPALIVE_S = 4.0
_READ_BUFFER = 1 << 18  # an answer of 16,000 ids is some 100 kB: one wake-up instead of two


class HotPath:
    """Keeps connections to one base URL; made on first use, for aiohttp wants a running loop."""

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str], timeout_s: float, connect_timeout_s: float
    ) -> None:
        self._base_url = base_url
        self._headers = {**headers, "Content-Type": "application/json"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the whole body of the answer.

        Raises:
            RequestTimedOut: no whole answer within the time-out.
            ServerUnreachable: no connection, or it broke.
            BadReply: the body cannot be decoded.
            ServerMisconfigured: the URL cannot be used.
        """
        if self._session is None:
            self._session = self._open()
        url = self._base_url + path
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as reply:
                return reply.status, await reply.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as exc:
            raise ServerMisconfigured(f"{self._base_url}: not a usable URL ({exc})") from exc
        except TimeoutError as exc:
            raise RequestTimedOut(
                f"{url}: no answer in time ({type(exc).__name__})", server=self._base_url
            ) from exc
        except aiohttp.ClientPayloadError as exc:
            if isinstance(exc.__cause__, aiohttp.http_exceptions.ContentEncodingError):
                raise BadReply(
                    f"{url}: the body cannot be decoded ({exc})", server=self._base_url, status=200
                ) from exc
            raise self._unreachable(exc) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self._unreachable(exc) from exc

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # transports are told to close; let the loop do it

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            headers=self._headers,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            timeout=self._timeout,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BUFFER,
        )

    def _unreachable(self, exc: Exception) -> ServerUnreachable:
        what = str(exc) or type(exc).__name__
        was_sent = not isinstance(exc, aiohttp.ClientConnectorError)
        return ServerUnreachable(f"{self._base_url}: {what}", server=self._base_url, was_sent=was_sent)
