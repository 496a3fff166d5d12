"""Why the best plan has the settings that it has: what the next best other value of each would cost."""

from __future__ import annotations

from weft.config.document import format_value
from weft.config.plan import plan_settings
from weft.formatting import format_memory, format_number, format_percent
from weft.planning.search import SearchResult
from weft.techniques.recompute.settings import RECOMPUTE_KEY


def search_reasons(result: SearchResult) -> dict[str, str]:
    """Return dotted key → why, for the best plan's settings of which the other plans found have other values."""
    best = result.best[0] if result.best else None
    if best is None or best.plan is None:
        return {}
    plan, reasons = best.plan, dict[str, str]()
    for setting in plan_settings():
        if not setting.knob.explained:
            continue
        value = setting.of(plan)
        others = (
            candidate for candidate in result.best if candidate.plan is not None and setting.of(candidate.plan) != value
        )
        other = next(others, None)
        if other is not None and other.plan is not None:
            more = 100 * (other.score / best.score - 1)
            shown = _spelled(setting.of(other.plan))
            reasons[setting.key] = f"the best plan found with {shown} is {format_percent(more)} worse"
    prediction = best.prediction
    reasons["microbatch.per_step"] = f"keeps the global batch of {result.global_batch_size:,}"
    if prediction.fits:
        fullest = format_number(prediction.fullest.device / 2**30)
        reasons.setdefault(RECOMPUTE_KEY, f"{fullest} of {format_memory(prediction.device_bytes)} per rank")
    return reasons


def _spelled(value: object) -> str:
    return "some of the blocks" if isinstance(value, tuple) else format_value(value)
