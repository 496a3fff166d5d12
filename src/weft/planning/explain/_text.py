"""Prices in words: where the time goes, what fills the memory, what a plan is in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from weft.formatting import format_number, format_percent, time_unit
from weft.planning.price import MemoryKinds, Prediction, TimeTerms
from weft.techniques.cost_terms import Calibration, Framework, Layout
from weft.techniques.registry import describe as describe_techniques

_WORDS = {field.name: field.name.replace("_", " ") for field in dataclasses.fields(TimeTerms)} | {
    "memory_bound": "memory-bound",
    "pipeline": "pipeline sends",
}
_NEGLIGIBLE = 0.002
"""Share of a step below which a cause is not worth a word."""
_GIBI = 2**30


def waterfall(time: TimeTerms) -> list[tuple[str, float]]:
    """Return (cause, seconds) from the ideal to the whole step; they add up to it.

    Causes that take less than 1/500 of the step are joined with `other`.
    """
    terms = [(_WORDS[field.name], float(getattr(time, field.name))) for field in dataclasses.fields(time)]
    kept = [(word, seconds) for word, seconds in terms if abs(seconds) >= _NEGLIGIBLE * time.total and word != "other"]
    rest = time.total - sum(seconds for _, seconds in kept)
    return [*kept, ("other", rest)] if abs(rest) >= _NEGLIGIBLE * time.total else kept


def time_line(time: TimeTerms) -> str:
    """Return `ideal 2.31 s │ matrix shapes +0.41 │ …`."""
    (first, ideal), *rest = waterfall(time)
    unit, scale = time_unit(time.total)
    head = f"{first} {format_number(ideal * scale)} {unit}"
    return " │ ".join([head, *(f"{word} {format_number(s * scale, 2, signed=True)}" for word, s in rest)])


def memory_line(prediction: Prediction) -> str:
    """Return `weights 12.6 · gradients 12.6 · … · free 7.1 · margin 4.8 GiB` of the fullest rank.

    Free is what would fit beside it; the margin is what plans leave because predictions err."""
    fullest = prediction.fullest
    parts = [*memory_parts(fullest.kinds), ("fragmentation", fullest.reserved - fullest.kinds.allocated)]
    parts += [("communicators", fullest.device - fullest.reserved)]
    free = prediction.usable_bytes - fullest.device
    shown = [
        f"{word} {format_number(size / _GIBI)}"
        for word, size in parts
        if size >= 0.005 * _GIBI or size > 0.01 * fullest.device
    ]
    margin = f"margin {format_number(prediction.margin_bytes / _GIBI)} GiB"
    return " · ".join([*shown, f"free {format_number(free / _GIBI)}", margin])


def imbalance_line(layout: Layout, calibration: Calibration, framework: Framework) -> str:
    """Return what a price takes for granted of how tokens choose experts; empty where ranks share out none."""
    if layout.expert == 1 or framework.balances_experts:
        return ""
    busiest = f"{calibration.expert_imbalance:.3g} times the mean number of tokens (expert_imbalance)"
    return f"of {layout.expert} ranks that share out experts, the busiest has {busiest}"


def memory_parts(kinds: MemoryKinds) -> list[tuple[str, float]]:
    """Return (kind, bytes) of what a rank has allocated at its peak."""
    return [(name, float(size)) for name, size in kinds._asdict().items()]


def layout_line(layout: Layout) -> str:
    """Return a layout in one line: `pipeline 16 (1f1b) × data 128 × tensor 8, ZeRO-1, microbatch 1, …`."""
    chunks = " chunks" if layout.chunks > 1 else ""
    axes = [f"pipeline {layout.pipeline} ({layout.schedule_line}{chunks})"] if layout.pipeline > 1 else []
    axes += [f"{name} {size}" for name, size in _axes(layout) if size > 1]
    stage = layout.stage_name
    if layout.shards_weights and layout.reduce_every != "auto":
        stage += f" (gradients reduced every {layout.reduce_every})"
    words = [" × ".join(axes) or "1 device", stage, f"microbatch {layout.microbatch_size}"]
    return ", ".join([*words, layout.recompute_line, *describe_techniques(layout)])


def format_change(ratio: float) -> str:
    """Return `12 % slower than` for a time that is 1.12 times another, `as fast as` for an equal one."""
    percent = (ratio - 1) * 100
    if abs(percent) < 0.05:
        return "as fast as"
    return f"{format_percent(abs(percent))} {'slower' if percent > 0 else 'faster'} than"


def differences(one: TimeTerms, other: TimeTerms, *, most: int = 4) -> list[tuple[str, float]]:
    """Return the causes by whose seconds two steps differ most: `other` − `one`, largest first."""
    terms = [
        (_WORDS[field.name], float(getattr(other, field.name)) - float(getattr(one, field.name)))
        for field in dataclasses.fields(one)
    ]
    whole = max(one.total, other.total)
    return sorted((pair for pair in terms if abs(pair[1]) >= _NEGLIGIBLE * whole), key=lambda p: -abs(p[1]))[:most]


def difference_line(pairs: Iterable[tuple[str, float]], total: float) -> str:
    """Return `bubble +0.4, tensor -0.1 s`."""
    unit, scale = time_unit(total)
    return ", ".join(f"{word} {format_number(seconds * scale, 2, signed=True)}" for word, seconds in pairs) + f" {unit}"


def _axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    data = (("data", layout.data),)
    if layout.shards_weights and layout.replicate > 1:
        data = (("replicate", layout.replicate), ("shard", layout.shard))
    return (*data, ("context", layout.context), ("tensor", layout.tensor), ("expert", layout.expert))
