"""Every algorithm with a rank that is killed, stopped or late, at its first, middle and last message.

Each algorithm meets all faults and all phases, and each fault all phases; not all three of everything.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool, listening_ports

from weft.comm.algorithms import Arrangement, flat
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.comm.watched_group import WATCHED_GLOO, WatchedGroup, register_watched_backend
from weft.errors import CollectiveError

DEADLINE = 1.5
SLACK = 2.5
"""Of a busy machine."""
PATIENT = 30.0
VICTIM = 2
FAULTS = ("killed", "stopped", "late")
PHASES = ("first", "middle", "last")
WAYS = (
    ("ring", "reduce_scatter"), ("recursive_doubling", "all_reduce"), ("torus", "all_reduce"), ("bruck", "all_to_all"),
    ("parameter_server", "all_reduce"), ("double_ring", "all_gather"), ("halving_doubling", "all_reduce"),
    ("direct", "reduce_scatter"), ("one_shot", "all_reduce"), ("tree", "broadcast"), ("double_tree", "all_reduce"),
    ("recursive_doubling", "all_gather"), ("scatter", "broadcast"), ("hierarchical", "all_to_all"),
    ("double_ring", "all_reduce"), ("torus", "broadcast"), ("bruck", "all_reduce"),
)  # fmt: skip
CASES = [
    (*way, fault, PHASES[(index + turn) % 3]) for index, way in enumerate(WAYS) for turn, fault in enumerate(FAULTS)
]


def place() -> Arrangement:
    return flat(4, nodes=(2, 2))


class Struck:
    """A group to whose rank something happens before a message that it sends or takes."""

    def __init__(self, plain: dist.ProcessGroup) -> None:
        self._plain = plain
        self._left = -1
        self._strike: Callable[[], object] = int

    def before(self, number: int, strike: Callable[[], object]) -> None:
        """The so-manyth message from now on."""
        self._left, self._strike = number, strike

    def send(self, *args: Any) -> dist.Work:
        return self._passed_on("send", *args)

    def recv(self, *args: Any) -> dist.Work:
        return self._passed_on("recv", *args)

    def _passed_on(self, name: str, *args: Any) -> dist.Work:
        if self._left == 0:
            self._strike()
        self._left -= 1
        return getattr(self._plain, name)(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def message_of(phase: str, messenger: Messenger, tensor: torch.Tensor, kind: str, name: str) -> int:
    options = {"arrangement": place(), "pieces": 4, "servers": 3}
    prepared, _ = messenger._prepared(tensor, kind, name, options)  # type: ignore[arg-type]
    total = sum(message.peer != VICTIM for act in prepared.steps for message in (*act.sends, *act.receives))
    return {"first": 0, "middle": total // 2, "last": total - 1}[phase]


def take_part(name: str, kind: str, fault: str, phase: str, folder: Path) -> tuple[float, str]:
    """Seconds until the error, and its text; this rank may be the victim."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2, 3], backend=WATCHED_GLOO)
    assert isinstance(group, WatchedGroup)
    struck = Struck(group.plain)
    group.plain = struck  # type: ignore[assignment]
    tensor = torch.ones(4096)
    with Messenger(GroupView((0, 1, 2, 3), rank, group), timeout_seconds=PATIENT) as messenger:
        run = partial(messenger.run, tensor, arrangement=place(), pieces=4)
        run(kind, name, servers=3)  # type: ignore[arg-type]
        run("all_reduce", "ring")
        dist.barrier()
        if rank == VICTIM:
            (folder / "victim").write_text(str(os.getpid()))
            strikes = {"killed": partial(os.kill, os.getpid(), 9), "stopped": partial(os.kill, os.getpid(), 19)}
            strike = strikes.get(fault, partial(time.sleep, DEADLINE + 0.5))
            struck.before(message_of(phase, messenger, tensor, kind, name), strike)
        start = time.monotonic()
        try:
            run(kind, name, servers=3, timeout_seconds=DEADLINE)  # type: ignore[arg-type]
            run("all_reduce", "ring", timeout_seconds=DEADLINE)  # who was done with the first is caught here
        except CollectiveError as error:
            return time.monotonic() - start, str(error)
        raise AssertionError("nobody was missed")


def survive(name: str, kind: str, fault: str, phase: str, folder: str) -> None:
    register_watched_backend()
    rank = dist.get_rank()
    threads, ports = threading.active_count(), listening_ports({os.getpid()})
    seconds, text = take_part(name, kind, fault, phase, Path(folder))
    dist.destroy_process_group()
    stop = time.monotonic() + SLACK
    while (more := left_behind(threads, ports)) != (0, []) and time.monotonic() < stop:
        gc.collect()
        time.sleep(0.02)
    (Path(folder) / f"rank{rank}").write_text(json.dumps([seconds, text, more]))
    if rank == 0 and fault == "stopped":
        others = [Path(folder) / f"rank{other}" for other in (1, 3)]
        while not all(path.exists() for path in others) and time.monotonic() < stop + SLACK:
            time.sleep(0.02)
        os.kill(int((Path(folder) / "victim").read_text()), signal.SIGKILL)


def left_behind(threads: int, ports: set[str]) -> tuple[int, list[str]]:
    return max(0, threading.active_count() - threads), sorted(listening_ports({os.getpid()}) - ports)


@pytest.mark.parametrize(("name", "kind", "fault", "phase"), CASES, ids=["-".join(case) for case in CASES])
def test_every_survivor_names_the_missing_rank_and_leaves_nothing(
    ranks: RankPool, name: str, kind: str, fault: str, phase: str, tmp_path: Path
) -> None:
    if fault == "late":
        ranks.run(4, survive, name, kind, fault, phase, str(tmp_path), timeout=60)
        _, text, left = json.loads((tmp_path / f"rank{VICTIM}").read_text())
        assert f"this rank ({VICTIM}) came too late. rank" in text, text
        assert left == [0, []]
    else:
        with pytest.raises(RankError, match=f"rank {VICTIM} died with exit code -9"):
            ranks.run(4, survive, name, kind, fault, phase, str(tmp_path), timeout=60)
    for rank in (0, 1, 3):
        seconds, text, left = json.loads((tmp_path / f"rank{rank}").read_text())
        assert re.search(rf"\w+ of 16,384 bytes by \w+ over 4 ranks: rank {VICTIM} ", text), text
        assert left == [0, []], "threads and listening ports"
        assert seconds < (DEADLINE if fault != "killed" else 0) + SLACK
