"""What `draftmill serve --explain` prints: a profile's flags and variables with their reasons.

Knows texts and lines; does not know what is checked or started. Invariant: what one may want to copy (a flag,
a variable, an address) is never broken over two lines, and no secret is shown.
"""

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping

from serving.launch.command import API_KEY_VARIABLE, REDACTED, LaunchCommand, is_secret
from serving.launch.profile import FlagSetting, Profile

_BASICS = {
    "--model-path": "The model to serve.",
    "--host": f"127.0.0.1 is this machine only; another address needs a key ({API_KEY_VARIABLE}).",
    "--port": "Where it listens.",
    "--config": "A file of mode 600 with the key: a key on the command line is shown to everybody by ps.",
}
_YOURS = "You set it."


def explain_profile(profile: Profile, command: LaunchCommand, *, width: int) -> str:
    """What the profile is for, every flag and variable with its reason, and the words that these use."""
    intro = f"{profile.name}: {profile.hardware}, {profile.model}."
    if profile.preset is not None:
        intro += f" Preset {profile.preset}: {profile.presets[profile.preset].description}."
    if profile.expected_kv_tokens is not None:
        intro += f" At least {profile.expected_kv_tokens:,} tokens of KV memory are expected."
    lines = [*_wrap(f"{intro} {profile.description}", width), ""]
    for head, reason in (*_flag_entries(profile, command), *_env_entries(profile, command.env)):
        lines += [f"  {head}", *_wrap(reason, width, indent=6)]
    if profile.advice:
        lines += ["", "Not set; when it helps:"]
    for entry in profile.advice:
        settings = [
            f"      --set {name[2:]}={shlex.quote(value) if value else ''}"
            for name, value in entry.set.items()
        ]
        lines += [*_wrap(f"{entry.when}:", width, indent=2), *settings]
        lines += _wrap(f"{entry.why} ({', '.join(entry.source)})", width, indent=6)
    lines += _list_known("Words:", _find_words(profile.words, "\n".join(lines)), width)
    lines += _list_known("Sources:", _find_sources(profile), width)
    return "\n".join(lines)


def _flag_entries(profile: Profile, command: LaunchCommand) -> Iterator[tuple[str, str]]:
    reasons = {setting.flag: setting for setting in profile.flags}
    for name, values in command.flags.items():
        yield shlex.join([name, *values]), _BASICS.get(name) or _reason(reasons.get(name), " ".join(values))
    for auto in profile.auto:
        if auto.flag not in command.flags:
            head = f"{auto.flag} is left to SGLang, which picks {auto.picks}"
            yield head, f"{auto.why} ({', '.join(auto.source)})"


def _env_entries(profile: Profile, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    variables = {setting.name: setting for setting in profile.env}
    for name, value in env.items():
        known = variables.get(name)
        same = known is not None and known.value == value
        reason = f"{known.why} ({', '.join(known.source)})" if known is not None and same else _YOURS
        yield f"{name}={REDACTED if is_secret(name) else shlex.quote(value)}", reason


def _reason(setting: FlagSetting | None, value: str) -> str:
    if setting is None:
        return _YOURS
    if setting.value is not None and setting.value != value:
        return f"{_YOURS} The profile says {setting.value}: {setting.why}"
    return f"{setting.why} ({', '.join(setting.source)})"


def _find_words(words: Mapping[str, str], text: str) -> dict[str, str]:
    """Those that occur; a line break may have come between the parts of one."""
    flat = " ".join(text.split())
    return {word: meaning for word, meaning in words.items() if re.search(rf"\b{re.escape(word)}", flat)}


def _find_sources(profile: Profile) -> dict[str, str]:
    entries = (*profile.flags, *profile.auto, *profile.env, *profile.advice)
    used = {name for entry in entries for name in entry.source}
    return {name: text for name, text in profile.sources.items() if name in used}


def _list_known(title: str, known: Mapping[str, str], width: int) -> list[str]:
    lines = ["", title] if known else []
    for name, text in known.items():
        lines += _wrap(f"{name}: {text}", width, indent=2, hanging=4)
    return lines


def _wrap(text: str, width: int, *, indent: int = 0, hanging: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
