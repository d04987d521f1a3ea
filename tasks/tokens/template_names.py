"""Which names a chat template reads, so that one which nothing reads is not taken for a setting.

Knows Jinja and what `apply_chat_template` hands over; does not know datasets. Invariant: with `is_sure`, a
name that is not among `names` changes nothing in any rendered text.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

_NOT_SETTINGS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """What a template reads; not `is_sure` where a tokenizer has code of its own, or nothing can be read."""

    names: frozenset[str]
    is_sure: bool

    def find_unread(self, kwargs: Mapping[str, Any]) -> list[str]:
        """The arguments that nothing reads."""
        return [name for name in kwargs if name not in self.names]


def find_template_names(tokenizer: Any) -> TemplateNames:
    """The settings that a tokenizer's chat templates read, or the code that it brings along for them."""
    from transformers import PreTrainedTokenizerBase as Base  # imported here: it costs seconds

    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, Mapping) else [template]
    try:
        read = {name for text in texts for name in _find_names(str(text))}
    except jinja2.TemplateError:  # a tag that only this tokenizer's own code knows
        return TemplateNames(frozenset(), is_sure=False)
    own = type(tokenizer).apply_chat_template
    if own is not Base.apply_chat_template:
        read |= inspect.signature(own).parameters.keys()
    not_settings = _NOT_SETTINGS | inspect.signature(Base.apply_chat_template).parameters.keys()
    not_settings |= tokenizer.special_tokens_map.keys()
    return TemplateNames(frozenset(read - not_settings), is_sure=own is Base.apply_chat_template)


class _Generation(Extension):
    """The tag around the model's own words, which transformers adds to Jinja; its content counts."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _find_names(template: str) -> set[str]:
    environment = jinja2.Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])  # noqa: S701  no HTML
    return meta.find_undeclared_variables(environment.parse(template))
