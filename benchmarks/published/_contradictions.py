"""Published peaks that cannot both be right: a run that needs more of everything took less memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.published._cases import is_fullest
from benchmarks.published._score import Outcome
from weft.model.profile import Profile
from weft.techniques.cost_terms import Layout

_GIBI = 2**30
_TOLERANCE = 0.1
"""Share of the peak by which two runs of one configuration may differ."""


class Contradiction(NamedTuple):
    """Two rows of which at least one is wrong."""

    larger: int
    """Index of the row that needs at least as much of everything."""
    smaller: int
    reason: str


def contradictions_of(outcomes: Sequence[Outcome]) -> tuple[Contradiction, ...]:
    """Return the pairs of rows whose peaks contradict each other.

    Compared are rows of one family and framework with the same microbatch, schedule and recomputation.  Where the one
    has a model no smaller in any size, on no more tensor ranks, its peak is at least the other's and the difference of
    their model states.  No prediction takes part in this.  Peaks of one certain rank are left out: uneven stages
    decide them.
    """
    groups: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.case is not None and outcome.row.measured.peak_gibibytes is not None and is_fullest(outcome.case):
            groups[_alike(outcome)].append(outcome)
    pairs = [(one, other) for group in groups.values() for one in group for other in group if one is not other]
    return tuple(found for one, other in pairs if (found := _contradiction(one, other)) is not None)


def _alike(outcome: Outcome) -> tuple[object, ...]:
    """What two rows must share to be compared."""
    run, case = outcome.row.run, outcome.case
    layout = case.layouts[0] if case else Layout()
    return (
        *(run.family, case and case.framework, run.sequence_length, run.microbatch, run.recompute, run.precision),
        *(run.expert, run.context, layout.pipeline, layout.chunks, layout.schedule, layout.zero),
        # ZeRO divides by them; without it they change nothing but a communicator.
        layout.data * layout.context if layout.zero else 0,
        layout.sequence_parallel if layout.tensor > 1 else None,
        min(layout.microbatches, 2 * layout.num_stages),
    )


def _contradiction(larger: Outcome, smaller: Outcome) -> Contradiction | None:
    one, other = larger.case, smaller.case
    ours, theirs = larger.row.measured.peak_gibibytes, smaller.row.measured.peak_gibibytes
    if one is None or other is None or ours is None or theirs is None:
        return None
    layout, beside = one.layouts[0], other.layouts[0]
    needs_more = all(mine >= its for mine, its in zip(_sizes(one.profile), _sizes(other.profile), strict=True))
    if not needs_more or layout.tensor > beside.tensor:
        return None
    least = theirs + (_states(one.profile, layout) - _states(other.profile, beside)) / _GIBI
    if ours >= least * (1 - _TOLERANCE):
        return None
    reason = (
        f"{one.run.model} with tensor {layout.tensor} took {ours:.1f} GiB where {other.run.model} with tensor"
        f" {beside.tensor} took {theirs:.1f}: at least {least:.1f} are needed"
    )
    return Contradiction(larger.row.run.index, smaller.row.run.index, reason)


def _sizes(profile: Profile) -> tuple[float, ...]:
    return len(profile.blocks), profile.hidden_size, profile.vocabulary_size, profile.num_parameters


def _states(profile: Profile, layout: Layout) -> float:
    """Bytes of weights, gradients and optimizer of a mean rank; what ZeRO shares out is left out."""
    each = 0.0 if layout.shards_gradients else float(layout.gradient_bytes)
    each += 0 if layout.shards_states else layout.master_bytes
    weights = 4 if layout.precision in ("fp32", "tf32") else 2
    each += weights if not layout.shards_weights else 0
    return each * profile.num_parameters / (layout.tensor * layout.pipeline)
