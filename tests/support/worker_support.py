"""Find the processes that work for another one."""

from pathlib import Path


def find_workers(pid):
    """The workers that a process has started and not waited for; it may have other children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [int(pid) for pid in children if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid):
    """Whether it is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
