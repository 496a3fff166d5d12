"""The best plans of a search, as a table for people and as numbers for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from weft.config.document import to_table
from weft.formatting import format_number
from weft.planning.learned import NOTHING_LEARNED, Learned
from weft.planning.price import CostModel, TimeTerms
from weft.planning.search import Candidate, SearchResult
from weft.techniques.cost_terms import Corrections, Layout
from weft.techniques.registry import describe as describe_techniques

_HEADINGS = (
    "", "pp", "dp", "cp", "tp", "ep", "ZeRO", "micro", "pipeline", "recomputed", "step", "tokens/s/device", "MFU",
    "memory", "why not first",
)  # fmt: skip
_LEFT = ("pipeline", "recomputed", "why not first")
_LARGEST_TERMS = 2


def search_lines(result: SearchResult, *, top: int, seconds: float) -> list[str]:
    """Return what a search found, in lines: model and cluster, how many plans there were, and the best of them.

    Args:
        seconds: that the search took.
    """
    return [*_heading(result, seconds), "", *plan_table(result, top=top)]


def plan_table(result: SearchResult, *, top: int) -> list[str]:
    """Return the best plans, one a line; they differ in their axes or in the ZeRO stage.  See `search_lines`."""
    chosen = result.best[:top]
    if not chosen:
        return _nothing(result)
    rows = [_HEADINGS, *(_row(place, candidate, chosen[0]) for place, candidate in enumerate(chosen, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(
            text.ljust(width) if name in _LEFT else text.rjust(width)
            for name, text, width in zip(_HEADINGS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    definition = (
        "MFU: the model's FLOPs, forward and backward, nothing computed again, causal attention counted half, over the "
        "devices' dense peak in the plan's precision"
    )
    return [*lines, "", definition]


def _nothing(result: SearchResult) -> list[str]:
    """Why there is no plan to show: what fits is refused, or nothing fits."""
    refused = result.counts.refused
    if not refused:
        return ["no plan fits into memory"]
    commonest = next(iter(refused)).splitlines()
    return [f"no plan: of those that fit {sum(refused.values()):,} are refused; the commonest reason:", *commonest]


def search_document(result: SearchResult, learned: Learned = NOTHING_LEARNED) -> dict[str, Any]:
    """Return what a search found as plain numbers and text, for JSON; `learned` is what has corrected its prices."""
    return {
        "model": result.profile.name,
        "parameters": result.profile.num_parameters,
        "cluster": result.cluster.digest,
        "devices": result.cluster.num_devices,
        "global_batch_size": result.global_batch_size,
        "sequence_length": result.profile.sequence_length,
        "objective": result.objective.quantity,
        "counts": dataclasses.asdict(result.counts),
        "learned": _learned_document(result, learned),
        "plans": [_document(candidate) for candidate in result.best],
    }


def learned_lines(result: SearchResult, learned: Learned) -> list[str]:
    """Return what recorded runs have made of the best plan's step: the sentence, and the correction of each part."""
    if not learned.num_runs or not result.best:
        return []
    best = result.best[0]
    said = learned.line(best.prediction.step_seconds, _uncorrected(result, best.layout))
    return [said, *learned.parts(best.layout.precision, result.cluster.num_cores / best.layout.world_size)]


def _learned_document(result: SearchResult, learned: Learned) -> dict[str, Any] | None:
    if not learned.num_runs:
        return None
    return {
        "runs": learned.num_runs,
        "newest_unix_time": learned.newest,
        "source": learned.source,
        "corrections": to_table(learned.corrections),
        "uncorrected_seconds": [_uncorrected(result, candidate.layout) for candidate in result.best],
    }


def _uncorrected(result: SearchResult, layout: Layout) -> float:
    """Seconds of a step without corrections."""
    plain = dataclasses.replace(result.calibration, corrections=Corrections())
    cost_model = CostModel(result.profile, result.cluster, result.framework, plain)
    return cost_model.predict(layout, exact=True).step_seconds


def _document(candidate: Candidate) -> dict[str, Any]:
    prediction = candidate.prediction
    return {
        "plan": None if candidate.plan is None else to_table(candidate.plan),
        "world_size": candidate.layout.world_size,
        "step_seconds": prediction.step_seconds,
        "pessimistic_seconds": candidate.pessimistic_seconds,
        "spread": prediction.spread,
        "tokens_per_second": candidate.tokens_per_second,
        "model_flops_utilization": candidate.model_flops_utilization,
        "cost_per_million_tokens": candidate.cost_per_million_tokens,
        "training_seconds": candidate.training_seconds,
        "seconds": dataclasses.asdict(prediction.time),
        "memory": [
            {"rank": stage.rank, "device_bytes": stage.device, "reserved_bytes": stage.reserved}
            | {f"{name}_bytes": size for name, size in stage.kinds._asdict().items()}
            for stage in prediction.stages
        ],
        "usable_bytes": prediction.usable_bytes,
        "margin_bytes": prediction.margin_bytes,
    }


def _heading(result: SearchResult, seconds: float) -> Iterator[str]:
    counts, objective = result.counts, result.objective
    parameters = f"{format_number(result.profile.num_parameters / 1e9)} B parameters"
    yield f"{result.profile.name}, {parameters}  ·  {result.cluster.summary}"
    unit = f" of {result.profile.sequence_length:,} tokens" if result.profile.sequence_length > 1 else ""
    yield f"global batch {result.global_batch_size:,} samples{unit}  ·  objective {objective.quantity}"
    yield (
        f"searched {counts.searched:,} plans in {seconds:.1f} s: {counts.time_bound + counts.memory_bound:,} splits "
        f"dropped by bounds, {counts.estimated:,} plans estimated, {counts.priced:,} priced, of which "
        f"{counts.out_of_memory:,} do not fit"
    )


def _row(place: int, candidate: Candidate, first: Candidate) -> tuple[str, ...]:
    layout, prediction = candidate.layout, candidate.prediction
    step = f"{_seconds(prediction.step_seconds)} ±{100 * prediction.spread:.0f}%"
    memory = f"{prediction.fullest.device / 2**30:.1f} / {prediction.device_bytes / 2**30:.0f} GiB"
    return (
        str(place),
        str(layout.pipeline),
        _data(layout),
        str(layout.context),
        str(layout.tensor),
        str(layout.expert),
        str(layout.stage),
        f"{layout.microbatch_size}×{layout.microbatches}",
        layout.schedule_line if layout.pipeline > 1 else "–",
        ", ".join([layout.recompute_cell, *describe_techniques(layout)]),
        step,
        f"{candidate.tokens_per_second / layout.world_size:,.0f}",
        f"{100 * candidate.model_flops_utilization:.1f} %",
        memory,
        "" if candidate is first else what_it_costs(candidate, first),
    )


def what_it_costs(candidate: Candidate, first: Candidate) -> str:
    """Return the largest differences in time to the best plan: `+0.21 s bubble, +0.05 s data`."""
    differences = [
        (getattr(candidate.prediction.time, field.name) - getattr(first.prediction.time, field.name), field.name)
        for field in dataclasses.fields(TimeTerms)
    ]
    worse = sorted((difference for difference in differences if difference[0] > 0), reverse=True)[:_LARGEST_TERMS]
    if candidate.layout.world_size != first.layout.world_size and not worse:
        return f"{candidate.layout.world_size:,} devices"
    return ", ".join(f"+{_seconds(seconds)} {name.replace('_', ' ')}" for seconds, name in worse)


def _data(layout: Layout) -> str:
    return f"{layout.replicate}×{layout.shard}" if layout.replicate > 1 and layout.shard > 1 else str(layout.data)


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
