"""The floor that any planner must beat: one utilization per device and precision, and the exact bubble."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.published._cases import Case
from benchmarks.published._measure import peak_flops, step_flops


@dataclass(frozen=True, slots=True)
class Floor:
    """Share of peak by device and precision."""

    shares: Mapping[tuple[str, str], float]
    other: float

    def seconds(self, case: Case) -> float | None:
        """Predict the step of a case."""
        ideal = ideal_seconds(case)
        return None if ideal is None else ideal / self.shares.get(_key(case), self.other)


def floor_of(cases: Sequence[Case], measured: Sequence[float]) -> Floor:
    """Return the median share of peak of cases by device and precision, each family weighing the same in it."""
    shares: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, seconds in zip(cases, measured, strict=True):
        ideal = ideal_seconds(case)
        if ideal is not None:
            shares[_key(case)][case.run.family].append(ideal / seconds)
    by_key = {key: median([median(found) for found in families.values()]) for key, families in shares.items()}
    return Floor(by_key, median(by_key.values()) if by_key else 0.4)


def ideal_seconds(case: Case) -> float | None:
    """Return the step at the device's peak, with recomputation and the bubble of the schedule."""
    layout = case.layouts[0]
    kinds = (layout.recompute,) if isinstance(layout.recompute, str) else layout.recompute
    share = kinds.count("full") / len(kinds)
    plain = step_flops(case.profile, case.run, "full")
    again = step_flops(case.profile, case.run, "full", recomputed=True)
    if plain is None or again is None:
        return None
    flops = plain + share * (again - plain)
    seconds = flops / (peak_flops(case.cluster, layout.precision) * case.cluster.num_devices)
    bubble = (layout.pipeline - 1) / (layout.chunks * layout.microbatches)
    return seconds * (1 + bubble) if math.isfinite(seconds) else None


def _key(case: Case) -> tuple[str, str]:
    return case.cluster.kinds[0], str(case.layouts[0].precision)
