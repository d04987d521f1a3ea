"""How SGLang is started on known hardware: the files of serving/launch/profiles/ as values.

Knows the files and how presets and the run's concurrency change them; does not know SGLang's flags
(flag_checks.py) or processes. Invariant: every flag and variable has a reason and a source, and a file with
anything else is refused.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.client.errors import UnknownProfile

FOLDER = Path(__file__).with_name("profiles")
_COMMON = "common"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    why: str
    source: tuple[str, ...] = Field(min_length=1)


class FlagSetting(_Entry):
    """A flag that the profile sets; no value for a switch.

    `from_run` takes the value from the run where it is known, `at_most` that much; `same_as` copies another
    flag's.
    """

    flag: str
    value: str | None = None
    from_run: Literal["concurrency"] | None = None
    at_most: int | None = None
    same_as: str | None = None


class AutoSetting(_Entry):
    """A flag that is left to SGLang on purpose, and what it picks."""

    flag: str
    picks: str


class EnvSetting(_Entry):
    """An environment variable of the server's process."""

    name: str
    value: str


class Advice(_Entry):
    """Flags that help in a case that the profile cannot know about."""

    when: str
    set: dict[str, str]


class Preset(BaseModel):
    """A named way to run the same hardware."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    env: tuple[EnvSetting, ...] = ()


class Profile(BaseModel):
    """Everything to start SGLang with on one kind of machine; `expected_kv_tokens` is the least to expect.

    `gpu_memory_gib` is one GPU's, as its driver counts it; `words` explains those of the texts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    hardware: str
    model: str
    description: str
    gpus: int | None = None
    gpu_memory_gib: int | None = None
    expected_kv_tokens: int | None = None
    flags: tuple[FlagSetting, ...]
    auto: tuple[AutoSetting, ...] = ()
    env: tuple[EnvSetting, ...] = ()
    advice: tuple[Advice, ...] = ()
    presets: dict[str, Preset] = {}
    default_preset: str | None = None
    preset: str | None = None
    sources: dict[str, str]
    words: dict[str, str]

    def flag_values(self, *, concurrency: int | None = None) -> dict[str, str | None]:
        """Flag to value, in order; `concurrency` is the requests that the run keeps in flight, if known."""
        values: dict[str, str | None] = {}
        for setting in self.flags:
            value = setting.value
            if concurrency is not None and setting.from_run == "concurrency":
                value = str(min(concurrency, setting.at_most or concurrency))
            values[setting.flag] = value
        return values

    def env_values(self) -> dict[str, str]:
        """Name to value, in order."""
        return {setting.name: setting.value for setting in self.env}


def list_profiles() -> list[str]:
    """The names of all profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != _COMMON)


def load_profile(name: str, preset: str | None = None) -> Profile:
    """One profile with a preset's environment in it; without a name the profile's own default preset, if any.

    Raises:
        UnknownProfile: there is no such profile or preset; the message lists those there are.
    """
    if name not in list_profiles():
        raise UnknownProfile(f"no profile {name!r}; there are {', '.join(list_profiles())}")
    profile = _read_profile(name)
    chosen = preset or profile.default_preset
    if chosen is None:
        return profile
    if chosen not in profile.presets:
        known = f"it has {', '.join(profile.presets)}" if profile.presets else "it has none"
        raise UnknownProfile(f"profile {name!r} has no preset {chosen!r}; {known}")
    return profile.model_copy(update={"preset": chosen, "env": profile.env + profile.presets[chosen].env})


@cache
def _read_profile(name: str) -> Profile:
    common, own = (_read_toml(stem) for stem in (_COMMON, name))
    replaced = {entry["flag"] for entry in own["flags"]}
    flags = [entry for entry in common["flags"] if entry["flag"] not in replaced]
    advice = [*own.pop("advice", ()), *common["advice"]]
    own["flags"] = [*own["flags"], *flags]
    shared = {key: common[key] for key in ("sources", "words")}
    return Profile(name=name, advice=advice, **shared, **own)


def _read_toml(stem: str) -> dict[str, list[Mapping[str, str]]]:
    return tomllib.loads((FOLDER / f"{stem}.toml").read_text(encoding="utf-8"))
