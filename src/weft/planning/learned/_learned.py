"""The corrections for this machine, with their source."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from weft.config.cluster import Cluster
from weft.formatting import format_number, format_percent, format_seconds
from weft.planning.learned._fit import corrections_of
from weft.planning.learned._runs import kept_runs, runs_path, usable
from weft.techniques.cost_terms import Calibration, Corrections


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What recorded runs of a machine say of its prices, and which runs these are."""

    corrections: Corrections = Corrections()
    num_runs: int = 0
    newest: float = 0.0
    """Time at which the newest of them ended, in seconds since 1970."""
    source: str = ""
    """The file that they are kept in."""
    note: str = ""
    """What is wrong with the file; empty where nothing is."""

    def calibration(self, base: Calibration) -> Calibration:
        """Return a calibration corrected by the runs; the same where there are none."""
        return replace(base, corrections=self.corrections) if self.num_runs else base

    def line(self, seconds: float, uncorrected: float) -> str:
        """Return the sentence on a predicted step: `corrected by 6 runs on this machine, …`; empty without runs."""
        if not self.num_runs:
            return ""
        runs = f"{self.num_runs} recorded run{'s' * (self.num_runs != 1)} of this machine"
        when = time.strftime("%d %b %Y", time.localtime(self.newest)).lstrip("0")
        spread = self.corrections.spread
        known = "" if spread is None else f" ± {format_percent(100 * spread)}"
        return (
            f"{format_seconds(seconds)}{known}, corrected by {runs}, the last of {when};"
            f" without them {format_seconds(uncorrected)}"
        )

    def parts(self, precision: str, cores: float) -> list[str]:
        """Return what each part of a step was corrected by, for ranks with so many cores."""
        known = self.corrections
        row, told = known.compute_of(precision, cores), list[str]()
        if row is not None:
            told.append(
                f"{precision} on {format_number(row.cores)} core{'s' * (row.cores != 1)} a rank: products"
                f" ×{row.products:.2f}, convolutions ×{row.convolutions:.2f}, data movement ×{row.plain:.2f},"
                f" ZeRO-3's copies ×{row.copies:.2f},"
                f" an operator +{format_seconds(row.operator_seconds)}"
            )
        collective, optimizer = format_seconds(known.collective_seconds), format_seconds(known.optimizer_seconds)
        told.append(
            f"communication ×{known.communication:.2f}, a collective +{collective}; optimizer ×{known.optimizer:.2f}"
            f" +{optimizer}; all else {format_seconds(known.step_seconds or 0.0)}"
        )
        return [*told, f"from {self.source}"]


NOTHING_LEARNED = Learned()
"""No runs: prices are as they were."""


def learned_here(cluster: Cluster, folder: Path | None = None) -> Learned:
    """Return what recorded runs of a machine say.  Only runs on cores are kept, under this torch and these formulas."""
    if cluster.has_accelerators or cluster.num_nodes > 1:
        return NOTHING_LEARNED
    runs, note = kept_runs(cluster, folder)
    runs = usable(runs)
    if not runs:
        return Learned(note=note)
    return Learned(
        corrections=corrections_of(runs),
        num_runs=len(runs),
        newest=max(run.ended for run in runs),
        source=str(runs_path(cluster, folder)),
        note=note,
    )
