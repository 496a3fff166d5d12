"""The plan that a call was given: by itself, in a file, by keywords such as `zero=3`, or `auto`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from weft.config.document import format_value
from weft.config.plan import PLAN_KEYWORDS, Plan, PlanKeywords, load_plan, plan_by_keywords, refuse_unknown_keyword
from weft.errors import PlanError

_NARROWING = ("microbatches", "precision")
"""Keywords that do not say how to split: beside `auto` they narrow its choice."""


def requested_plan(
    call: str, plan: Plan | str | Path | None, keywords: PlanKeywords, known: Iterable[str] = ()
) -> Plan | Literal["auto"]:
    """Return the plan that a call was given, `auto` where nothing says how to split.

    Args:
        call: as messages name it: `weft.session`.
        known: names of its other arguments.

    Raises:
        PlanError: it cannot be read, a keyword is unknown or impossible, or both say how to split.
    """
    known = list(known)
    refuse_unknown_keyword(f"{call}()", keywords, known)
    splits = any(word not in _NARROWING for word in keywords)
    if keywords and plan is not None and (splits or plan != "auto"):
        word, value = next((word, value) for word, value in keywords.items() if not splits or word not in _NARROWING)
        shown = '"auto"' if plan == "auto" else "…"
        instead = f", or give settings={{{format_value(PLAN_KEYWORDS[word])}: {value!r}}} beside the plan"
        raise PlanError(
            f"{call}(plan={shown}, {word}={value!r}) says twice how to split. Leave one out"
            f"{instead if 'settings' in known else ''}."
        )
    if splits:
        return plan_by_keywords(f"{call}()", keywords)
    if plan is None or plan == "auto":
        return "auto"
    return plan if isinstance(plan, Plan) else load_plan(plan)
