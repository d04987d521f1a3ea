"""Take secrets out of what is stored or shown.

Knows which options of SGLang (0.5.23) hold secrets, and is told which values are secret.
Invariant: no known secret of six or more characters is left in what is returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

REDACTED = "<redacted>"
_SHORTEST_INSIDE_TEXT = 6  # a shorter one would turn up in words that are none
_SECRET_KEY = re.compile(
    r"(^|[_-])(key|token|secret|password|passwd|credentials?|authorization)(_[a-z])?$",
    re.IGNORECASE,
)


def redact_text(text: str, secrets: Collection[str]) -> str:
    """A text without the known secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_INSIDE_TEXT:
            text = text.replace(secret, REDACTED)
    return text


def spell_secrets(secrets: Collection[str]) -> list[str]:
    """The secrets as programs write them, plain and in the quotes of Python and JSON; longest first."""
    long = [secret for secret in secrets if len(secret) >= _SHORTEST_INSIDE_TEXT]
    spelt = {word for secret in long for word in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1])}
    return sorted(spelt, key=len, reverse=True)


def secrets_in_command(argv: Sequence[str]) -> set[str]:
    """The values of options whose name says that they are secret: --api-key X, --api-key=X."""
    found = set()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--") and _SECRET_KEY.search(name):
            found.add(value if has_value else following)
    return found - {""}
