"""A rank that dies, stops or is late, in every phase of a group's life and of a call: all survivors get the named error
in time, nobody goes on waiting, nothing is left, and the survivors of a death form a new group."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import RankError, RankPool
from shared_memory_phases import (
    DEADLINE_SECONDS,
    FORMING,
    VICTIM,
    Told,
    call_with_a_victim,
    form_with_a_victim,
    heard,
    pause_within_the_deadline,
)

from weft.comm._process import Process
from weft.comm.rendezvous import Rendezvous
from weft.errors import CollectiveError

WEFT = "cpu:weft"
WORLD = 3
SURVIVORS = (0, 2)
DEEDS = ("killed", "stopped", "late")
STAGED = ("asynchronous all_reduce", "reduce_scatter", "all_gather", "all_to_all")
ENGINE_PHASES = [
    *(("entry", deed, "all_reduce") for deed in DEEDS),
    *(("middle", deed, "all_reduce") for deed in DEEDS),
    *(("middle", deed, operation) for operation in STAGED for deed in DEEDS[:2]),
    *(("summing", deed, "all_reduce in place") for deed in DEEDS[:2]),
    *(("between phases", deed, "all_reduce") for deed in DEEDS[:2]),
    *(("end", deed, "all_reduce") for deed in DEEDS[:2]),
    *(("before it leaves", deed, "all_reduce") for deed in DEEDS),
]


def judge(told: Told, deed: str, deadline: float, *, doing: str) -> None:
    """What a survivor must have seen."""
    if deed == "killed":
        assert f"the process of rank {VICTIM} has died" in told.text
        assert told.seconds <= 1.0
        assert 0 < told.rebuilt_seconds <= 1.0, "the survivors formed their new group too late"
    else:
        assert f"{deadline:g} s" in told.text
        assert f"rank {VICTIM} has not come" in told.text
        assert deadline - 0.1 <= told.seconds <= deadline + 1.0
    assert doing in told.text
    assert told.closing_seconds <= 1.0
    assert told.left == ""


def run(ranks: RankPool, deed: str, *job: object) -> None:
    """A killed rank is what the pool says of the run; whoever was only stopped or late ends well."""
    died = pytest.raises((RankError, CollectiveError), match=f"rank {VICTIM}")
    with died if deed == "killed" else contextlib.nullcontext():
        ranks.run(WORLD, *job, backend=WEFT)  # type: ignore[arg-type]


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("phase", FORMING)
def test_forming_a_group(ranks: RankPool, tmp_path: Path, phase: str, deed: str) -> None:
    run(ranks, deed, form_with_a_victim, str(tmp_path), phase, deed, True)
    for rank in SURVIVORS:
        judge(heard(tmp_path, rank), deed, DEADLINE_SECONDS, doing="The group of ranks 0, 1, 2")
    if deed != "killed":
        assert f"rank {VICTIM} has not come" in heard(tmp_path, VICTIM).text, "who comes late is told so"
        assert heard(tmp_path, VICTIM).left == ""


@pytest.mark.parametrize("deed", DEEDS)
def test_forming_a_group_without_the_engine(ranks: RankPool, tmp_path: Path, deed: str) -> None:
    run(ranks, deed, form_with_a_victim, str(tmp_path), "once it has mapped", deed, False)
    for rank in SURVIVORS:
        judge(heard(tmp_path, rank), deed, DEADLINE_SECONDS, doing="The group of ranks 0, 1, 2")


@pytest.mark.parametrize(("phase", "deed", "operation"), ENGINE_PHASES)
def test_a_call(ranks: RankPool, tmp_path: Path, phase: str, deed: str, operation: str) -> None:
    run(ranks, deed, call_with_a_victim, str(tmp_path), phase, deed, operation)
    name = operation.removeprefix("asynchronous ").partition(" ")[0].replace("_", "-").capitalize()
    deadline = DEADLINE_SECONDS + (0.6 if phase == "between phases" else 0.0)
    for rank in SURVIVORS:
        judge(heard(tmp_path, rank), deed, deadline, doing=name)
    if deed != "killed" and phase not in ("before it leaves", "summing"):  # in place it had all it needs to finish
        assert f"rank {VICTIM} has not come" in heard(tmp_path, VICTIM).text, "who comes late is told so"
        assert heard(tmp_path, VICTIM).left == ""


@pytest.mark.parametrize("deed", DEEDS)
def test_a_rank_that_has_left(ranks: RankPool, tmp_path: Path, deed: str) -> None:
    """Whatever becomes of it afterwards, the others are told at once that it has left."""
    run(ranks, deed, call_with_a_victim, str(tmp_path), "once it has left", deed, "all_reduce")
    for rank in SURVIVORS:
        told = heard(tmp_path, rank)
        assert f"rank {VICTIM} has left the group" in told.text
        assert told.seconds <= 1.0
        assert told.closing_seconds <= 1.0
        assert told.left == ""


@pytest.mark.parametrize("turns", [1, 5])
def test_a_short_pause_is_no_failure(ranks: RankPool, turns: int) -> None:
    assert ranks.run(WORLD, pause_within_the_deadline, turns, backend=WEFT) == [float(WORLD)] * WORLD


_HOST = """
import sys, time, torch.distributed as dist
from weft.comm._process import Process
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, Process.own().describe(), flush=True)
time.sleep(60)
"""


def test_the_rank_that_holds_the_store_dies() -> None:
    """Nothing can be heard or said any more, and still it is named."""
    host = subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port, _, card = host.stdout.readline().partition(" ")
        store = dist.TCPStore("127.0.0.1", int(port), wait_for_workers=False)
        roll = Rendezvous(store, rank=1, ranks=(0, 1), seconds=30, processes={0: Process.read(card)})
        roll.say("here", "1")
        host.kill()
        start = time.monotonic()
        with pytest.raises(CollectiveError, match="ranks 0, 1 cannot be formed: the process of rank 0 has died"):
            roll.hear("here", 0)
        assert time.monotonic() - start <= 1.0
    finally:
        host.kill()
        host.wait()
        if host.stdout is not None:
            host.stdout.close()
