"""The embedded engine's error tree. Knows what can go wrong and what a client is told; catches nothing.

EmbeddedError                 the embedded engine cannot do what was asked
├── ModelError                no usable model: a wrong name, a failed download, an unfit folder
│   └── GgufError             a GGUF file that cannot be read, or whose tokenizer cannot be rebuilt
├── EngineError               llama.cpp refused or failed
└── RequestError              one request is refused with 400 {"error": {"message": …}}
    ├── ContractError         … with 400 {"error": "…"}: an unknown or mistyped sampling parameter
    └── SchemaError           … with 400 {"object": "error", …}: the body is not a generate request
"""

from __future__ import annotations

from typing import Any


class EmbeddedError(Exception):
    """The embedded engine cannot do what was asked."""


class ModelError(EmbeddedError):
    """There is no usable model for the name or path that was given."""


class GgufError(ModelError):
    """A GGUF file cannot be read, or its tokenizer cannot be rebuilt."""


class EngineError(EmbeddedError):
    """llama.cpp could not be started, or failed while answering."""


class RequestError(EmbeddedError):
    """One request is refused; nothing was generated for it."""

    status = 400

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the refusal."""
        return {"error": {"message": str(self)}}


class ContractError(RequestError):
    """A sampling parameter is unknown or has the wrong type."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the refusal: here `error` is a string."""
        return {"error": str(self)}


class SchemaError(RequestError):
    """The body is not JSON, or not the JSON of the endpoint."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the refusal, in the OpenAI-compatible shape."""
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": 400}
