"""The mean time between failures that snapshots go by: an assumption that gives way to what is seen."""

from __future__ import annotations

import time

import pytest

from weft.run.launch import FAILURE_SECONDS
from weft.run.supervise import FailureRate


def test_it_begins_with_an_assumption_and_learns() -> None:
    rate = FailureRate()
    assert rate.mean_seconds == pytest.approx(FAILURE_SECONDS, abs=1)
    rate.count()
    assert rate.mean_seconds == pytest.approx(FAILURE_SECONDS / 11, abs=1)  # where one has come the next is near
    for _ in range(5):
        rate.count()
    assert rate.mean_seconds == pytest.approx(FAILURE_SECONDS / 61, abs=1)


def test_time_without_failures_counts() -> None:
    rate = FailureRate()
    before = rate.mean_seconds
    time.sleep(0.05)
    assert rate.mean_seconds >= before + 0.04
