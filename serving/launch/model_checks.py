"""Whether a model that is on this disk can be served with a command, said before anything starts.

Knows a model's folder and a profile's GPUs; does not know the Hub beyond its local cache: of a model that is
yet to be downloaded only the number of GPUs is checked. Invariant: reads no weights, runs none of the model's
code, sets no flag.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serving.client.errors import LaunchRefused
from serving.launch.command import LaunchCommand
from serving.launch.profile import Profile

_GIB = 2**30
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # no leading dot or slash: those are paths
_MIN_KV_SHARE = 0.1  # of what --mem-fraction-static gives: with less, few requests run at once
# With one of these, weights in the GPUs' memory are not as large as those in the files.
_CHANGE_WEIGHTS = ("--quantization", "--torchao-config", "--cpu-offload-gb", "--load-format")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What a model's folder says; `has_code` where it names Python code of its own (auto_map)."""

    folder: Path
    config: Mapping[str, Any]
    has_code: bool
    weight_bytes: int

    @property
    def heads(self) -> int | None:
        """Attention heads; a model that also sees has them under text_config."""
        text = self.config.get("text_config")
        heads = {**self.config, **(text if isinstance(text, dict) else {})}.get("num_attention_heads")
        return heads if isinstance(heads, int) else None

    @property
    def is_kimi(self) -> bool:
        """Kimi's tokenizer is code of its own; others may name code that nobody needs."""
        return str(self.config.get("model_type", "")).startswith("kimi")


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """One thing that the checks saw; a problem refuses the start."""

    severity: Literal["problem", "warning"]
    text: str


def check_model(profile: Profile, command: LaunchCommand) -> list[str]:
    """What is allowed and better known, one line each.

    Raises:
        LaunchRefused: no such folder, or the GPUs cannot split or hold the model; every problem is a line.
    """
    flags = {name: " ".join(values) for name, values in command.flags.items()}
    findings = list(check_gpus(profile, flags))
    model = read_model(flags["--model-path"], revision=flags.get("--revision"))
    if model is not None:
        findings += [*check_split(profile, flags, model), *check_memory(profile, flags, model)]
        findings += check_code(flags, model)
    problems = [finding.text for finding in findings if finding.severity == "problem"]
    if problems:
        raise LaunchRefused("\n".join(problems))
    return [finding.text for finding in findings]


def read_model(name: str, *, revision: str | None = None) -> LocalModel | None:
    """A folder, or a Hub id that is in the local cache; None for what is yet to be downloaded, or one file.

    Raises:
        LaunchRefused: a path where nothing is, or a folder that is no model's.
    """
    path = Path(name)
    if path.is_file() or "://" in name:
        return None
    if path.is_dir():
        return _read_folder(path)
    if not _HUB_ID.fullmatch(name):
        raise LaunchRefused(f"there is no folder {name}: give the folder of a model, or a Hub id (org/name)")
    cached = _find_in_cache(name, revision)
    return None if cached is None else _read_folder(cached)


def check_gpus(profile: Profile, flags: Mapping[str, str]) -> Iterator[ModelFinding]:
    """The profile's machine has as many GPUs as the flags spread the model over."""
    if profile.gpus is None:
        return
    needed = _count_gpus(flags)
    if needed > profile.gpus:
        yield ModelFinding(
            "problem", f"{_name_split(flags)} needs {needed} GPUs, and {profile.name} has {profile.gpus}"
        )
    elif needed < profile.gpus:
        text = f"{_name_split(flags)} uses {needed} of the {profile.gpus} GPUs of {profile.name}"
        if profile.gpus % needed:
            text += f"; few models can be split into {needed} parts, and SGLang says so only while it loads"
        yield ModelFinding("warning", text)


def check_split(profile: Profile, flags: Mapping[str, str], model: LocalModel) -> Iterator[ModelFinding]:
    """Each GPU gets as many attention heads; SGLang stops while it loads otherwise (a CPU fills them up)."""
    parts = _number(flags, "--tp-size")
    if profile.gpus is None or model.heads is None or "--enable-dp-attention" in flags:
        return
    if model.heads % parts:
        fitting = [str(count) for count in range(1, profile.gpus + 1) if model.heads % count == 0]
        yield ModelFinding(
            "problem",
            f"--tp-size {parts}: the {model.heads} attention heads of {model.folder} cannot be split into "
            f"{parts} equal parts; take one of {', '.join(fitting)}",
        )


def check_memory(profile: Profile, flags: Mapping[str, str], model: LocalModel) -> Iterator[ModelFinding]:
    """The weights fit into the share of the GPUs' memory that is for them, and leave room for KV memory."""
    share = float(flags.get("--mem-fraction-static", 0))
    if profile.gpu_memory_gib is None or not share or not model.weight_bytes:
        return
    parts = _number(flags, "--tp-size") * _number(flags, "--pp-size")
    room, weights = share * profile.gpu_memory_gib, model.weight_bytes / parts / _GIB
    sum_up = (
        f"the weights of {model.folder} take {weights:,.1f} GiB of each GPU (split by {parts}), and "
        f"--mem-fraction-static {share:g} of its {profile.gpu_memory_gib} GiB leaves {room:,.1f} for weights "
        "and KV memory"
    )
    if weights >= room:
        certain = not any(flag in flags for flag in _CHANGE_WEIGHTS)
        way_out = "use more GPUs, or a smaller or quantized model"
        yield ModelFinding("problem" if certain else "warning", f"{sum_up}: they do not fit; {way_out}")
    elif room - weights < _MIN_KV_SHARE * room:
        yield ModelFinding("warning", f"{sum_up}: only {room - weights:,.1f} GiB are left for KV memory")


def check_code(flags: Mapping[str, str], model: LocalModel) -> Iterator[ModelFinding]:
    """A model with code of its own is served only where one says that it may run."""
    if "--trust-remote-code" in flags or not (model.has_code or model.is_kimi):
        return
    need = "needs its own Python code" if model.is_kimi else "brings Python code of its own, and may need it"
    yield ModelFinding(
        "warning",
        f"{model.folder} {need}: read it, and if you trust it add --set trust-remote-code= (in a run's file, "
        "target.trust_remote_code: true)",
    )


def _read_folder(folder: Path) -> LocalModel:
    config = _read_json(folder / "config.json")
    if config is None and not (folder / "params.json").exists():  # Mistral's own format
        raise LaunchRefused(f"{folder} has no config.json: it is not the folder of a model")
    tokenizer = _read_json(folder / "tokenizer_config.json") or {}
    files = [path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")]
    return LocalModel(
        folder=folder,
        config=config or {},
        has_code=any("auto_map" in one for one in (config or {}, tokenizer)),
        weight_bytes=sum(path.stat().st_size for path in files if path.exists()),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise LaunchRefused(f"{path} cannot be read ({exc}): copy or download it again") from exc
    return content if isinstance(content, dict) else {}


def _find_in_cache(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # imported here: it costs a quarter of a second

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no id that the Hub would take; SGLang says what is wrong with it
        return None
    return Path(found).parent if isinstance(found, str) else None


def _count_gpus(flags: Mapping[str, str]) -> int:
    """On this machine; data parallelism is inside of tensor parallelism where only attention has it."""
    copies = 1 if "--enable-dp-attention" in flags else _number(flags, "--dp-size")
    return -(
        -_number(flags, "--tp-size") * _number(flags, "--pp-size") * copies // _number(flags, "--nnodes")
    )


def _name_split(flags: Mapping[str, str]) -> str:
    names = ("--tp-size", "--pp-size", "--dp-size", "--nnodes")
    return " ".join(f"{name} {flags[name]}" for name in names if name in flags) or "no --tp-size"


def _number(flags: Mapping[str, str], name: str) -> int:
    return int(flags.get(name, 1))
