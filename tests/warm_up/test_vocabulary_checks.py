"""Whether the tokenizer's ids are the served model's, without a server."""

import json

import pytest
from tiny_tokenizer import TEMPLATE, make_tokenizer
from transformers import AutoTokenizer

from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer
from tasks.warm_up.server_facts import ServerFacts
from tasks.warm_up.vocabulary_checks import (
    check_foreign_ids,
    check_text_ids,
    check_vocabulary,
    find_foreign_ids,
)

URL = "http://s"


@pytest.fixture
def made(tmp_path):
    """The folder of a tiny tokenizer."""
    return make_tokenizer(tmp_path / "tokenizer")


def _facts(vocab_size, **info):
    return ServerFacts(URL, {}, info, vocab_size=vocab_size)


def _load(folder, served=None, *, config=None, added=(), template=TEMPLATE):
    """The tokenizer with tokens added, on a model of `served` ids; `config` is config.json's, 0 for none."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if config is not None:
        (folder / "config.json").unlink(missing_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": config}))
    return load_tokenizer(str(folder), served_vocab_size=served)


def _check(target, *servers):
    return list(check_vocabulary(target, servers, Renderer(target)))


def _find(target, *servers, level):
    return [one.text for one in _check(target, *servers) if one.level == level]


def test_a_padded_model_is_good(made):
    """Most models have more ids than their tokenizer."""
    target = _load(made, 1024)
    assert len(target.tokenizer) < 1024
    assert [one.level for one in _check(target, _facts(1024))] == ["note"]


def test_a_tokenizer_larger_than_the_model_is_refused(made):
    """With both sizes and the server; what the config.json beside it says does not count."""
    size = len(_load(made).tokenizer)
    [text] = _find(_load(made, 300), _facts(300), level="refusal")
    assert all(part in text for part in (f"has {size} ids", "has 300", URL, "target.tokenizer"))


def test_a_template_that_writes_an_id_beyond_the_model_is_refused(made):
    """No prompt could be rendered."""
    size = len(AutoTokenizer.from_pretrained(made))
    target = _load(made, size, added=["<|im|>"], template="<|im|>" + TEMPLATE)
    [text] = _find(target, _facts(size), level="refusal")
    assert f"has {size + 1} ids" in text


def test_a_template_that_only_may_write_an_id_beyond_the_model_is_not(made):
    """Where the plain prompts have none of it."""
    size = len(AutoTokenizer.from_pretrained(made))
    target = _load(made, size, added=["<image>"], template="{% if images %}<image>{% endif %}" + TEMPLATE)
    assert not _find(target, _facts(size), level="refusal")


def test_added_tokens_that_no_prompt_needs_are_only_warned_of(made):
    """A text-only model may have the tokenizer of one that sees, image token and all."""
    size = len(AutoTokenizer.from_pretrained(made))
    target = _load(made, size, added=["<image>", "<a>", "<b>", "<c>", "<d>"])
    assert not _find(target, _facts(size), level="refusal")
    [text] = [text for text in _find(target, _facts(size), level="warning") if "is rejected" in text]
    assert f"'<image>' ({size})" in text
    assert "2 more" in text


def test_the_served_models_size_counts(made):
    """Before that of a config.json, and before a guess; the least of several servers."""
    assert _load(made).vocab_size == 1024
    assert _load(made, 900).vocab_size == 900
    assert _load(made, 900, config=0).vocab_size == 900
    target = _load(made, None, config=0)
    assert target.vocab_size == len(target.tokenizer)


def test_a_size_that_nobody_knows_is_said(made):
    """The guess is named; a config.json or a server is enough."""
    [text] = _find(_load(made, config=0), _facts(None), level="warning")
    assert f"{len(_load(made).tokenizer)} is assumed" in text
    assert not _find(_load(made, 1024), _facts(1024), level="warning")
    assert not _find(_load(made, config=1024), _facts(None), level="warning")


@pytest.mark.parametrize(("skips", "level"), [(False, "warning"), (True, "refusal")])
def test_two_sizes_are_two_models_unless_a_text_can_tell(made, skips, level):
    """A fine-tune may have been resized; a server without a tokenizer cannot be asked."""
    target = _load(made, 2048)
    [text] = _find(target, _facts(2048, skip_tokenizer_init=skips), level=level)
    assert "2,048" in text
    assert "1,024" in text


@pytest.mark.parametrize(
    ("servers", "level"),
    [
        ([5, 6], "note"),
        ([0, 5, 6], "note"),
        ([1, 5, 6], "refusal"),
        ([5], "refusal"),
        ([], "refusal"),
        (None, "warning"),
    ],
)
def test_only_a_beginning_of_text_may_be_added(made, servers, level):
    """Which says nothing about prompts that are sent as ids."""
    target = _load(made)
    assert check_text_ids(URL, target, ours=[5, 6], ours_with_added=[5, 6], servers=servers).level == level


@pytest.mark.parametrize(
    ("ids", "text", "words"),
    [
        ([1000], "", None),
        ([1000], None, None),
        ([1000, 900], "<think>", "the ids 1000, 900, which are '<think>' there"),
        ([1000, 1024], "", "the id 1024, but its model has 1,024"),
        ([1024], None, "the id 1024, but its model has 1,024"),
    ],
)
def test_an_answers_ids_are_the_tokenizers_or_nobodys(made, ids, text, words):
    """Padding has no text; the token of another tokenizer has one, and the model of another size more ids."""
    target = _load(made, 1024)
    assert find_foreign_ids(target, {"output_ids": [0, *ids]}) == ids
    found = check_foreign_ids(URL, target, ids, text)
    assert (found is None) == (words is None)
    if found is not None:
        assert found.level == "refusal"
        assert words in found.text
        assert f"has {len(target.tokenizer)};" in found.text


def test_an_answer_without_ids_has_none_that_are_foreign(made):
    """That it has none is said elsewhere."""
    assert find_foreign_ids(_load(made), {"output_ids": None}) == []
