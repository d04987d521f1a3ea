"""Whether a folder is an export, which may be replaced, or has anything of somebody else.

Knows which files an export has, and which are made from them later; does not know what they hold. Invariant:
a file that no export writes is never taken for one, whatever stands beside it.
"""

import re
from pathlib import Path

import orjson

from tasks.export.report import MANIFEST

_FILES = re.compile(
    r"""README\.md | manifest\.json
    | data/(train|eval)-\d+\.parquet
    | jsonl/(train|eval)\.jsonl
    | arrow/(train|eval)/(data-\d+-of-\d+\.arrow | dataset_info\.json | state\.json)
    | vocab/(d2t-\d+ | t2d-\d+ | token_freq)\.npy | vocab/(vocab_mapping | token_freq)\.pt | vocab/to_pt\.py
    | conversations/(train|eval)\.jsonl
    | configs/(specforge\.yaml | speculators\.md)
    | arrow/(train|eval)/cache-[^/]+ | \.cache/.* | (.*/)?\.DS_Store  # of datasets, huggingface_hub, macOS
    """,
    re.VERBOSE,
)


def explain_foreign(folder: Path) -> str | None:
    """Why a folder with files in it is no export of ours, and what to do; None where it is one.

    A manifest that is damaged says nothing against it: such an export is made again.
    """
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not _is_folder(path))
    strange = next((path for path in sorted(paths) if not _FILES.fullmatch(path)), None)
    if strange is not None:
        return f"holds {strange!r}, which no export has, and all of it would be replaced; move that elsewhere"
    try:
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"has files but no {MANIFEST}, so it is no export and is not replaced; move it elsewhere"
    except ValueError:
        return None
    if not isinstance(manifest, dict) or "format" not in manifest:
        return f"has a {MANIFEST} that is not of an export, so it is not replaced; move it elsewhere"
    return None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
