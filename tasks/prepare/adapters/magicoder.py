"""Magicoder rows: `problem` (OSS-Instruct, with `index` and `lang`) or `instruction` (Evol-Instruct, no id).

The solutions of another model beside them are left out.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.fields import require_text, row_id, scalars


def adapt_magicoder(row: Mapping[str, Any]) -> Conversation:
    """Read one Magicoder row of either set: a single question.

    Raises:
        RowRejected: neither field is there, or it is not text.
    """
    field = "instruction" if row.get("problem") is None and row.get("instruction") is not None else "problem"
    turn = {"role": "user", "content": require_text(row, field)}
    return Conversation([turn], id=row_id(row, "id", "index", "raw_index"), meta=scalars(row, "lang"))
