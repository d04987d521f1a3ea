"""The command that starts SGLang: a profile, what the user changed, and nothing that `ps` should not show.

Knows how flags, environment and key become one command; does not start it. Invariants: every flag is checked;
the key is in neither argv nor the environment. SGLang 0.5.23 reads it from no variable, so it goes through
`--config`: a YAML file that the server reads once, while it parses its arguments.
"""

import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from serving.client.errors import LaunchRefused
from serving.launch.flag_checks import find_problems, split_values
from serving.launch.flag_table import SECRET_FLAGS, find_close, load_flag_table
from serving.launch.profile import Profile

API_KEY_VARIABLE = "DRAFTMILL_API_KEY"
LOOPBACK = "127.0.0.1"
DEFAULT_LAUNCHER = ("sglang", "serve")
REDACTED = "***"
_ALWAYS_SET = ("--model-path", "--host", "--port")
_OWN_VARIABLES = (API_KEY_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The server's key in a file of its own, readable by its owner only."""

    path: Path
    api_key: str = field(repr=False)

    def write(self) -> None:
        """Write the file, mode 600; a folder that is not there is made with mode 700."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"api-key: {json.dumps(self.api_key)}\n")  # a JSON string is a YAML string
        fresh.replace(self.path)

    def remove(self) -> None:
        """Remove the file, if it is there; the server has read it once it answers."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What to execute: `env` comes on top of this process's; `key_file` is written before it starts."""

    argv: list[str]
    env: dict[str, str]
    key_file: KeyFile | None = None
    expected_kv_tokens: int | None = None

    @property
    def base_url(self) -> str:
        """Where this machine reaches the server; one that listens everywhere, on loopback."""
        host, port = self._value("--host"), self._value("--port")
        host = LOOPBACK if host in ("0.0.0.0", "::") else host  # noqa: S104  it is not bound here
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def flags(self) -> dict[str, list[str]]:
        """Each flag with the words that follow it."""
        found: dict[str, list[str]] = {}
        words: list[str] = []  # those of the launcher belong to no flag
        for word in self.argv:
            if word.startswith("--"):
                words = found[word] = []
            else:
                words.append(word)
        return found

    def to_shell(self) -> str:
        """The command on one line for a POSIX shell, with its environment; secrets are shown as ***."""
        return " ".join([*_assignments(self.env), shlex.join(_redact(self.argv))])

    def _value(self, flag: str) -> str:
        return self.argv[self.argv.index(flag) + 1]


def build_command(
    profile: Profile,
    *,
    model: str,
    host: str = LOOPBACK,
    port: int = 30000,
    overrides: Mapping[str, str] | None = None,
    unset: Collection[str] = (),
    concurrency: int | None = None,
    api_key: str | None = None,
    key_file: Path | None = None,
    launcher: Sequence[str] = DEFAULT_LAUNCHER,
) -> LaunchCommand:
    """Put a command together and check it.

    `overrides` is flag to value, "" for a switch; a name in capitals is an environment variable. `unset` are
    flags and variables of the profile to leave out. `concurrency` is the requests that the run keeps in
    flight; the profile has a number of its own. An `api_key` needs a `key_file`, which `KeyFile.write` makes.

    Raises:
        LaunchRefused: SGLang would not take this; every problem is a line.
    """
    changes = {_spell(name): value for name, value in (overrides or {}).items()}
    dropped = {_spell(name) for name in unset}
    twice = _find_repeated(overrides or {})
    basics = {"--model-path": model, "--host": host, "--port": str(port)}
    flags = _merge_flags(profile, basics, changes, dropped, concurrency)
    env = {**profile.env_values(), **{name: value for name, value in changes.items() if not _is_flag(name)}}
    problems = [*twice, *_find_misuse(profile, flags, changes, dropped), *find_problems(flags)]
    problems += _find_key_problems(flags, api_key, key_file)
    if problems:
        raise LaunchRefused("\n".join(problems))
    argv = [*launcher, *_to_argv(flags)]
    secret = None if api_key is None or key_file is None else KeyFile(key_file, api_key)
    if secret is not None:
        argv += ["--config", str(secret.path)]  # as two words: SGLang overlooks --config=FILE
    kept = {name: value for name, value in env.items() if name not in dropped}
    return LaunchCommand(argv, kept, secret, profile.expected_kv_tokens)


def read_changes(
    settings: Mapping[str, str | bool | int | float | None],
) -> tuple[dict[str, str], list[str]]:
    """Flags and variables as YAML has them: the overrides and the unset names for `build_command`.

    true is a switch that is on; false or null leaves out what the profile sets. A variable is 1 or 0 by them.
    """
    changes, unset = {}, []
    for name, value in settings.items():
        if value is None or (value is False and _is_flag(name)):
            unset.append(name)
        elif value is True and _is_flag(name):
            changes[name] = ""
        else:
            changes[name] = str(int(value)) if isinstance(value, bool) else str(value)
    return changes, unset


def default_key_path(port: int) -> Path:
    """Where the key waits for a server on this port."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(runtime or state) / "draftmill" / f"sglang-{port}.yaml"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on that address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is not to be shown."""
    return any(name.endswith(word) for word in _SECRET_WORDS)


def _merge_flags(
    profile: Profile,
    basics: Mapping[str, str],
    changes: Mapping[str, str],
    dropped: Collection[str],
    concurrency: int | None,
) -> dict[str, str | None]:
    table = load_flag_table()
    flags: dict[str, str | None] = {**basics, **profile.flag_values(concurrency=concurrency)}
    for name, value in changes.items():
        if _is_flag(name) and name not in SECRET_FLAGS:  # those are refused, and never repeated
            flag = table.find(name)
            flags[name] = None if flag is not None and flag.type == "switch" and not value else value
    flags = {name: value for name, value in flags.items() if name not in dropped}
    for setting in profile.flags:  # after the changes, so that a copy follows the flag it copies
        if setting.same_as is not None and setting.flag in flags and setting.flag not in changes:
            copied = flags.get(setting.same_as)
            if copied is None:
                del flags[setting.flag]
            else:
                flags[setting.flag] = copied
    return flags


def _find_misuse(
    profile: Profile, flags: Mapping[str, str | None], changes: Mapping[str, str], dropped: Collection[str]
) -> list[str]:
    """What is wrong with the changes themselves."""
    table = load_flag_table()
    problems = [
        f"{name}: a secret on a command line can be read by everybody on the machine: {_other_way(name)}"
        for name in changes
        if name in SECRET_FLAGS
    ]
    problems += [
        f"{name}: set it in draftmill's own environment, which hands it on; here others could read it"
        for name in changes
        if name in _OWN_VARIABLES
    ]
    problems += [
        f"{name!r} is no name of an environment variable"
        for name, value in changes.items()
        if not _is_flag(name) and (not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) or "\0" in value)
    ]
    ours = [setting.flag for setting in profile.flags] + [setting.name for setting in profile.env]
    for name in sorted(dropped):
        if name in changes:
            problems.append(f"{name}: both set and left out: do one of them")
        elif _is_flag(name) and table.find(name) is None and not find_close(name, ours):
            problems.append(table.explain_unknown(name))
        elif name not in ours:
            problems.append(_explain_unset(name, profile.name, ours))
    if "--model-path" not in dropped and not str(flags.get("--model-path") or "").strip():
        problems.append("--model-path: a folder or a Hub id is needed")
    return problems


def _find_repeated(overrides: Mapping[str, str]) -> list[str]:
    """One flag under two names: the later one would win without a word."""
    names: dict[str, list[str]] = {}
    for name in overrides:
        names.setdefault(_spell(name), []).append(name)
    return [
        f"{' and '.join(same)} are the same flag: set it once" for same in names.values() if len(same) > 1
    ]


def _explain_unset(name: str, profile: str, ours: Sequence[str]) -> str:
    if name in _ALWAYS_SET:
        return f"{name}: every server needs it, so it cannot be left out"
    close = find_close(name, ours)
    hint = f"; did you mean {close}?" if close else "; --explain lists what it does"
    return f"{name}: profile {profile!r} does not set it, so it cannot be left out{hint}"


def _find_key_problems(
    flags: Mapping[str, str | None], api_key: str | None, key_file: Path | None
) -> list[str]:
    if api_key is None:
        host = flags.get("--host") or LOOPBACK
        if is_loopback(host) or "--config" in flags:  # the user's file may hold a key
            return []
        open_to_all = f"--host {host}: without a key, anyone who reaches this machine could use the server"
        way_out = (
            f"set {API_KEY_VARIABLE} in the environment, for draftmill run too, or leave host at {LOOPBACK}"
        )
        return [f"{open_to_all}: {way_out}"]
    problems = []
    if key_file is None:
        problems.append(
            "the server's key needs a key_file: SGLang takes it from a file or the command line only"
        )
    elif key_file.suffix != ".yaml":
        problems.append(f"{key_file}: SGLang reads a file that ends in .yaml only")
    # SGLang 0.5.23 starts with a key outside ASCII, and then answers every request with 500
    if not re.fullmatch(r"[!-,.-~][!-~]*", api_key):
        problems.append("the server's key may have printable ASCII characters only, and no dash in front")
    if "--config" in flags:
        problems.append(
            "--config: SGLang takes one such file: put api-key into it and unset DRAFTMILL_API_KEY"
        )
    return problems


def _other_way(name: str) -> str:
    if name == "--api-key":
        return f"set {API_KEY_VARIABLE} in the environment instead"
    return f"put {name[2:]} into a YAML file of mode 600 and give that with config=FILE"


def _to_argv(flags: Mapping[str, str | None]) -> list[str]:
    argv = []
    for name, value in flags.items():
        argv += [name] if value is None else [name, *split_values(name, value)]
    return argv


def _spell(name: str) -> str:
    """A name as we compare it: --tp-size for tp-size, and one name for all aliases."""
    if not _is_flag(name):
        return name
    return load_flag_table().canonical("--" + name.removeprefix("--"))


def _is_flag(name: str) -> bool:
    """A flag is written in small letters, an environment variable in capitals."""
    return not name.isupper()


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(REDACTED if is_secret(name) else value)}" for name, value in env.items()]


def _redact(argv: Sequence[str]) -> list[str]:
    """The value after a flag that holds a secret is not shown, whoever put it there."""
    shown: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, _ = word.partition("=")
        if before in SECRET_FLAGS:
            shown.append(REDACTED)
        else:
            shown.append(f"{name}={REDACTED}" if equals and name in SECRET_FLAGS else word)
    return shown
