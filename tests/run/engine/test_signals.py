"""Stopping when asked, on all ranks at one step."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.run.engine import StopRequest
from weft.run.launch import HAND_OVER


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_remembered_and_handlers_are_put_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with StopRequest(announce=True) as stop:
        assert stop.flag == 0.0
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.flag == 1.0
        assert stop.reason == number.name
        os.kill(os.getpid(), number)  # the same request, passed on by a launcher
    assert signal.getsignal(number) is before
    assert f"{number.name}: stopping after this step and saving" in capfd.readouterr().err


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_further_ctrl_c_stops_at_once_and_a_further_sigterm_does_not(
    monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), first)
        later = time.monotonic() + 5
        monkeypatch.setattr(time, "monotonic", lambda: later)
        os.kill(os.getpid(), signal.SIGTERM)  # job engines send it twice, and this rank may be saving
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_a_person_comes_before_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(HAND_OVER)
    with StopRequest() as stop:
        os.kill(os.getpid(), HAND_OVER)
        assert stop.signal_number == HAND_OVER
        later = time.monotonic() + 5
        monkeypatch.setattr(time, "monotonic", lambda: later)
        os.kill(os.getpid(), signal.SIGINT)  # the first Ctrl-C: it saves
        assert stop.signal_number == signal.SIGINT
    os.kill(os.getpid(), HAND_OVER)  # one that comes late kills nobody
    signal.signal(HAND_OVER, before)


def test_outside_the_main_thread_only_the_program_can_ask() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = list[object]()

    def run() -> None:
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            stop.request()
            seen.extend([stop.flag, stop.reason])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, 1.0, "the program asked to stop"]


def steps_until_agreed(asked: int, at_step: int) -> tuple[int, str]:
    """Train nothing, 50 times; one rank is asked to stop in the middle of a step."""
    with StopRequest() as stop:
        for step in range(1, 51):
            if dist.get_rank() == asked and step == at_step:
                os.kill(os.getpid(), signal.SIGTERM)
            sums = torch.tensor([1.0, stop.flag])  # as the engine's one all-reduce per step
            dist.all_reduce(sums)
            if sums[1] > 0:
                return step, stop.reason
    return 50, "nobody"


def test_all_ranks_stop_at_one_step(ranks: RankPool) -> None:
    results = ranks.run(3, steps_until_agreed, 1, 7)
    assert [step for step, _ in results] == [7, 7, 7]
    assert [reason for _, reason in results] == [
        "another rank was asked to stop",
        "SIGTERM",
        "another rank was asked to stop",
    ]
