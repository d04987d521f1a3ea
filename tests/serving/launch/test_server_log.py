"""What SGLang's log means. The lines are those of 0.5.23, some shortened, and of the libraries below it."""

from __future__ import annotations

import pytest

from serving.launch.known_failures import explain_failure, explain_slow_start
from serving.launch.redaction import redact_text, secrets_in_command
from serving.launch.server_log import LogReader, Stage, StartLog

ON_A_CPU = """\
[2026-11-30 12:00:08] Init parallel begin.
[2026-11-30 12:00:08] Init parallel ends. elapsed=0.02 s
[2026-11-30 12:00:09] Load weight begin. avail mem=20.24 GB
Multi-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]
Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 1430.04it/s]
[2026-11-30 12:00:09] Load weight end. elapsed=0.02 s, type=LlamaForCausalLM, avail mem=20.24 GB, mem
[2026-11-30 12:00:09] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16384, K size: 0.00 GB
[2026-11-30 12:00:09] Memory pool end. avail mem=20.23 GB
[2026-11-30 12:00:09] max_total_num_tokens=16384, chunked_prefill_size=256, max_prefill_tokens=16384
[2026-11-30 12:00:09] INFO:     Application startup complete.
[2026-11-30 12:00:09] INFO:     Uvicorn running on http://127.0.0.1:31877 (Press CTRL+C to quit)
[2026-11-30 12:00:10] Prefill batch, #new-seq: 1, #new-token: 26, #cached-token: 0, token usage: 0.00
[2026-11-30 12:00:10] The server is fired up and ready to roll!
"""
ON_GPUS = """\
[2026-11-30 12:00:08 TP0] Load weight begin. avail mem=94.10 GB
[2026-11-30 12:00:08 TP1] Load weight begin. avail mem=94.10 GB
Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:   5% Completed | 3/64 [00:06<02:10,  2.13s/it]
Loading safetensors checkpoint shards:  11% Completed | 7/64 [00:14<01:57,  2.06s/it]
Loading safetensors checkpoint shards:  50% Completed | 32/64 [01:05<01:05,  2.04s/it]
[2026-11-30 12:02:20 TP1] Load weight end. elapsed=131.90 s, type=K, avail mem=22.51 GB, mem usage=71.6 GB.
[2026-11-30 12:02:20 TP0] Load weight end. elapsed=131.90 s, type=K, quant=awq, avail mem=22.51 GB
[2026-11-30 12:02:21 TP0] KV Cache is allocated. #tokens: 170000, KV size: 11.12 GB
[2026-11-30 12:02:21 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1
Capturing batches (bs=32 avail_mem=7.95 GB):  50%|#####     | 16/32 [00:07<00:07,  2.1it/s]
[2026-11-30 12:02:40 TP0] Capture target decode CUDA graph end. bs=[1, 2], elapsed=18.20 s, mem usage=1.1 GB
[2026-11-30 12:02:41 TP0] max_total_num_tokens=170000, chunked_prefill_size=8192, max_prefill_tokens=16384
[2026-11-30 12:02:41 TP0] KV pool holds 170000 tokens, fewer than --context-length 262144. One
"""
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has 95 GiB"


MAY_PASS = {"no_network", "gpu_failed", "port_taken", "stuck", "nccl", "killed", "crashed"}
SETTINGS_REFUSED = """\
Traceback (most recent call last):
  File "/x/sglang/launch_server.py", line 29, in run_server
    server_args.resolve_once()
  File "/x/sglang/srt/server_args.py", line 277, in resolve_once
    run_resolution_pipeline(self)
  File "/x/sglang/srt/arg_groups/parallel_hook.py", line 326, in handle_data_parallelism
    assert cfg.tp_size % cfg.attn_dp_size == 0
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError
"""


def told(text):
    log = StartLog()
    return log, [line for one in text.splitlines() if (line := log.feed(one))]


def test_a_start_on_a_cpu():
    """As a real one printed it."""
    log, lines = told(ON_A_CPU)
    assert lines == [
        "loading weights",
        "loading weights: 100% (1 of 1 files)",
        "weights loaded in 0.02 s, 20.24 GB left",
        "KV cache allocated: 16384 tokens",
        "16,384 tokens fit in the KV cache",
        "warming up",
    ]
    assert (log.stage, log.kv_tokens) == (Stage.SERVING, 16384)


def test_a_start_on_gpus():
    """One rank speaks for all; a bar tells a tenth at a time; a cache below the context is a warning."""
    log, lines = told(ON_GPUS)
    assert lines == [
        "loading weights",
        "loading weights: 11% (7 of 64 files)",
        "loading weights: 50% (32 of 64 files)",
        "weights loaded in 131.90 s, 22.51 GB left",
        "KV cache allocated: 170000 tokens",
        "capturing CUDA graphs (target decode)",
        "CUDA graphs captured (target decode) in 18.20 s",
        "170,000 tokens fit in the KV cache",
        "warning: the KV cache holds 170000 tokens, less than one request of the context length 262144",
    ]
    assert log.kv_tokens == 170000


def test_a_log_is_read_as_it_grows(tmp_path):
    """Half a line waits for its other half; a bar that overwrites itself is many; old lines are left."""
    path = tmp_path / "server.log"
    path.write_bytes(b"old\n")
    reader = LogReader(path, 4)
    with path.open("ab", buffering=0) as file:
        file.write("first\nLoading: 10% Completed | 1/10 [00:01\rhä".encode()[:-1])
        assert reader.read() == ["first", "Loading: 10% Completed | 1/10 [00:01"]
        file.write("ä".encode()[-1:] + b"lf\n")
        assert reader.read() == ["hälf"]
        file.write(b"Segmentation fault")
    assert reader.tail() == ["first", "hälf", "Segmentation fault"]


def test_a_log_that_is_moved_away_or_emptied_does_no_harm(tmp_path):
    """It is read for explanations only; what comes after goes on being read."""
    path = tmp_path / "server.log"
    path.write_text("one\n")
    reader = LogReader(path, 0)
    assert reader.read() == ["one"]
    path.write_text("2\n")
    assert reader.read() == ["2"]
    path.unlink()
    assert reader.read() == []


def test_of_a_huge_log_the_end_is_read(tmp_path):
    """A server that writes more than we read costs no memory."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"line {n}\n" for n in range(300_000)))
    reader = LogReader(path, 0)
    assert len(reader.read()) < 200_000
    assert reader.tail(1) == ["line 299999"]


@pytest.mark.parametrize(
    ("stage", "advice"),
    [
        (Stage.LOADING, "use more GPUs"),
        (Stage.KV_CACHE, "lower --mem-fraction-static"),
        (Stage.CAPTURING, "or --cuda-graph-max-bs-decode"),
        (Stage.SERVING, "lower --chunked-prefill-size"),
    ],
)
def test_out_of_memory_depends_on_the_stage(stage, advice):
    """The same words ask for the opposite, before and after the KV cache is there."""
    lines = ["RuntimeError: NCCL error: remote process exited", f"[t TP3] {OUT_OF_MEMORY}"]
    known = explain_failure(lines, stage=stage, status=-9)
    assert known.name == "out_of_memory"
    assert advice in known.explanation


@pytest.mark.parametrize(
    ("line", "name", "says"),
    [
        ("sglang serve: error: unrecognized arguments: --no-such-flag", "bad_argument", "--no-such-flag"),
        (
            "sglang serve: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max",
            "bad_argument",
            "ambiguous option: --cuda-graph-max-bs could match",
        ),
        (
            "AssertionError: 32 is not divisible by 3",
            "not_divisible",
            "32 is not divisible by 3): choose another --tp",
        ),
        (
            "LocalEntryNotFoundError: Cannot find the files and outgoing traffic has been disabled.",
            "hub_offline",
            "unset HF_HUB_OFFLINE",
        ),
        ("RuntimeError: No CUDA GPUs are available", "no_gpu", "CUDA_VISIBLE_DEVICES"),
        (
            "ValueError: The repository /m contains custom code which must be executed to load",
            "remote_code",
            "--trust-remote-code",
        ),
        (
            "OSError: You are trying to access a gated repo.",
            "model_gated",
            "HF_TOKEN",
        ),
        (
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/tmp/none'.",
            "model_not_found",
            "the model (/tmp/none) is neither",
        ),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "no_network",
            "https://huggingface.co",
        ),
        ("ValueError: Cannot find the config file for awq", "quantization", "this quantization (awq)"),
        (
            "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU.",
            "quantization",
            "modelopt_fp4",
        ),
        (
            "ValueError: Model architectures ['NewForCausalLM'] are not supported for now.",
            "architecture",
            "NewForCausalLM",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "kv_too_small",
            "raise --mem-fraction-static",
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-",
            "kv_too_small",
            "raise --mem-fraction-static",
        ),
        (
            "OutOfResources: out of resource: shared memory, Required: 147456, Hardware",
            "gpu_shared_memory",
            "147456 bytes of shared memory",
        ),
        (
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on",
            "kernel_missing",
            "no kernels for this GPU",
        ),
        ("RuntimeError: Ninja build failed. Ninja output:", "kernel_not_compiled", "CUDA_HOME"),
        (
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "gpu_failed",
            "an illegal memory access was encountered",
        ),
        (
            "[t] ERROR: [Errno 98] bind on address: address already in use",
            "port_taken",
            "another --port",
        ),
        (
            "Exception: Capture cuda graph failed: CUDA error: operation not permitted",
            "graph_capture",
            "operation not permitted",
        ),
        ("[t] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "stuck", "hangs"),
        (
            "[rank2]:[E626 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout",
            "nccl",
            "NCCL_P2P_DISABLE=1",
        ),
        (
            "[t] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT",
            "killed",
            "its process scheduler_0 was killed from outside",
        ),
        (
            "[t] Subprocess scheduler_0 (pid=7) crashed with exit code -11. Triggering SIGQUIT",
            "crashed",
            "exit code -11",
        ),
    ],
)
def test_known_failures(line, name, says):
    """Each has a name to branch on and one line that says what to do."""
    lines = ["[t] kill_process_tree called: parent_pid=1", line, "[t] SIGQUIT received. signum=3"]
    known = explain_failure(lines, stage=Stage.STARTING, status=-9)
    assert known.name == name
    assert says in known.explanation
    assert "\n" not in known.explanation
    assert known.requires_user_action == (name not in MAY_PASS)
    assert known.lines in ((line,), ())


def test_flags_that_do_not_go_together_are_told():
    """SGLang 0.5.23 says no more than an assert; a Hub that fails there is another thing."""
    failed = explain_failure(SETTINGS_REFUSED.splitlines(), stage=Stage.STARTING, status=1)
    assert (failed.name, failed.requires_user_action) == ("bad_settings", True)
    assert "(AssertionError: assert cfg.tp_size % cfg.attn_dp_size == 0)" in failed.explanation
    assert failed.lines == ("assert cfg.tp_size % cfg.attn_dp_size == 0", "AssertionError")
    for ended, known in (("ValueError: no cookies with milk", True), ("OSError: 500 Server Error", False)):
        lines = SETTINGS_REFUSED.replace("AssertionError", ended).splitlines()
        failed = explain_failure(lines, stage=Stage.STARTING, status=1)
        assert (failed is not None) == known
        assert not known or f"({ended})" in failed.explanation


def test_a_scheduler_that_refuses_its_settings_is_told_from_one_that_fails_at_work():
    """Before it serves, an assertion would fail again."""
    lines = [
        "[t TP2] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/sglang/srt/utils/numa_utils.py", line 463, in init_threads_binding',
        "    assert world_size <= n_numa_node, (",
        "           ^^^^^^^^^^^",
        "AssertionError: more ranks than nodes",
        "[t] Received sigquit from a child process. It usually means the child failed.",
    ]
    known = explain_failure(lines, stage=Stage.CONNECTING, status=-9)
    assert "(AssertionError: more ranks than nodes)" in known.explanation
    assert known.requires_user_action
    assert explain_failure(lines, stage=Stage.SERVING, status=-9) is None


def test_ranks_that_fail_alike_are_shown_once():
    """The most telling lines are few."""
    lines = [f"[t TP{rank}] torch.OutOfMemoryError: CUDA out of memory. Tried" for rank in range(8)]
    lines += [f"[t TP{rank}] RuntimeError: CUDA error: out of memory" for rank in range(8)]
    known = explain_failure(lines, stage=Stage.LOADING, status=1)
    assert known.requires_user_action
    assert len(known.lines) == 2


def test_the_code_in_a_traceback_is_no_message():
    """It quotes the message with its placeholders, one line before the message."""
    lines = [
        "  File weight_utils.py, line 389, in get_quant_config",
        '    raise ValueError(f"Cannot find the config file for {model_config.quantization}")',
        "ValueError: Cannot find the config file for awq",
    ]
    known = explain_failure(lines, stage=Stage.LOADING, status=-9)
    assert "this quantization (awq)" in known.explanation
    assert explain_failure(lines[:2], stage=Stage.LOADING, status=1) is None


def test_a_kill_from_outside_is_told_from_its_own_end():
    """SGLang ends itself by SIGKILL too, and says so before (0.5.23)."""
    assert explain_failure(["[t] Decode batch"], stage=Stage.SERVING, status=-9).name == "killed"
    itself = ["[t] kill_process_tree called: parent_pid=1, include_parent=True, pid=1"]
    assert explain_failure(itself, stage=Stage.SERVING, status=-9) is None


def test_what_is_not_known_is_not_guessed():
    """A healthy log, a compiler's error and an unknown status explain nothing."""
    lines = [*ON_A_CPU.splitlines(), "kernel.cu(12): error: identifier is undefined"]
    assert explain_failure(lines, stage=Stage.SERVING, status=1) is None
    assert explain_slow_start(Stage.STARTING) is None


def test_a_commands_secrets_are_found():
    """Both ways of writing an option; a flag without a value names none."""
    argv = [
        "sglang",
        "serve",
        "--api-key",
        "one-secret",
        "--admin-api-key=two",
        "--speculative-token-map",
        "x",
    ]
    assert secrets_in_command([*argv, "--ssl-keyfile-password"]) == {"one-secret", "two"}
    assert redact_text("key one-secret", {"one-secret"}) == "key <redacted>"
