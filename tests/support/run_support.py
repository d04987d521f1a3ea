"""Run the real command line in a folder of its own and read what it left there."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

DRAFTMILL = [sys.executable, "-c", "from deployments.cli import main; main()"]


def write_prompts(path, count, *, words=3):
    """A JSONL file for the messages adapter; every prompt is another one."""
    lines = [
        {
            "id": f"{path.stem}{n}",
            "messages": [{"role": "user", "content": f"question {n} " * (1 + n % words)}],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_rows(folder, name):
    """The rows of one dataset's log."""
    path = Path(folder) / name / "raw_responses.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class Runner:
    """`write` a parameter file, then `run` or `start` draftmill on it."""

    def __init__(self, folder, tokenizer_dir, *, env):
        self.folder = folder
        self.env = env
        self.started = []
        self.output_dir = folder / "out"
        self.raw = {
            "target": {"model": "fake", "tokenizer": str(tokenizer_dir)},
            "server": {"mode": "connect", "base_urls": [], "measure_s": 0},
            "datasets": [],
            "lanes": {
                "short": {"concurrency": 8, "max_new_tokens": 200},
                "long": {"concurrency": 2, "max_new_tokens": 200},
            },
            "dataset_retries": 0,
            "export": {"draft_vocab_size": 64},
            "output_dir": str(self.output_dir),
        }

    def add_dataset(self, name, *, prompts=100, **settings):
        """An inline dataset of generated prompts."""
        path = self.folder / f"{name}.jsonl"
        if prompts is not None:
            write_prompts(path, prompts)
        self.raw["datasets"].append({"name": name, "source": path.name, "adapter": "messages", **settings})

    def write(self):
        """Write params.yaml; returns its path."""
        path = self.folder / "params.yaml"
        path.write_text(yaml.safe_dump(self.raw))
        return path

    def run(self, *flags, timeout=300):
        """Run to the end; returns the completed process with text output."""
        return self.call("run", "--param-file", str(self.write()), *flags, timeout=timeout)

    def call(self, *argv, timeout=300):
        """Run any command of draftmill in the folder."""
        return subprocess.run(
            [*DRAFTMILL, *argv],
            cwd=self.folder,
            env=self.env,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, *flags):
        """Start a run in a session of its own; the caller ends it."""
        argv = [*DRAFTMILL, "run", "--param-file", str(self.write()), *flags]
        log = (self.folder / "run.log").open("ab")
        with log:
            process = subprocess.Popen(
                argv, cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(process)
        return process

    def end_all(self):
        """Kill what a failed test has left running."""
        for process in self.started:
            process.kill()
            process.wait()

    def log(self):
        """What started runs have printed."""
        return (self.folder / "run.log").read_text()

    def wait_for_rows(self, name, count, process, *, timeout=300):
        """Wait until a started run has put so many rows on disk."""
        deadline = time.monotonic() + timeout
        while len(read_rows_raw(self.output_dir, name)) < count:
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def rows(self, name):
        """The rows of one dataset."""
        return read_rows(self.output_dir, name)


def read_rows_raw(folder, name):
    """The whole lines of a log, which may still be growing."""
    path = Path(folder) / name / "raw_responses.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def interrupt(process, number=signal.SIGINT):
    """Send a signal to the process alone and wait for its end; returns the exit status."""
    process.send_signal(number)
    return process.wait(120)
