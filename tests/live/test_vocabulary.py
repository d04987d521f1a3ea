"""Tokenizers of another model on a real SGLang server: refused, and the server lives.

An id that the model does not have ends SGLang's scheduler, and the server with it.
"""

import json
import os
import shutil
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

pytestmark = [pytest.mark.live, pytest.mark.prefect]


def _read_vocab_size(folder):
    return json.loads((Path(folder) / "config.json").read_text())["vocab_size"]


def _extend(source, folder, count, *, in_template=False):
    """The tokenizer with so many tokens more, of which the template writes the last or none."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = [f"<|extra_{number}|>" for number in range(count)]
    tokenizer.add_tokens(tokens)
    if in_template:
        tokenizer.chat_template = tokens[-1] + tokenizer.chat_template
    tokenizer.save_pretrained(folder)


def _make_larger(source, folder):
    _extend(source, folder, _read_vocab_size(source), in_template=True)


def _make_superset(source, folder):
    """In rows that the model has, but no token for."""
    _extend(source, folder, 3)


def _make_smaller(source, folder):
    tokenizer = AutoTokenizer.from_pretrained(source)
    fewer = len(tokenizer) - 30
    tokenizer.train_new_from_iterator(["aa bb"], vocab_size=fewer, show_progress=False).save_pretrained(
        folder
    )


def _make_other_ids(source, folder):
    """The same tokens, those that are not special in the reverse order."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    added = {one["content"] for one in content["added_tokens"]}
    plain = {token: one for token, one in content["model"]["vocab"].items() if token not in added}
    content["model"]["vocab"] |= dict(zip(plain, sorted(plain.values(), reverse=True), strict=True))
    path.write_text(json.dumps(content))


def _generates(url):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    reply = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False)
    return reply.status_code == 200 and len(reply.json()["output_ids"]) == 3


@pytest.mark.parametrize("make", [_make_larger, _make_superset, _make_smaller, _make_other_ids])
def test_another_models_tokenizer_is_refused_and_the_server_lives(
    runner, tokenizer_dir, sglang_url, tmp_path, make
):
    """Whether it has more ids than the model, more or fewer than the server's tokenizer, or other ones."""
    make(tokenizer_dir, tmp_path / "variant")
    runner.raw["target"]["tokenizer"] = str(tmp_path / "variant")
    runner.add_dataset("a", prompts=20)
    done = runner.call("check", "--param-file", str(runner.write()))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "target.tokenizer" in done.stderr
    assert _generates(sglang_url)


@pytest.fixture
def start_model(start_server, tokenizer_dir):
    """`start_model(folder, *flags)` starts the server of SGLANG_COMMAND on another model."""
    command = os.environ.get("SGLANG_COMMAND", "")
    if str(tokenizer_dir) not in command:
        pytest.skip("starts a server of its own: give a SGLANG_COMMAND that names the model's folder")

    def start(folder, *flags):
        return start_server(" ".join([command.replace(str(tokenizer_dir), str(folder)), *flags])).url

    return start


def test_tokens_beyond_the_model_are_kept_from_the_server(runner, tokenizer_dir, start_model, tmp_path):
    """Of its own tokenizer: the prompt with one is rejected, the others are answered."""
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir, model)
    size = _read_vocab_size(model)
    _extend(tokenizer_dir, model, size)
    url = start_model(model)
    runner.raw["target"]["tokenizer"] = str(model)
    runner.raw["server"]["base_urls"] = [url]
    last = f"<|extra_{size - 1}|>"
    path = runner.folder / "a.jsonl"
    with path.open("w") as file:
        for name, text in {"bad": last, "good": "hello", "fine": "the fox"}.items():
            file.write(json.dumps({"id": name, "messages": [{"role": "user", "content": text}]}) + "\n")
    runner.add_dataset("a", prompts=None)
    done = runner.run("--max-tokens-per-dataset", "100000")
    assert done.returncode == 0, done.stderr
    assert f"the model at {url} has {size}" in done.stderr
    assert {row["id"] for row in runner.rows("a")} == {"a-good", "a-fine"}
    [rejected] = map(json.loads, (runner.output_dir / "a" / "rejected.jsonl").read_text().splitlines())
    assert (rejected["id"], rejected["reason"]) == ("a-bad", "id_outside_vocabulary")
    assert _generates(url)


def test_a_server_without_a_tokenizer_tells_its_vocabulary(runner, tokenizer_dir, start_model, tmp_path):
    """Its model's own tokenizer passes; one of a model of another size is refused."""
    url = start_model(tokenizer_dir, "--skip-tokenizer-init")
    runner.raw["server"]["base_urls"] = [url]
    runner.add_dataset("a", prompts=20)
    done = runner.call("check", "--param-file", str(runner.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"its model has {_read_vocab_size(tokenizer_dir)} ids" in done.stdout
    _make_other_ids(tokenizer_dir, tmp_path / "variant")
    config = tmp_path / "variant" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1000}))
    runner.raw["target"]["tokenizer"] = str(tmp_path / "variant")
    done = runner.call("check", "--param-file", str(runner.write()))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "says 1,000" in done.stderr
    assert _generates(url)
