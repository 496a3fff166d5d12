"""How well published runs were predicted when the constants were fitted: a few figures that ship beside them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of predictions for sources that had no part in the fit; an error is |predicted / measured - 1|."""

    rows: int
    """Published runs, predicted or refused."""
    families: int
    """Sources with measured times."""
    median: float
    """Median error of the step time: the median over sources of their medians."""
    p90: float
    """Error of the step time that nine of ten runs stay below: the median over sources."""
    worst_family: str
    """Source with the largest median error of the step time."""
    worst_median: float
    """Median error of that source."""
    memory_mean: float
    """Mean error of the peak memory: the median over sources."""
    largest_parameters: float
    """Parameters of the largest model among the runs."""
    most_devices: int
    """Devices of the largest run."""

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
    return Accuracy(**tomllib.loads((Path(__file__).parent / "accuracy.toml").read_text(encoding="utf-8")))
