"""A model that cannot be served with these flags on these GPUs is refused before anything starts."""

import json
import os

import pytest

from serving.client.errors import LaunchRefused
from serving.launch.command import build_command
from serving.launch.model_checks import check_model, read_model
from serving.launch.profile import load_profile

RTX, RTX_GIB = "rtx-pro-6000-x8", 95
GIB = 2**30


@pytest.fixture
def make_model(tmp_path):
    """A model's folder: its config, and weights of a size that takes no room on the disk."""

    def make(*, gib=0.0, tokenizer=None, **config):
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"num_attention_heads": 64, **config}))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
        for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
            with (folder / name).open("wb") as file:
                os.truncate(file.fileno(), int(gib * GIB / 2))
        return str(folder)

    return make


def check(model, profile=RTX, **overrides):
    """The warnings for a model with some flags."""
    settings = {name.replace("_", "-"): value for name, value in overrides.items()}
    chosen = load_profile(profile)
    return check_model(chosen, build_command(chosen, model=model, overrides=settings))


def refusal(model, profile=RTX, **overrides):
    """The message that it is refused with."""
    with pytest.raises(LaunchRefused) as refused:
        check(model, profile, **overrides)
    return str(refused.value)


def test_a_model_that_fits_is_passed_without_a_word(make_model):
    """Kimi's 555 GiB on eight cards of 95, split by eight."""
    assert check(make_model(gib=555)) == []


@pytest.mark.parametrize("name", ["/models/gone", "./gone", "../gone", "models/of/mine", "~/model"])
def test_a_folder_that_is_not_there_is_refused(name):
    """It would be taken for a Hub id, and fail while it starts."""
    assert f"there is no folder {name}" in refusal(name)


def test_a_folder_without_a_config_is_refused(tmp_path):
    """It is no model's; one with a config that is no JSON is named."""
    assert "has no config.json" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(str(tmp_path))


@pytest.mark.parametrize("name", ["m", "moonshotai/Kimi-K2.5", "s3://bucket/model"])
def test_a_model_that_is_not_here_yet_is_passed(name, monkeypatch, tmp_path):
    """Nothing is known of it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert check(name) == []


def test_a_model_in_the_hubs_cache_is_read(monkeypatch, tmp_path):
    """As a folder would be."""
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"auto_map": {}, "num_attention_heads": 12}')
    refs = tmp_path / "models--org--name/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_model("org/name").folder == snapshot
    assert "12 attention heads" in refusal("org/name")


def test_more_gpus_than_the_machine_has_are_refused():
    """Also where they come from several flags; nodes divide them."""
    assert "--tp-size 16 needs 16 GPUs, and rtx-pro-6000-x8 has 8" in refusal("m", tp_size="16")
    assert "--tp-size 8 --dp-size 2 needs 16 GPUs" in refusal("m", dp_size="2")
    assert check("m", tp_size="16", nnodes="2") == []
    assert check("m", dp_size="8", enable_dp_attention="") == []


def test_fewer_gpus_are_warned_about():
    """They may be meant; a number that few models can be split into is said to be one."""
    [four] = check("m", tp_size="4")
    [three] = check("m", tp_size="3")
    assert "--tp-size 4 uses 4 of the 8 GPUs" in four
    assert "few models" not in four
    assert "few models can be split into 3 parts" in three


def test_heads_that_cannot_be_split_are_refused(make_model):
    """The message says what could be."""
    model = make_model(text_config={"num_attention_heads": 12}, num_attention_heads=None)
    assert "cannot be split into 8 equal parts; take one of 1, 2, 3, 4, 6" in refusal(model)
    assert check(model, enable_dp_attention="", dp_size="8") == []


def test_weights_larger_than_the_memory_are_refused(make_model):
    """One message with the arithmetic; a flag that makes them smaller makes it a warning."""
    model = make_model(gib=8 * 90)
    message = refusal(model)
    assert "90.0 GiB of each GPU (split by 8)" in message
    assert f"0.94 of its {RTX_GIB} GiB leaves 89.3" in message
    [warning] = check(model, quantization="fp8")
    assert "do not fit" in warning


def test_little_room_for_kv_memory_is_warned_about(make_model):
    """A model that just fits runs few requests at once."""
    [warning] = check(make_model(gib=26), "rtx-5090")
    assert "only 1.2 GiB are left for KV memory" in warning


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"auto_map": {}}, "may need it"),
        ({"tokenizer": {"auto_map": {}}}, "may need it"),
        ({"model_type": "kimi_k25"}, "needs its own Python code"),
    ],
)
def test_code_of_the_models_own_is_said_and_never_trusted(make_model, files, words):
    """The flag to add is in the message; with it there is nothing to say."""
    model = make_model(**files)
    [warning] = check(model)
    assert words in warning
    assert "--set trust-remote-code=" in warning
    assert check(model, trust_remote_code="") == []


def test_a_cpu_has_no_gpus_to_check(make_model):
    """Neither their number nor their memory."""
    assert check(make_model(gib=500), "cpu", tp_size="3") == []
