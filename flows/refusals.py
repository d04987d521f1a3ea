"""Which failures the same command would meet again, until something is changed.

Knows the error types of every layer; does not know how they are told. Invariant: it looks at types and
fields, never at a message.
"""

from collections.abc import Iterable

from flows.catalog import InputError
from serving.client.errors import ServingError
from tasks.export.files import ExportInputError
from tasks.generate.generation import NothingAnsweredError
from tasks.prepare.preparation import EmptyDatasetError
from tasks.prepare.sources import SourceError
from tasks.records.run_file import RunFolderError
from tasks.warm_up.preflight import PreflightError

_REFUSALS = (
    InputError, RunFolderError, PreflightError, SourceError, EmptyDatasetError, ExportInputError,
    NothingAnsweredError,
)  # fmt: skip


def all_need_change(failures: Iterable[object]) -> bool:
    """Whether the same would come of all of them again."""
    return all(requires_user_action(failure) for failure in failures)


def requires_user_action(failure: object) -> bool:
    """Whether something has to be changed first; False where it may pass by itself."""
    if isinstance(failure, ServingError):
        return failure.requires_user_action
    return isinstance(failure, _REFUSALS)
