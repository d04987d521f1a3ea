"""Everything that can go wrong between us and a server, as one tree.

ServingError
├── RequestFailed            one request; may be asked again (`costs_attempt` says at what price)
│   ├── ServerUnreachable    no connection, or a router's 503: the server is suspect, not the prompt
│   │   └── ServerLost       the server died over the request
│   │       └── ServerStalled  it froze, or forgot the request
│   ├── ConnectionBroken     the connection broke, but the server is there
│   ├── RequestTimedOut      no answer within the request's time-out
│   ├── ServerBusy           429, or SGLang's 503 of a full queue: wait, nobody is to blame
│   ├── ServerFailed         408, 425, 5xx
│   ├── BadReply             a 200 that is not a whole, true answer
│   └── GenerationAborted    a 200 whose finish_reason is abort
├── PromptRefused            400, 413, 422: asking again cannot help, the prompt is set aside
├── ServerMisconfigured      401, 403, 404, 405: no prompt can succeed; the run stops
│   └── ForeignIds           a 200 with ids that the target does not have: another model answers
├── NotReady                 a server that did not become ready in time
├── UnknownProfile           no profile or preset of that name
├── LaunchRefused            what SGLang would not start with, found before it is started
└── ServerDown               a server of our own that does not run; `failure` says why where that is known
    ├── PortTaken            another process has its port: nothing was started
    ├── StartFailed          it ended before it was ready, or was not ready in time
    ├── KvCacheTooSmall      it runs, but holds far fewer tokens than it should
    └── StaysDown            it died or froze too often; it is not started again
"""


class ServingError(Exception):
    """Base of all errors of this package.

    `requires_user_action` is True when the same command would meet it again until something is changed.
    """

    requires_user_action = False


class RequestFailed(ServingError):
    """One request failed for a reason that may pass.

    `costs_attempt` is False when the failure says nothing about the prompt.
    """

    reason = "request_failed"
    costs_attempt = True

    def __init__(self, message: str, *, server: str, status: int | None = None) -> None:
        super().__init__(message)
        self.server = server
        self.status = status


class ServerUnreachable(RequestFailed):
    """The server could not be reached or the connection broke.

    With a status something else answered for it: a router that has no server to pass the request on to.
    `was_sent` is False when there was no connection that the request could have gone through.
    """

    reason = "server_unreachable"
    costs_attempt = False

    def __init__(
        self, message: str, *, server: str, status: int | None = None, was_sent: bool = False
    ) -> None:
        super().__init__(message, server=server, status=status)
        self.was_sent = was_sent


class ServerLost(ServerUnreachable):
    """The server went away while it worked on the request, which may or may not be why."""

    reason = "server_lost"


class ServerStalled(ServerLost):
    """The server took the request and has done nothing since, for itself or for any other one."""

    reason = "server_stalled"


class ConnectionBroken(RequestFailed):
    """The connection broke under one request while the server went on answering."""

    reason = "connection_broken"


class RequestTimedOut(RequestFailed):
    """No answer within the request's time-out."""

    reason = "timed_out"


class ServerBusy(RequestFailed):
    """The server's queue is full."""

    reason = "server_busy"
    costs_attempt = False


class ServerFailed(RequestFailed):
    """The server answered with an error of its own."""

    reason = "server_failed"


class BadReply(RequestFailed):
    """The server answered 200 with something that is not a whole, true answer."""

    reason = "bad_reply"


class GenerationAborted(RequestFailed):
    """The server aborted the generation; its partial text is not kept."""

    reason = "aborted"


class PromptRefused(ServingError):
    """The server refuses this prompt; asking again cannot help."""

    reason = "http_400"

    def __init__(self, message: str, *, server: str, status: int) -> None:
        super().__init__(message)
        self.server = server
        self.status = status
        self.reason = f"http_{status}"


class ServerMisconfigured(ServingError):
    """No prompt can succeed on this server: wrong key, wrong path."""


class ForeignIds(ServerMisconfigured):
    """An answer has ids that the target does not have: the server or the tokenizer is another model's."""

    requires_user_action = True


class NotReady(ServingError):
    """A server that did not become ready in time."""


class UnknownProfile(ServingError):
    """There is no launch profile, or no preset of it, of that name."""

    requires_user_action = True


class LaunchRefused(ServingError):
    """SGLang would not start like this, or not as meant; every problem is a line of the message."""

    requires_user_action = True


class ServerDown(ServingError):
    """A server of our own does not run.

    `failure` is the name of the `KnownFailure` that explains it, None when nothing is recognised.
    """

    def __init__(
        self, message: str, *, failure: str | None = None, requires_user_action: bool = False
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.requires_user_action = requires_user_action


class PortTaken(ServerDown):
    """Another process has the server's port."""

    def __init__(self, message: str) -> None:
        super().__init__(message, failure="port_taken")


class StartFailed(ServerDown):
    """The server ended before it was ready, or was not ready in time."""


class KvCacheTooSmall(ServerDown):
    """The server is ready, but its KV cache holds far fewer tokens than it should."""

    def __init__(self, message: str) -> None:
        super().__init__(message, failure="kv_too_small", requires_user_action=True)


class StaysDown(ServerDown):
    """The server died or froze more often than it may be started again."""
