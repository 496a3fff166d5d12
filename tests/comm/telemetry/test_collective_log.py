"""Collectives of a step, summed by axis."""

from __future__ import annotations

import threading
import time

import pytest

from weft.comm.telemetry import CollectiveLog
from weft.comm.trace_event import TraceEvent


def _seen(axis: str, num_bytes: int = 8) -> TraceEvent:
    return TraceEvent(axis, "all_reduce", num_bytes)


def _waited(seen: TraceEvent, seconds: float = 0.0) -> TraceEvent:
    entered = seen.enter_wait()
    time.sleep(seconds)
    seen.exit_wait(entered)
    return seen


def test_sums_are_of_what_ended_in_the_step() -> None:
    log = CollectiveLog()
    ended, under_way = _seen("data", 100), _seen("data", 50)
    for seen in (ended, under_way, _waited(_seen("tensor", 7))):
        log.add(seen)
    _waited(ended, 0.02)
    sums = log.end_step()
    assert list(sums) == ["data", "tensor"]
    assert (sums["data"].count, sums["data"].num_bytes) == (1, 100)
    assert 0.02e9 <= sums["data"].exposed_ns <= sums["data"].total_ns
    assert log.under_way() == [under_way]
    under_way.done()  # nobody waited, but it is known to be over
    assert log.end_step()["data"].num_bytes == 50
    assert log.end_step() == {}
    assert [seen.num_bytes for seen in log.latest()] == [100, 50, 7]


def test_an_end_that_nobody_observed_is_a_bound() -> None:
    seen = _seen("data")
    time.sleep(0.01)
    seen.exit_wait(seen.enter_wait(is_over=True))
    assert not seen.is_done_exact
    assert seen.done_ns == seen.wait_entered_ns
    seen.done(seen.launched_ns + 5)
    assert seen.is_done_exact
    assert seen.total_ns == 5
    log = CollectiveLog()
    log.add(_waited(_seen("data")))
    log.add(seen)
    assert log.end_step()["data"].inexact_count == 0


def test_what_nobody_waits_for_does_not_pile_up() -> None:
    log = CollectiveLog(keep=10)
    log.add(_waited(_seen("data")))
    for _ in range(100):
        log.add(_seen("data"))
    assert len(log.under_way()) <= 11
    assert log.lost + len(log.under_way()) == 100
    assert log.end_step()["data"].count == 1


@pytest.mark.parametrize("num_threads", [4])
def test_threads_may_add_while_a_step_ends(num_threads: int) -> None:
    log = CollectiveLog()

    def add() -> None:
        for _ in range(500):
            log.add(_waited(_seen("data")))

    threads = [threading.Thread(target=add) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    total = 0
    while any(thread.is_alive() for thread in threads):
        total += sum(sums.count for sums in log.end_step().values())
    total += sum(sums.count for sums in log.end_step().values())
    assert total == 500 * num_threads
    assert log.lost == 0
