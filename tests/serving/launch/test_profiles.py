"""The profiles are whole: every setting has a value that SGLang knows, a reason and a source."""

import re

import pytest

from flows.parameters import Lanes
from serving.client.errors import UnknownProfile
from serving.launch.flag_table import load_flag_table
from serving.launch.profile import FOLDER, list_profiles, load_profile

NAMES = ["b200-x8", "b300-x8", "cpu", "h200-x8", "rtx-5090", "rtx-pro-6000-x8"]


def test_the_profiles_are_listed():
    """What is common to all is no profile."""
    assert list_profiles() == NAMES
    assert (FOLDER / "common.toml").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_a_sentence_and_a_known_source(name):
    """Reasons are sentences, sources are spelled out once, and no flag is both set and left to SGLang."""
    profile = load_profile(name)
    entries = [*profile.flags, *profile.auto, *profile.env, *profile.advice]
    entries += [setting for preset in profile.presets.values() for setting in preset.env]
    for entry in entries:
        assert re.fullmatch(r"[A-Z].{20,}\.", entry.why), entry
        assert set(entry.source) <= set(profile.sources), entry
    flags = [setting.flag for setting in (*profile.flags, *profile.auto)]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_written_with_its_first_name(name):
    """Else an override by another alias would set it twice."""
    table, profile = load_flag_table(), load_profile(name)
    named = [setting.flag for setting in (*profile.flags, *profile.auto)]
    named += [flag for advice in profile.advice for flag in advice.set]
    for flag in named:
        assert table.find(flag), flag
        assert table.canonical(flag) == flag


def test_an_unknown_profile_or_preset_lists_those_there_are():
    """The message says what to write instead."""
    with pytest.raises(UnknownProfile, match=r"no profile 'h100'; there are b200-x8, .*rtx-pro-6000-x8"):
        load_profile("h100")
    with pytest.raises(UnknownProfile, match="no profile 'common'"):
        load_profile("common")
    with pytest.raises(UnknownProfile, match="no preset 'fast'; it has throughput, latency"):
        load_profile("rtx-pro-6000-x8", "fast")
    with pytest.raises(UnknownProfile, match="'cpu' has no preset 'latency'; it has none"):
        load_profile("cpu", "latency")


def test_a_preset_changes_the_environment_only():
    """Throughput is the default; what both share stays."""
    default, latency = load_profile("rtx-pro-6000-x8"), load_profile("rtx-pro-6000-x8", "latency")
    assert default.preset == "throughput"
    assert default.flags == latency.flags
    assert default.env_values()["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in latency.env_values()
    assert latency.env_values()["NCCL_PROTO"] == "LL"
    assert latency.env_values()["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"


def test_the_failure_with_4578_tokens_is_below_what_is_expected():
    """That is what the number is there to catch."""
    assert load_profile("rtx-pro-6000-x8").expected_kv_tokens == 170_000
    assert load_profile("h200-x8").expected_kv_tokens is None


def test_the_number_of_requests_is_that_of_a_run():
    """A run's own windows decide, by default those of the parameters, up to what the memory is good for."""
    lanes = Lanes()
    usual = lanes.short.concurrency + lanes.long.concurrency
    assert load_profile("b200-x8").flag_values()["--max-running-requests"] == str(usual)
    assert load_profile("b200-x8").flag_values(concurrency=40)["--max-running-requests"] == "40"
    assert load_profile("rtx-pro-6000-x8").flag_values(concurrency=40)["--max-running-requests"] == "40"
    assert load_profile("rtx-pro-6000-x8").flag_values(concurrency=182)["--max-running-requests"] == "96"
    assert load_profile("cpu").flag_values(concurrency=40)["--max-running-requests"] == "16"
