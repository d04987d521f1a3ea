"""Which failures the same command would meet again, until something is changed.

Knows the error types of every layer; does not know how they are told. Invariant: it looks at types and
fields, never at a message.
"""

from collections.abc import Iterable

from flows.catalog import InputError
from serving.errors import ServingError
from tasks.core.export.files import ExportInputError
from tasks.core.prepare import EmptyDatasetError
from tasks.core.run_file import RunFolderError
from tasks.core.sources import SourceError
from tasks.generation import NothingAnsweredError
from tasks.preflight import PreflightError

_REFUSALS = (
    InputError, RunFolderError, PreflightError, SourceError, EmptyDatasetError, ExportInputError,
    NothingAnsweredError,
)  # fmt: skip


def all_need_change(failures: Iterable[object]) -> bool:
    """Whether the same would come of all of them again."""
    return all(needs_change(failure) for failure in failures)


def needs_change(failure: object) -> bool:
    """Whether something has to be changed first; False where it may pass by itself."""
    if isinstance(failure, ServingError):
        return failure.needs_change
    return isinstance(failure, _REFUSALS)
