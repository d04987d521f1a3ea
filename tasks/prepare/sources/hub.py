"""A dataset on the Hugging Face Hub as rows.

Knows the Hub through `huggingface_hub` and `datasets`, which is an extra; does not know what a row means.
Invariant: what is read is one commit, streamed; no code of the dataset is ever run.
"""

import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

import orjson

from tasks.prepare.sources.readers import DataFile, read_file
from tasks.prepare.sources.rows import MalformedRow, SourceError, SourceRow, describe_error

_SCHEME = "hub:"
_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One split of one commit; `subset` (its configuration) is None for the default one."""

    repo_id: str
    commit: str
    subset: str | None
    split: str


def is_hub_source(source: str) -> bool:
    """Whether a source is a dataset on the Hub rather than files."""
    return source.startswith(_SCHEME)


def spell_hub_source(source: str, *, revision: str | None, subset: str | None, split: str | None) -> str:
    """The whole of a Hub source in one text: hub:ORG/NAME?revision=…&subset=…&split=…."""
    named = {"revision": revision, "subset": subset, "split": split}
    query = urlencode({name: value for name, value in named.items() if value})
    return f"{source}{'&' if '?' in source else '?'}{query}" if query else source


def find_dataset(source: str) -> HubDataset:
    """Ask the Hub which commit a source stands for now.

    Raises:
        SourceError: the Hub has no such dataset or revision or cannot be reached, or `datasets` is missing.
    """
    repo_id, _, query = source.removeprefix(_SCHEME).partition("?")
    named = dict(parse_qsl(query))
    if unknown := sorted(named.keys() - {"revision", "subset", "split"}):
        raise SourceError(
            f"source {source!r}: unknown {', '.join(unknown)}; it has revision, subset and split"
        )
    spec = importlib.util.find_spec("datasets")
    if spec is None or spec.origin is None:  # or a mere folder of that name
        raise SourceError(
            f"source {source!r}: reading from the Hub needs the package datasets: run `make hub`, or "
            f"`python -m pip install -r requirements/hub.txt` in draftmill's environment; {_way_out(repo_id)}"
        )
    commit = _find_commit(source, repo_id, named.get("revision"))
    return HubDataset(repo_id, commit, named.get("subset"), named.get("split", "train"))


def read_dataset(dataset: HubDataset) -> Iterator[SourceRow | MalformedRow]:
    """Stream the rows; `where` is the dataset's name, the split and the row's number from 1.

    Raises:
        SourceError: there is no such subset or split, its files are not readable, or the Hub went away.
    """
    label = f"{dataset.repo_id.rpartition('/')[2]}:{dataset.split}"
    number = 0
    try:
        for file in _list_files(dataset):
            for row in read_file(file):
                number += 1
                yield row._replace(where=f"{label}:{number}")
    except SourceError as exc:
        raise SourceError(f"{_name(dataset)}: after {number} rows of {label}: {exc}") from exc
    except Exception as exc:  # of its HTTP client, which has changed before
        raise SourceError(
            f"{_name(dataset)}: not readable after {number} rows of {label} ({describe_error(exc)}); "
            f"{_way_out(dataset.repo_id)}"
        ) from exc


def _list_files(dataset: HubDataset) -> list[DataFile]:
    """The files of the split, which `datasets` knows from the dataset's card and the files' names.

    Its own reading of them is not used: it ends at the first bad line, and gives JSON rows of unlike shapes
    null fields that they did not have, or texts in place of objects.
    """
    import datasets  # an extra, and seconds to import
    from huggingface_hub import HfFileSystem

    datasets.disable_progress_bars()
    builder = datasets.load_dataset_builder(dataset.repo_id, name=dataset.subset, revision=dataset.commit)
    splits = builder.config.data_files or {}
    if dataset.split not in splits:
        raise SourceError(
            f"there is no split {dataset.split!r}, only {', '.join(map(str, splits)) or 'none'}"
        )
    hub = HfFileSystem()
    return [
        DataFile(url.rpartition("/")[2], url, functools.partial(hub.open, url, "rb"))
        for url in map(str, splits[dataset.split])
    ]


def hash_dataset(dataset: HubDataset) -> str:
    """Hex sha256 of what names the rows: a commit's content never changes."""
    parts = ["hub", dataset.repo_id, dataset.commit, dataset.subset, dataset.split]
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()


def _find_commit(source: str, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = HfApi().dataset_info(repo_id, revision=revision, timeout=_ANSWER_TIMEOUT_S).sha
    except HFValidationError as exc:
        raise SourceError(
            f"source {source!r}: {repo_id!r} is no id of a dataset, as in hub:ORG/NAME"
        ) from exc
    except RevisionNotFoundError as exc:
        raise SourceError(f"source {source!r}: {repo_id!r} has no revision {revision!r} on the Hub") from exc
    except RepositoryNotFoundError as exc:
        raise SourceError(
            f"source {source!r}: the Hub has no dataset {repo_id!r}, or not for you: correct the name, or "
            "set HF_TOKEN to a token that may read it"
        ) from exc
    except Exception as exc:  # of its HTTP client, which has changed before
        raise SourceError(
            f"source {source!r}: the Hub cannot be asked for {repo_id!r} ({describe_error(exc)}); "
            f"{_way_out(repo_id)}"
        ) from exc
    if not found:
        raise SourceError(f"source {source!r}: the Hub names no commit of {repo_id!r}; {_way_out(repo_id)}")
    return str(found)


def _name(dataset: HubDataset) -> str:
    return f"Hub dataset {dataset.repo_id!r} (revision {dataset.commit})"


def _way_out(repo_id: str) -> str:
    return (
        f"without the Hub, download the files elsewhere (hf download --repo-type dataset {repo_id} "
        "--local-dir FOLDER) and point `source` at them"
    )
