"""What is kept of a server's own words: its settings, and none of its secrets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.warm_up.server_facts import ServerFacts, redact_launch, redact_settings

KEY = "sk-marker-77"


def test_settings_are_kept_as_they_are():
    """Numbers, switches and names, whatever tokens their names speak of."""
    info = {
        "max_total_num_tokens": 16384,
        "tokenizer_path": "/models/x",
        "skip_tokenizer_init": False,
        "kt_max_deferred_experts_per_token": 3,
        "cuda_graph_bs": [1, 2],
    }
    assert redact_settings(info) == info


def test_what_is_not_set_and_what_is_nested_is_left_out():
    """The states of the ranks repeat everything."""
    assert redact_settings({"a": None, "b": "", "c": [], "internal_states": [{"x": 1}], "d": {"x": 1}}) == {}


@pytest.mark.parametrize(
    "info",
    [
        {"api_key": KEY},
        {"admin_api_key": KEY},
        {"hf_token": KEY},
        {"ssl_keyfile_password": KEY},
        {"launch_command": f"--api-key {KEY} --port 1"},
        {"argv": ["--api-key", KEY]},
        {"extra": json.dumps({"api_key": KEY})},
        {"extra": f"--hf-token={KEY}"},
        {"url": f"http://me:{KEY}@host/"},
        {"note": f"x{KEY}y", "internal_states": [{"api_key": KEY}]},
    ],
)
def test_a_secret_is_redacted_wherever_it_stands(info):
    """By the name it stands under, there or elsewhere, or by the words before it."""
    assert KEY not in json.dumps(redact_settings(info))


@given(
    secret=st.text("abcdefgh0123456789", min_size=8),
    names=st.lists(st.sampled_from(["api_key", "x", "launch_command", "hf_token", "path"]), min_size=1),
)
def test_the_value_of_a_key_is_nowhere(secret, names):
    """Whatever else repeats it."""
    info = {"api_key": secret, **{f"{name}_{n}": f"/a/{secret}" for n, name in enumerate(names)}}
    assert secret not in json.dumps(redact_settings(info))


def test_a_server_has_its_path_and_its_served_name():
    """The second only where it differs."""
    facts = ServerFacts("u", {"model_path": "/m/x", "served_model_name": "x"}, {})
    assert facts.names == ["/m/x", "x"]
    assert ServerFacts("u", {"model_path": "x"}, {"served_model_name": "x"}).names == ["x"]


def test_a_launch_is_kept_without_its_secrets():
    """Neither under their names, nor where they stand in a word of the command or in another variable."""
    shown = redact_launch(
        flags={"HF_TOKEN": KEY, "tp-size": 4, "trust-remote-code": True, "WANDB_API_KEY": 123456},
        argv=["sglang", "serve", "--tp-size", "4", "--extra", '{"access_key": "hunter2"}', f"--note={KEY}"],
        env={"HF_TOKEN": KEY, "OMP_NUM_THREADS": "8", "NOTE": "123456 main-key", "WANDB_API_KEY": "123456"},
        secrets=["main-key"],
    )
    assert shown["flags"]["tp-size"] == 4
    assert shown["flags"]["trust-remote-code"] is True
    assert shown["argv"][:4] == ["sglang", "serve", "--tp-size", "4"]
    assert shown["env"]["OMP_NUM_THREADS"] == "8"
    assert not any(secret in json.dumps(shown) for secret in (KEY, "hunter2", "123456", "main-key"))
