"""The figures of a cross-validation that ship with the fitted constants."""

from __future__ import annotations

import dataclasses

from benchmarks.published._validate import Validation
from weft.planning.price import Accuracy

_FEW = 8
"""A family with fewer timed rows is not called the worst."""


def accuracy_of(validation: Validation) -> Accuracy:
    """Return the figures of a cross-validation.  It must have timed rows and memory."""
    score = validation.score
    timed = [outcome for outcome in validation.outcomes if outcome.is_timed and outcome.case is not None]
    large = [family for family in score.families if family.time and family.time.count >= _FEW]
    worst = max(large, key=lambda family: family.time.median if family.time else 0.0)
    return Accuracy(
        rows=len(validation.outcomes),
        families=sum(family.time is not None for family in score.families),
        median=score.over_families(lambda family: family.time and family.time.median) or 0.0,
        p90=score.over_families(lambda family: family.time and family.time.p90) or 0.0,
        worst_family=worst.family,
        worst_median=worst.time.median if worst.time else 0.0,
        memory_mean=score.over_families(lambda family: family.memory and family.memory.mean) or 0.0,
        largest_parameters=max(outcome.case.profile.num_parameters for outcome in timed if outcome.case),
        most_devices=max(outcome.case.cluster.num_devices for outcome in timed if outcome.case),
    )


def dump_accuracy(accuracy: Accuracy) -> str:
    """Return the TOML that ships: four digits of every figure."""
    lines = ["# Written by `python -m benchmarks.planner report`; do not edit."]
    for name, value in dataclasses.asdict(accuracy).items():
        spelled = f'"{value}"' if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"{name} = {spelled}")
    return "\n".join(lines) + "\n"
