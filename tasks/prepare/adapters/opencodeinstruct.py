"""OpenCodeInstruct rows: the prompt is `input`; `output` is another model's answer and is left out.

Knows that scores may be strings, and makes numbers of them.
"""

import math
from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.fields import require_text, row_id, scalars

_META_FIELDS = ("domain", "generation_algorithm", "average_test_score")


def adapt_opencodeinstruct(row: Mapping[str, Any]) -> Conversation:
    """Read one OpenCodeInstruct row: a single question.

    Raises:
        RowRejected: `input` is missing.
    """
    meta = scalars(row, *_META_FIELDS)
    if "average_test_score" in meta:
        meta["average_test_score"] = _to_number(meta["average_test_score"])
    turn = {"role": "user", "content": require_text(row, "input")}
    return Conversation([turn], id=row_id(row, "id"), meta=meta)


def _to_number(score: Any) -> Any:
    try:
        number = float(score)
    except ValueError:
        return score
    return number if math.isfinite(number) else score
