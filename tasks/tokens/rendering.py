"""From a conversation to the ids that the model sees.

Knows the chat template and its gaps; does not know servers. Invariant: ids are inside the vocabulary
and at least one: an empty prompt or a foreign id kills a real SGLang server (0.5.23).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tasks.records.rows import Prompt
from tasks.tokens.call_style import calls_as_text, find_call_style, has_calls
from tasks.tokens.special_tokens import encode_plain
from tasks.tokens.tokenizer import TargetTokenizer

_PROBE = "draftmill_probe_tool"

_Made = TypeVar("_Made")


class RenderError(ValueError):
    """A prompt that cannot be rendered; `reason` is the code for rejected.jsonl."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Renderer:
    """Renders prompts with the target's own chat template; safe to use from several threads.

    A template that ignores `tools` or `tool_calls` without a word (SmolLM2's does) is noticed once,
    here. The tools then go into the system text. Calls make a prompt an error, unless `calls_as_text` has
    them written into the assistant's text, in a form that the model was not trained with.
    """

    def __init__(self, target: TargetTokenizer, *, calls_as_text: bool = False) -> None:
        from transformers import PreTrainedTokenizerBase as Base  # imported here: it costs seconds

        self._tokenizer = target.tokenizer
        self._vocab_size = target.vocab_size
        # A tokenizer with code of its own (Kimi's) may do more than render and tokenize.
        is_plain = type(self._tokenizer).apply_chat_template is Base.apply_chat_template
        self._backend = _find_backend(self._tokenizer) if is_plain else None
        tools = [_probe_tool()]
        self._shows_tools = {system: self._sees(tools=tools, system=system) for system in (False, True)}
        self.call_style = find_call_style(self._try_template)
        self._calls_as_text = calls_as_text and self.call_style is None

    def shows_tools(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template shows tools with these messages; some do only in a system message's text."""
        return self._shows_tools[any(message.get("role") == "system" for message in messages)]

    @property
    def refuses_calls(self) -> bool:
        """Whether a prompt with tool calls cannot be rendered."""
        return self.call_style is None and not self._calls_as_text

    def render(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, generation prompt included.

        Raises:
            RenderError: the template refuses the conversation, or the ids are none or not the model's.
        """
        return self._check(self._apply_template(prompt, tokenize=True))

    def render_text(self, prompt: Prompt, *, add_generation_prompt: bool = True) -> str:
        """The text that the same ids stand for, or that of a conversation which waits for no answer.

        Raises:
            RenderError: the template refuses the conversation.
        """
        return str(self._apply_template(prompt, add_generation_prompt=add_generation_prompt))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered texts or parts of them, each by itself and checked as a prompt's are.

        Raises:
            RenderError: a text has no ids, or ids that are not the model's.
        """
        if self._backend is None:
            return [self._check(encode_plain(self._tokenizer, text)) for text in texts]
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._check(one.ids) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included and nothing tidied up."""
        if self._backend is None:
            return str(self._tokenizer.decode(list(ids)))
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def render_all(self, prompts: Sequence[Prompt]) -> list[list[int] | RenderError]:
        """The same for several prompts, where each that cannot be rendered gives its error.

        Their texts are tokenized in one call, which costs half as much and lets other threads work.
        """
        if self._backend is None:
            return [self._try(self.render, prompt) for prompt in prompts]
        texts = [self._try(self._apply_template, prompt) for prompt in prompts]
        good = [text for text in texts if not isinstance(text, RenderError)]
        try:
            encoded = (one.ids for one in self._backend.encode_batch_fast(good, add_special_tokens=False))
        except Exception:  # noqa: BLE001  one text may be bad for all: each by itself then, with its own reason
            return [self._try(self.render, prompt) for prompt in prompts]
        return [
            text if isinstance(text, RenderError) else self._try(self._check, next(encoded)) for text in texts
        ]

    def _apply_template(
        self, prompt: Prompt, *, tokenize: bool = False, add_generation_prompt: bool = True
    ) -> Any:
        messages, tools = prompt.messages, prompt.tools
        if tools and not self.shows_tools(messages):
            messages, tools = _tools_as_text(messages, tools), None
        messages = self._adapt_calls(messages)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=tokenize,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,  # transformers 5 answers with a BatchEncoding otherwise
                **prompt.chat_template_kwargs,
            )
        except Exception as exc:  # a template is a program: jinja2, type, key errors, raise_exception(...)
            raise RenderError("template_error", f"the chat template refuses it: {exc}") from exc

    def _adapt_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.call_style is not None:
            return self.call_style.adapt(messages)
        if self._calls_as_text:
            return calls_as_text(messages)
        if has_calls(messages):
            raise RenderError(
                "tool_calls_not_rendered",
                "the chat template shows no tool calls; target.tool_calls_as_text: true has them written as "
                "text, in a form that is not the model's own",
            )
        return messages

    def _check(self, ids: list[int]) -> list[int]:
        if not ids:
            raise RenderError("empty_prompt", "the chat template renders it to nothing")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise RenderError(
                "id_outside_vocabulary",
                f"it renders to id {max(ids)}, but the model has {self._vocab_size} ids",
            )
        return list(ids)

    @staticmethod
    def _try(make: Callable[[Any], _Made], value: Any) -> _Made | RenderError:
        try:
            return make(value)
        except RenderError as exc:
            return exc

    def _sees(self, *, tools: list[dict[str, Any]], system: bool) -> bool:
        """Whether a probe's tools show in the rendered text."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}] if system else []
        text = self._try_template([*messages, {"role": "user", "content": "hello"}], tools=tools)
        return text is not None and _PROBE in text

    def _try_template(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> str | None:
        """The rendered text of a probe; None where the template raises."""
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        except Exception:  # noqa: BLE001  a template is a program and may raise anything; that is an answer
            return None


def fit_max_new_tokens(prompt_tokens: int, *, max_new_tokens: int, context_length: int | None) -> int:
    """The max_new_tokens that fits behind a prompt; the server would shorten the answer without a word.

    Raises:
        RenderError: nothing fits.
    """
    if context_length is None:
        return max_new_tokens
    room = context_length - prompt_tokens - 1  # SGLang keeps one position free
    if room < 1:
        raise RenderError(
            "prompt_too_long", f"the prompt is {prompt_tokens} tokens, the context {context_length}"
        )
    return min(max_new_tokens, room)


def _find_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer under a transformers one, where it gives the same ids by itself; else None.

    What transformers 5 adds for a rendered text is to take back truncation and padding.
    """
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if backend is None or backend.truncation is not None or backend.padding is not None:
        return None
    return backend


def _tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"You may call these functions:\n{listing}"
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _probe_tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"value": {"type": "string", "description": "a value"}}}
    return {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": parameters}}
