"""Take secrets out of what is stored or shown.

Knows which names hold secrets in SGLang's settings (0.5.23), and is told which values are secret.
Invariant: no known secret of six or more characters is left in what is returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

REDACTED = "<redacted>"
_SHORTEST_INSIDE_TEXT = 6  # a shorter one would turn up in words that are none
_SECRET_KEY = re.compile(
    r"(^|[_-])(key|token|secret|password|passwd|credentials?|authorization|launch_command)(_[a-z])?$",
    re.IGNORECASE,
)


def redact_settings(settings: Any, secrets: Collection[str] = ()) -> Any:
    """A copy of /server_info, or of any JSON, without secrets.

    A value goes when its key says so, and wherever a known secret is in it; JSON inside of strings, as in
    `model_loader_extra_config`, is looked into. Empty values stay: that no key is set is no secret.
    """
    if isinstance(settings, dict):
        return {
            key: REDACTED if value and _SECRET_KEY.search(str(key)) else redact_settings(value, secrets)
            for key, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [redact_settings(value, secrets) for value in settings]
    if isinstance(settings, str):
        return _redact_string(settings, secrets)
    return settings


def redact_text(text: str, secrets: Collection[str]) -> str:
    """A text without the known secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_INSIDE_TEXT:
            text = text.replace(secret, REDACTED)
    return text


def secrets_in_command(argv: Sequence[str]) -> set[str]:
    """The values of options whose name says that they are secret: --api-key X, --api-key=X."""
    found = set()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--") and _SECRET_KEY.search(name):
            found.add(value if has_value else following)
    return found - {""}


def _redact_string(text: str, secrets: Collection[str]) -> str:
    if text in secrets:
        return REDACTED
    if text.startswith(("{", "[")):
        try:
            inside = json.loads(text)
        except ValueError:
            return redact_text(text, secrets)
        clean = redact_settings(inside, secrets)
        return text if clean == inside else json.dumps(clean)
    return redact_text(text, secrets)
