"""How well published runs were predicted when the constants were fitted: a few figures that ship with Weft."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from weft.published._validate import Validation

_ACCURACY = Path(__file__).parent / "data" / "accuracy.toml"
_FEW = 8
"""A family with fewer timed rows is not called the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of predictions of families that had no part in the fit."""

    rows: int
    """Published runs, predicted or refused."""
    families: int
    median: float
    """Of |predicted / measured - 1|, the median over families of their medians."""
    p90: float
    worst_family: str
    worst_median: float
    memory_mean: float
    largest_parameters: float
    """Of any model among them."""
    most_devices: int

    @property
    def line(self) -> str:
        """One line for people."""
        return (
            f"on {self.rows:,} published runs: median {self.median:.1%}, nine of ten within {self.p90:.0%},"
            f" worst source {self.worst_family} {self.worst_median:.0%}; memory {self.memory_mean:.1%}; nothing above"
            f" {self.largest_parameters / 1e9:,.0f}B parameters or {self.most_devices:,} devices was seen"
        )


def accuracy() -> Accuracy:
    """Return the figures that ship with Weft."""
    return Accuracy(**tomllib.loads(_ACCURACY.read_text(encoding="utf-8")))


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
