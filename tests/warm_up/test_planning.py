"""A look at the sources before a run: what is wrong with one stops no other."""

import json

import pytest
from tiny_tokenizer import make_tokenizer

from tasks.prepare.adapters import ADAPTERS
from tasks.prepare.preparation import PrepareOptions
from tasks.records.dataset_plan import DatasetPlan
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer
from tasks.warm_up.planning import DatasetWork, sample_datasets


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny tokenizer."""
    return load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tok"))))


def _work(path, *, shape="last"):
    options = PrepareOptions(name=path.stem, adapter="messages", seed=0, shape=shape)
    return DatasetWork(DatasetPlan(path.stem, 1000, None), str(path), options)


@pytest.mark.parametrize("shape", ["last", "trajectory"])
def test_a_row_that_we_fail_at_is_a_problem_of_its_dataset_alone(tmp_path, target, monkeypatch, shape):
    """It is named by the type and the text of the error; the next dataset is sampled."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for name, row in (("a", {"odd": 0, "messages": turns}), ("b", {"odd": 1, "messages": turns})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    adapt = ADAPTERS["messages"]

    def fail_at_some(row):
        assert 1 / row["odd"]
        return adapt(row)

    monkeypatch.setitem(ADAPTERS, "messages", fail_at_some)
    works = [_work(tmp_path / "a.jsonl", shape=shape), _work(tmp_path / "b.jsonl", shape=shape)]
    bad, good = sample_datasets(works, target, Renderer(target))
    assert "ZeroDivisionError: division by zero" in bad.dataset.problem
    assert (good.dataset.problem, len(good.dataset.prompt_tokens)) == (None, 1)
