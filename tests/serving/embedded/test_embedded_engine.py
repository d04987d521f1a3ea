"""The engine inside the process, against llama.cpp itself; the real model runs."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from serving.embedded.backend import LlamaBackend
from serving.embedded.engine import Engine, Request
from serving.embedded.errors import ModelError, RequestError
from serving.embedded.gguf import write_tokenizer_folder
from serving.embedded.model import ModelFiles, resolve_model
from serving.embedded.sampling import SamplingParams

pytestmark = pytest.mark.embedded

TEXTS = [
    "",
    " ",
    "plain words",
    "  leading, trailing and   inner spaces  ",
    "line\nline\r\n\n\n\ttab \t mix",
    "numbers 1 12 123 3.14159 1,000,000 0x1F 2026-11-30",
    "def f(x):\n    return {'a': x[1:], \"b\": x**2}  # comment",
    "it's we'll they'd I'M DON'T o'clock",
    "héllo wörld naïve façade Ångström ﬁ ﬂ",
    "日本語のテキストと漢字、カタカナ。",
    "Привет, как дела? Ёж",
    "مرحبا بالعالم שלום עולם",
    "ไทย हिन्दी বাংলা 한국어",
    "🙂🎉🚀👩‍👩‍👧‍👦🏳️‍🌈",
    "math: ∑∫√≠≤≥ ∀x∈ℝ, x²≥0 ½ ①",  # noqa: RUF001
    "e\u0301 versus \u00e9, zero\u200bwidth, nb\u00a0space, \u2028 separator",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<file_sep>y",
    "<|im_start |> not special <|im_end",
    '<think>\nstep\n</think> <tool_call>{"name": "f"}</tool_call>',
    "a" * 300,
    "\u0000\u0001\u007f\ufeff\ufffd",
    "mixed٣٤٥ digits ५६७ Ⅻ 五",  # noqa: RUF001
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def local(files) -> Engine:
    return Engine(files, slots=2, context_length=512, threads=2)


@pytest.fixture(scope="module")
def backend(local) -> LlamaBackend:
    return local._backend


@pytest.fixture(scope="module")
def tokenizer(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")  # written now: the cached one may be older than the code
    write_tokenizer_folder(files.gguf, folder)
    return AutoTokenizer.from_pretrained(folder)


def random_text(rng: random.Random) -> str:
    """Characters of many scripts, with digits, spaces and special tokens among them."""
    blocks = [(32, 127), (48, 58), (0xA0, 0x250), (0x370, 0x530), (0x600, 0x700), (0x3040, 0x3100)]
    blocks += [(0x4E00, 0x4F00), (0x1F300, 0x1F650), (9, 14), (0x2000, 0x2070)]
    pieces = [chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randrange(1, 80))]
    if rng.random() < 0.2:
        pieces.insert(rng.randrange(len(pieces)), "<|im_end|>")
    return "".join(pieces)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_tokenizer_agrees_with_llama_cpp(backend, tokenizer, text):
    """AutoTokenizer over the written folder gives llama.cpp's ids, and gives the text back."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == backend.tokenize(text)
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_agrees_with_llama_cpp_on_random_texts(backend, tokenizer):
    """The same for a few hundred random texts of many scripts."""
    rng = random.Random(20261130)
    for text in (random_text(rng) for _ in range(300)):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.tokenize(text), ascii(text)


@pytest.mark.parametrize(
    "text",
    [
        "Repeat: 日本語日本語日本語日本語日本語",
        "🙂🎉🚀🙂🎉🚀🙂🎉🚀",
        "<|im_start|>user\nПривет! Как дела?<|im_end|>\n<|im_start|>assistant\n",  # noqa: RUF001
        "<|im_start|>user\nWrite a Python function that adds two numbers.<|im_end|>\n<|im_start|>assistant\n",
    ],
)
def test_segments_give_the_ids_of_one_long_call(local, backend, text):
    """Sampling in segments loses and changes no id, also inside multi-byte characters."""
    ids = local.encode(text)
    params = SamplingParams(max_new_tokens=100, max_new_tokens_given=True, temperature=0, ignore_eos=True)
    whole = backend.complete(
        {**params.to_llama(), "prompt": ids, "n_predict": 100, "cache_prompt": False, "id_slot": 1},
        cancelled=lambda: False,
    )
    partials: list[list[int]] = []
    [answer] = local.generate(
        [Request("r", ids, params)], on_partial=lambda partial: partials.append(partial.output_ids)
    )
    assert [len(partial) for partial in partials] == [32, 64, 96]
    assert answer.output_ids == whole.tokens
    assert len(answer.output_ids) == 100


def test_a_call_is_cut_short_when_it_is_cancelled(backend):
    """A long call to llama.cpp returns at once when nobody wants it, and its slot is soon usable again."""
    body = {**SamplingParams(ignore_eos=True).to_llama(), "prompt": [1, 2], "id_slot": 0}
    started = time.monotonic()
    cancelled = backend.complete({**body, "n_predict": 480}, cancelled=lambda: True)
    assert cancelled is None
    assert time.monotonic() - started < 1
    assert len(backend.complete({**body, "n_predict": 1}, cancelled=lambda: False).tokens) == 1
    assert time.monotonic() - started < 5


def test_a_lost_client_gives_the_slot_back(local):
    """A request that nobody waits for ends as aborted within a second."""
    asked = []

    def gone() -> bool:
        asked.append(True)
        return len(asked) > 3

    params = SamplingParams(max_new_tokens=480, max_new_tokens_given=True, ignore_eos=True)
    [answer] = local.generate([Request("gone", [1, 2], params)], gone=gone)
    assert answer.finish_reason["type"] == "abort"
    assert answer.total_s < 5
    assert (local.load().running, local.load().waiting) == (0, 0)


def test_a_failing_listener_gives_the_slot_back(local):
    """When a stream cannot be written the request ends, and its rid and slot are free."""

    def broken_pipe(_partial) -> None:
        raise BrokenPipeError

    params = SamplingParams(max_new_tokens=100, max_new_tokens_given=True, ignore_eos=True)
    with pytest.raises(BrokenPipeError):
        local.generate([Request("pipe", [1, 2], params)], on_partial=broken_pipe)
    assert (local.load().running, local.load().waiting, local.load().used_tokens) == (0, 0, 0)
    [answer] = local.generate([Request("pipe", [1, 2], SamplingParams(max_new_tokens=1))])
    assert len(answer.output_ids) == 1


def test_nothing_of_a_batch_runs_when_a_rid_is_taken_twice(local):
    """A batch with a repeated rid is refused, and none of its rids stays in use."""
    params = SamplingParams(max_new_tokens=1)
    with pytest.raises(RequestError, match="Duplicate"):
        local.generate([Request("a", [1], params), Request("b", [1], params), Request("a", [2], params)])
    assert len(local.generate([Request("a", [1], params), Request("b", [1], params)])) == 2


def test_the_inner_port_is_closed_to_others(backend):
    """llama.cpp's own HTTP port asks for a key that only the engine knows."""
    import httpx

    url = f"http://{backend._host}:{backend._port}/completion"
    assert httpx.post(url, json={"prompt": [1]}, trust_env=False).status_code == 401


def test_a_context_longer_than_the_model_knows_is_refused(files):
    """The message names both numbers."""
    with pytest.raises(ModelError, match=r"9000.*8192"):
        LlamaBackend(files.gguf, slots=1, context_length=9000, threads=1)


def test_a_model_that_is_cut_short_is_refused(files, tmp_path):
    """A file with a good header and missing weights is an error of ours, not a crash."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(files.gguf.read_bytes()[:5_000_000])
    with pytest.raises(ModelError, match="cut short"):
        LlamaBackend(broken, slots=1, context_length=256, threads=1)


def test_a_tokenizer_of_another_model_is_refused(files, tmp_path):
    """A tokenizer with more tokens than the model would make ids that kill a server."""
    import json

    content = json.loads((files.tokenizer_dir / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzzzzzzz"] = 49_152
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="do not belong together"):
        Engine(ModelFiles(files.gguf, tmp_path), slots=1, context_length=256, threads=1)


def test_a_missing_tokenizer_is_named(files, tmp_path):
    """The path that was looked for is in the message."""
    with pytest.raises(ModelError, match=str(Path(tmp_path) / "tokenizer.json")):
        Engine(ModelFiles(files.gguf, tmp_path), slots=1, context_length=256, threads=1)
