"""Why an SGLang server did not start or died, told by its log, and what to do about it.

Knows the words of SGLang 0.5.23, PyTorch, Triton, NCCL and transformers; reads no file. Causes stand before
their consequences: with eight ranks the first traceback in a log is often one of a rank that lost its peer.
The patterns are those of errors, for a healthy server warns of much.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from serving.launch.server_log import Stage


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A failure that was recognised.

    Attributes:
        name: To branch on: one of the names below.
        explanation: What happened and what to do, in one line.
        requires_user_action: Whether the same command would meet it again; False where it may pass by itself.
        lines: The log's lines that say so, the most telling ones; () where none does.
    """

    name: str
    explanation: str
    requires_user_action: bool = True
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Entry:
    """`advice` may quote the first group that was found, as {0}."""

    name: str
    patterns: tuple[str, ...]
    advice: str
    requires_user_action: bool = True

    def find(self, lines: Collection[str]) -> KnownFailure | None:
        found = list(filter(None, map(re.compile("|".join(self.patterns)).search, lines)))
        if not found:
            return None
        detail = next((group for one in found for group in one.groups() if group), "see the log")
        explanation = self.advice.format(detail.strip()[:200])
        return KnownFailure(self.name, explanation, self.requires_user_action, _pick_telling(found))


_TELLING_LINES = 3
_SOURCE = " " * 4  # a traceback quotes the code that made a message, placeholders and all
_NCCL_ADVICE = (
    "on PCIe machines try NCCL_P2P_DISABLE=1; with NCCL_DEBUG=INFO in the environment the log tells more"
)
_OUT_OF_MEMORY = re.compile(r"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory")
_MEMORY_ADVICE = {
    Stage.KV_CACHE: "the KV cache does not fit: lower --mem-fraction-static by 0.02",
    Stage.CAPTURING: (
        "the CUDA graphs do not fit beside the KV cache: lower --mem-fraction-static by 0.02, or "
        "--cuda-graph-max-bs-decode"
    ),
    Stage.SERVING: (
        "a step does not fit beside the KV cache: lower --chunked-prefill-size or --mem-fraction-static"
    ),
}
_MEMORY_WHILE_LOADING = (
    "the weights do not fit: use more GPUs (--tp) or a quantized checkpoint, and see with nvidia-smi that "
    "nothing else is on the GPUs"
)
_ENTRIES = (
    _Entry(
        "bad_argument",
        (r"^[\w .-]+: error: ((?:argument|ambiguous|unrecognized|the following arguments are).+)",),
        "SGLang refuses its command line ({0}): correct the flag; names change between its versions",
    ),
    _Entry(
        "remote_code",
        (r"contains custom code which must be executed", r"using the `--trust-remote-code` flag"),
        "the model brings code of its own: read it, then set trust_remote_code (--trust-remote-code)",
    ),
    _Entry(
        "model_gated",
        (r"gated repo", r"is a gated repository"),
        "the model is gated or private: accept its terms on the Hub and set HF_TOKEN",
    ),
    _Entry(
        "model_not_found",
        (
            r"Repo id must be in the form .*?: '([^']+)'",
            r"(\S+) is not a local folder and is not a valid model identifier",
            r"OSError: (\S+) does not appear to have a file named",
            r"RepositoryNotFoundError",
        ),
        "the model ({0}) is neither a folder on this machine nor a model on the Hub: correct target.model",
    ),
    _Entry(
        "hub_offline",
        (r"outgoing traffic has been disabled", r"OfflineModeIsEnabled"),
        "the model is not on this machine, and HF_HUB_OFFLINE keeps it from the Hub: correct target.model, "
        "give the model's folder, or unset HF_HUB_OFFLINE",
    ),
    _Entry(
        "no_network",
        (
            r"We couldn't connect to '([^']+)'",
            r"Failed to resolve '([^']+)'",
            r"LocalEntryNotFoundError",
        ),
        "the model is not on this machine, and the Hub cannot be reached ({0}): give the model's folder",
        requires_user_action=False,
    ),
    _Entry(
        "quantization",
        (
            r"Unknown quantization method: (\S+?)\.",
            r"The quantization method (\S+) is not supported for the current GPU",
            r"Cannot find the config file for (\S+)",
            r"does not match the quantization method specified in the `quantization` argument \((\S+?)\)",
            r"is not supported for quantization method (\S+?)\.",
        ),
        "this quantization ({0}) does not go with the checkpoint or the GPU: leave --quantization out, so "
        "that the checkpoint decides, or take a checkpoint that is made for the GPU",
    ),
    _Entry(
        "architecture",
        (
            r"Model architectures (.+?) (?:are not supported for now|failed )",
            r"does not recognize this architecture",
            r"Unrecognized model in (\S+?)\.",
        ),
        "this SGLang does not know the model's architecture ({0}): a newer one may",
    ),
    _Entry(
        "not_divisible",
        (r"AssertionError: (\d+ is not divisible by \d+)",),
        "the model cannot be divided among so many GPUs ({0}): choose another --tp",
    ),
    _Entry(
        "kv_too_small",
        (
            r"Not enough memory\. Please try to increase --mem-fraction-static",
            r"Loaded weights leave no GPU memory for the KV cache",
            r"Not enough GPU memory for hybrid",
            r"state cache is too small to serve",
        ),
        "the weights leave no memory for the KV cache: raise --mem-fraction-static (0.94 on 96 GB), use "
        "more GPUs (--tp), and see with nvidia-smi that nothing else is on them",
    ),
    _Entry(
        "kv_exhausted",
        (r"(?:Prefill|Decode) out of memory\. Try to lower", r"Out of memory even after retracting"),
        "one request does not fit in the KV cache: lower --context-length, or raise --mem-fraction-static",
    ),
    _Entry(
        "gpu_shared_memory",
        (r"out of resource: shared memory, Required: (\d+)",),
        "a kernel wants {0} bytes of shared memory, more than this GPU has (SM120: 101,376): take another "
        "backend, --attention-backend flashinfer or another --moe-runner-backend",
    ),
    _Entry(
        "kernel_missing",
        (
            r"no kernel image is available",
            r"cudaErrorNoKernelImageForDevice",
            r"Unsupported gpu architecture",
        ),
        "this build has no kernels for this GPU: install SGLang's kernels for its architecture and CUDA, "
        "or choose another backend",
    ),
    _Entry(
        "kernel_not_compiled",
        (
            r"ninja: build stopped",
            r"Ninja build failed",
            r"nvcc fatal",
            r"Could not find nvcc",
            r"OSError: CUDA_HOME .*not set",
        ),
        "a kernel could not be compiled: install the CUDA toolkit of PyTorch's version, set CUDA_HOME",
    ),
    _Entry(
        "no_gpu",
        (
            r"(No CUDA GPUs are available)",
            r"(NVIDIA driver on your system is too old)",
            r"(CUDA driver version is insufficient)",
        ),
        "there is no GPU, or its driver does not go with this build ({0}): see what nvidia-smi and "
        "CUDA_VISIBLE_DEVICES say",
    ),
    _Entry(
        "gpu_failed",
        (
            r"CUDA error: ((?:uncorrectable|an illegal|unspecified launch|device-side).+)",
            r"GPU has fallen off the bus",
        ),
        "the GPU or its driver failed ({0}): look at nvidia-smi and dmesg (Xid) before starting again",
        requires_user_action=False,
    ),
    _Entry(
        "port_taken",
        (r"address already in use", r"(\w+ at \d+ is not available in)", r"Port is already in use"),
        "a port of the server is taken: end the process that has it, or choose another --port",
        requires_user_action=False,
    ),
    _Entry(
        "host_memory",
        (
            r"DefaultCPUAllocator: can't allocate",
            r"Cannot allocate memory",
            r"Bus error",
            r"No space left on device",
        ),
        "no memory or disk is left on this machine, or no room in /dev/shm: lower --hicache-size, or give a "
        "container --shm-size 32g",
    ),
    _Entry(
        "graph_capture",
        (r"Capture cuda graph failed: (.+)", r"Fail when using backend: \S+ for prefill runner"),
        "capturing CUDA graphs failed ({0}): lower --cuda-graph-max-bs-decode, or find out with "
        "--cuda-graph-backend-decode disabled whether the model runs at all",
    ),
    _Entry(
        "stuck",
        (r"watchdog timeout \(self\.watchdog_timeout",),
        "one step took longer than --watchdog-timeout: a GPU or NCCL hangs (see nvidia-smi), or kernels were "
        "compiled; raise it when it was that",
        requires_user_action=False,
    ),
    _Entry(
        "nccl",
        (
            r"NCCL error",
            r"nccl(?:UnhandledCuda|System|Internal|Remote)Error",
            r"Watchdog caught collective operation timeout",
            r"ProcessGroupNCCL.*(?:timeout|got stuck)",
            r"DistBackendError",
            r"Timed out after \d+ seconds waiting for clients",
        ),
        "the GPUs do not reach one another (NCCL): " + _NCCL_ADVICE,
        requires_user_action=False,
    ),
)
_SETTINGS_CHECKED = re.compile(
    r", in (?:resolve_once|check_server_args)$|Scheduler hit an exception: Traceback"
)
_SETTINGS_REFUSED = re.compile(r"(?:Assertion|Value|NotImplemented)Error\b")
_CHILD_ENDED = re.compile(r"Subprocess (\S+) \(pid=\d+\) crashed with exit code (-?\d+)")
_ENDED_ITSELF = re.compile(r"kill_process_tree called|SIGQUIT received|Received sigquit")
_BY_SIGKILL = (-9, 137)
_FROM_OUTSIDE = "was killed from outside, by a person or by the kernel for lack of memory (see dmesg)"


def explain_failure(lines: Collection[str], *, stage: Stage, status: int | None) -> KnownFailure | None:
    """Recognise why a server died, or None.

    Args:
        lines: The end of its log.
        stage: How far it had come.
        status: What it ended with, negative for a signal; None while it lives, or when nobody knows.
    """
    said = [line for line in lines if not line.startswith(_SOURCE)]
    if found := list(filter(None, map(_OUT_OF_MEMORY.search, said))):
        advice = _MEMORY_ADVICE.get(stage, _MEMORY_WHILE_LOADING)
        return KnownFailure("out_of_memory", f"CUDA out of memory: {advice}", lines=_pick_telling(found))
    known = next(filter(None, (entry.find(said) for entry in _ENTRIES)), None)
    return known or _explain_settings(list(lines), stage) or _explain_status(said, status)


def explain_slow_start(stage: Stage) -> KnownFailure | None:
    """Why a server that lives is not ready in time, by how far it has come; None when that says nothing."""
    if stage is Stage.CONNECTING:
        why = f"its ranks wait for one another (NCCL): {_NCCL_ADVICE}"
        return KnownFailure("nccl", why, requires_user_action=False)
    if stage is Stage.LOADING:
        why = "it is still loading weights: allow more time, or use a faster disk"
        return KnownFailure("slow_load", why, requires_user_action=False)
    return None


def _pick_telling(found: Collection[re.Match[str]]) -> tuple[str, ...]:
    """Some of the lines that matched, one of those that say the same: every rank writes its own."""
    lines = {one[0]: one.string.strip() for one in found}
    return tuple(lines.values())[:_TELLING_LINES]


def _explain_settings(lines: list[str], stage: Stage) -> KnownFailure | None:
    """SGLang asserts that its flags go together once it has parsed them, and again in its schedulers.

    Not where it failed by the outside world (an OSError): it also reads the model's config there.
    """
    if stage >= Stage.SERVING:
        return None
    starts = [number for number, line in enumerate(lines) if _SETTINGS_CHECKED.search(line)]
    if not starts:
        return None
    ends = (number for number in range(starts[-1], len(lines)) if _SETTINGS_REFUSED.match(lines[number]))
    end = next(ends, None)
    if end is None:
        return None
    code = [line.strip() for line in lines[starts[-1] : end] if line.startswith(_SOURCE)]
    code = [line for line in code if line.strip("^~ ")]
    refused = lines[end].strip()
    detail = refused if ": " in refused else f"{refused}: {code[-1]}" if code else refused
    return KnownFailure(
        "bad_settings", f"SGLang refuses its settings together ({detail[:200]}): correct the flags",
        lines=(*code[-1:], refused),
    )  # fmt: skip


def _explain_status(lines: Collection[str], status: int | None) -> KnownFailure | None:
    for found in filter(None, map(_CHILD_ENDED.search, lines)):
        name, code = found[1], int(found[2])
        if code in _BY_SIGKILL:
            return KnownFailure("killed", f"its process {name} {_FROM_OUTSIDE}", requires_user_action=False)
        why = f"its process {name} crashed with exit code {code}; the log may say why"
        return KnownFailure("crashed", why, requires_user_action=False)
    if status in _BY_SIGKILL and not any(map(_ENDED_ITSELF.search, lines)):
        return KnownFailure("killed", f"it {_FROM_OUTSIDE}", requires_user_action=False)
    return None
