"""All checks of a run, in one list: what each says, and in which order a user reads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from weft.watch.doctor import health_checks, speed_checks
from weft.watch.doctor.run_case import RunCase
from weft.watch.verdicts import RunVerdict

RunCheck = Callable[[RunCase], Iterator[RunVerdict]]
"""A check yields what it finds, and nothing where all is well or too little is known."""

CHECKS: tuple[RunCheck, ...] = (
    health_checks.failures,
    health_checks.slow_saves,
    health_checks.diverging_loss,
    health_checks.growing_memory,
    health_checks.unused_experts,
    health_checks.poor_convergence,
    speed_checks.busy_machine,
    speed_checks.live_verdicts,
    speed_checks.slow_links,
    speed_checks.tiny_microbatches,
    speed_checks.unused_precision,
    speed_checks.wrong_peak,
)

_FIRST = ("out_of_memory", "hang", "not_finite", "diverging", "failures", "failed_saves")
"""Kinds that stop or spoil a run; they stand before what only costs time."""


def examine_run(case: RunCase) -> list[RunVerdict]:
    """Return what is wrong with a run: what stops it first, then by seconds per step; empty where nothing was found.
    Called by `weft doctor RUN`."""
    with warnings.catch_warnings():
        # Medians over ranks of which nothing was recorded are nan, which no check takes for a fault.
        warnings.filterwarnings("ignore", "All-NaN|Mean of empty", RuntimeWarning)
        found = [finding for check in CHECKS for finding in check(case)]
    return sorted(found, key=lambda finding: (finding.kind not in _FIRST, -finding.seconds))
