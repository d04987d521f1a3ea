"""The export's draft vocabulary: counted over the train split, written as the arrays that trainers take.

Knows `vocab/` and how much of each dataset it covers; does not know where samples come from. Invariant: the
same samples give the same bytes, in whatever order they come.
"""

import io
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tasks.export.files import ExportInputError, FileEntry, RowBatch, write_file
from tasks.tokens.draft_vocab import VocabCounts, VocabMap, build_vocab_map, measure_coverage, measure_curve

PT_FILES = ("vocab_mapping.pt", "token_freq.pt")
_PT_SCRIPT = "to_pt.py"


class VocabSink:
    """`vocab/`: counts as rows go by, everything else at the end; `description` is then the manifest's."""

    def __init__(self, folder: Path, *, draft_vocab_size: int, target_vocab_size: int) -> None:
        (folder / "vocab").mkdir()
        self._folder = folder
        self._draft_vocab_size = draft_vocab_size
        self._counts = VocabCounts(target_vocab_size)
        self.description: dict[str, Any] = {}

    def write(self, batch: RowBatch) -> None:
        """Count the trained ids of the train split.

        Raises:
            ExportInputError: one of them is not an id of the target.
        """
        if batch.split != "train":
            return
        start, names = 0, batch.datasets
        while start < len(names):
            end = next((n for n in range(start, len(names)) if names[n] != names[start]), len(names))
            part = slice(batch.offsets[start], batch.offsets[end])
            ids = batch.input_ids[part][batch.loss_mask[part].view(np.bool_)]
            try:
                self._counts.add(names[start], ids)
            except ValueError as exc:
                raise ExportInputError(
                    f"{exc}; if details.target_vocab_size in run.json is too small, correct it (vocab_size "
                    "of the model's config.json), or export without vocab (--draft-vocab-size 0)"
                ) from exc
            start = end

    def finish(self) -> list[FileEntry]:
        """Choose the vocabulary and write its files."""
        total = self._counts.total
        size = self._draft_vocab_size
        found = build_vocab_map(total, draft_vocab_size=size, target_vocab_size=len(total))
        arrays = {f"d2t-{size}.npy": found.d2t, f"t2d-{size}.npy": found.t2d, "token_freq.npy": total}
        files = [
            write_file(self._folder, FileEntry(f"vocab/{name}", "vocab"), _to_npy(array))
            for name, array in arrays.items()
        ]
        pt_files, why_none = _make_pt_files(self._folder)
        self.description = self._describe(found, total, why_none)
        return files + pt_files

    def close(self) -> None:
        """Nothing is open."""

    def _describe(self, found: VocabMap, total: np.ndarray, why_no_pt: str | None) -> dict[str, Any]:
        def cover(counts: np.ndarray) -> dict[str, Any]:
            share = measure_coverage(counts, found.t2d)
            return {"loss_tokens": int(counts.sum()), "ids": int(np.count_nonzero(counts)), "coverage": share}

        return {
            "draft_vocab_size": len(found.d2t),
            "target_vocab_size": len(total),
            "counted": "loss tokens of the train split",
            "datasets": [{"name": name, **cover(n)} for name, n in self._counts.datasets.items()],
            "total": cover(total),
            "curve": [{"draft_vocab_size": k, "coverage": share} for k, share in measure_curve(total)],
            "pt_files": list(PT_FILES) if why_no_pt is None else why_no_pt,
        }


def find_torch_version() -> str | None:
    """The version of the torch that is installed here; None without one."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _make_pt_files(folder: Path) -> tuple[list[FileEntry], str | None]:
    """The .pt files where torch is there; else the script that makes them where it is, and why.

    In a process of its own: torch takes seconds to import and 300 MB, and stays for good.
    """
    vocab = folder / "vocab"
    script = vocab / _PT_SCRIPT
    entry = write_file(folder, FileEntry(f"vocab/{_PT_SCRIPT}", "vocab"), _PT_CODE.encode())
    if find_torch_version() is None:
        return [entry], f"not written: no torch here; vocab/{_PT_SCRIPT} makes them where there is one"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        for name in PT_FILES:
            (vocab / name).unlink(missing_ok=True)
        return [entry], f"not written: torch failed ({last}); vocab/{_PT_SCRIPT} makes them"
    script.unlink()
    return [_describe_file(folder, f"vocab/{name}") for name in PT_FILES], None


def _describe_file(folder: Path, path: str) -> FileEntry:
    data = (folder / path).read_bytes()
    (folder / path).unlink()
    return write_file(folder, FileEntry(path, "vocab"), data)


def _to_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


_PT_CODE = '''\
"""Make vocab_mapping.pt and token_freq.pt of the arrays beside this script; needs numpy and torch."""

from pathlib import Path

import numpy as np
import torch

here = Path(__file__).parent
d2t, t2d = (torch.from_numpy(np.load(next(here.glob(f"{name}-*.npy")))) for name in ("d2t", "t2d"))
torch.save({"d2t": d2t, "t2d": t2d}, here / "vocab_mapping.pt")
counts = np.load(here / "token_freq.npy")
torch.save({token: int(counts[token]) for token in np.flatnonzero(counts).tolist()}, here / "token_freq.pt")
'''
