"""What a server says of itself, and what of it may be kept.

Knows the fields of /model_info and /server_info (SGLang 0.5.23); asks nobody. Invariant: what
`redact_settings` and `redact_launch` return holds no value that stood under the name of a secret, wherever
else it stood.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REDACTED = "<redacted>"
# Whole words of a name: api_key, hf_token, ssl_keyfile_password; not max_total_num_tokens, tokenizer_path.
_SECRET_NAME = re.compile(
    r"(^|[_\-.])(key|keys|apikey|token|secret|password|passwd|passphrase|credentials?|authorization|auth|"
    r"bearer|cookie|command|cmd|argv|env|environ)($|[_\-.])",
    re.IGNORECASE,
)
_SECRET_IN_TEXT = re.compile(
    r"""((?:key|token|secret|password|passwd|bearer|authorization)["']?[\s:=]+["']?)([^\s"',;}\]&]+)""",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(\w+://)[^/@\s]+@")
_SHORTEST_SECRET = 4  # a shorter one would blacken half of the settings


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server's own words; `server_info` may hold secrets in clear.

    A router's are those of one server behind it, and it does not say which. `vocab_size` is how many ids the
    served model has, None from one that does not tell.
    """

    url: str
    model_info: Mapping[str, Any]
    server_info: Mapping[str, Any]
    is_router: bool = False
    vocab_size: int | None = None

    @property
    def names(self) -> list[str]:
        """What the served model is called: its path and, where it differs, its served name."""
        said = (self.model_info.get("model_path"), self._read("served_model_name"))
        return list(dict.fromkeys(str(name) for name in said if name))

    @property
    def context_length(self) -> int | None:
        """What the server was started with; None leaves it to the model's config."""
        return _positive(self.server_info.get("context_length"))

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that fit into the KV memory of one rank, of all its requests together."""
        return _positive(self.server_info.get("max_total_num_tokens"))

    @property
    def all_kv_tokens(self) -> int | None:
        """The same over all data-parallel ranks, each of which has as many; a router's are not known."""
        ranks = _positive(self.server_info.get("dp_size")) or 1
        return None if self.kv_tokens is None or self.is_router else ranks * self.kv_tokens

    @property
    def max_running(self) -> int | None:
        """Requests that the server works on at once."""
        return _positive(self.server_info.get("max_running_requests"))

    @property
    def tokenizes(self) -> bool:
        """Whether it has a tokenizer of its own to compare with."""
        return not self.server_info.get("skip_tokenizer_init")

    def _read(self, name: str) -> Any:
        return self.model_info.get(name) or self.server_info.get(name)


def redact_settings(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """The plain settings of /server_info that are set, without any secret.

    Nested parts are left out: they are states, not settings, and repeat all of it once a rank.
    """
    secrets = sorted(set(_find_secrets(server_info)), key=len, reverse=True)
    return {
        name: REDACTED if _is_secret(name, value) else _clean(value, secrets)
        for name, value in server_info.items()
        if _is_plain(value)
    }


def redact_launch(
    *, flags: Mapping[str, Any], argv: Sequence[str], env: Mapping[str, str], secrets: Collection[str] = ()
) -> dict[str, Any]:
    """How a server was started, without any secret; `secrets` are values that are known to be some."""
    found = {*_find_secrets(flags), *_find_secrets(env), *secrets}
    known = sorted((one for one in found if len(one) >= _SHORTEST_SECRET), key=len, reverse=True)

    def hide(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: REDACTED if value and _SECRET_NAME.search(name) else _clean(value, known)
            for name, value in settings.items()
        }

    return {"flags": hide(flags), "argv": _clean(list(argv), known), "env": hide(env)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, str | int | float) for one in value)
    return isinstance(value, str | int | float) and value != ""


def _is_secret(name: str, value: Any) -> bool:
    """A number under such a name is a size or a switch: num_draft_token, enable_auth."""
    return isinstance(value, str | list) and _SECRET_NAME.search(name) is not None


def _find_secrets(value: Any) -> Iterator[str]:
    """The texts under the names of secrets, wherever they are; a command line is no one secret."""
    if isinstance(value, list):
        for one in value:
            yield from _find_secrets(one)
    if not isinstance(value, Mapping):
        return
    for name, one in value.items():
        if isinstance(one, str) and _is_secret(str(name), one) and len(one) >= _SHORTEST_SECRET:
            if " " not in one and one != REDACTED:
                yield one
        else:
            yield from _find_secrets(one)


def _clean(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, list):
        return [_clean(one, secrets) for one in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, REDACTED)
    value = _USER_IN_URL.sub(rf"\1{REDACTED}@", value)
    return _SECRET_IN_TEXT.sub(rf"\1{REDACTED}", value)


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
