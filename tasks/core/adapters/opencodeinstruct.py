"""OpenCodeInstruct rows: the prompt is `input`; `output` is another model's answer and is left out.

Knows that scores may be strings, and makes numbers of them.
"""

import math
from collections.abc import Mapping
from typing import Any

from tasks.core.adapters.common import build_prompt
from tasks.core.adapters.fields import require_text, row_id, scalars
from tasks.core.records import Prompt

_META_FIELDS = ("domain", "generation_algorithm", "average_test_score")


def adapt_opencodeinstruct(row: Mapping[str, Any]) -> Prompt:
    """Make the single-turn prompt of one OpenCodeInstruct row.

    Raises:
        RowRejected: `input` is missing or blank.
    """
    meta = scalars(row, *_META_FIELDS)
    if "average_test_score" in meta:
        meta["average_test_score"] = _to_number(meta["average_test_score"])
    turn = {"role": "user", "content": require_text(row, "input")}
    return build_prompt([turn], row_id=row_id(row, "id"), meta=meta)


def _to_number(score: Any) -> Any:
    try:
        number = float(score)
    except ValueError:
        return score
    return number if math.isfinite(number) else score
