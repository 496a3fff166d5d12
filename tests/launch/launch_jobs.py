"""What the ranks of the launch tests run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pool
from weft.errors import PlanError
from weft.launch import Place, initialise_distributed


def add_up(place: Place, offset: int) -> dict[str, float]:
    with initialise_distributed("cpu", place) as distributed:
        value = torch.tensor([float(distributed.rank + offset)])
        dist.all_reduce(value)
        return {"rank": distributed.rank, "sum": value.item(), "threads": torch.get_num_threads()}


def addresses(place: Place) -> list[str]:
    """Where this rank listens, in hexadecimal as the kernel writes it."""
    with initialise_distributed("cpu", place):
        dist.barrier()
        return sorted(pool.listening_ports({os.getpid()}))


def fail_with_plan_error(place: Place) -> None:
    raise PlanError("tensor = 3 does not divide num_heads = 8. Use 1, 2, 4 or 8.")


def fail_on_rank_one(place: Place, kind: str) -> None:
    with initialise_distributed("cpu", place):
        if place.rank == 1:
            if kind == "error":
                raise ValueError("a long story\n" + "and more of it\n" * 40)
            if kind == "plan":
                raise PlanError("only here")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "exit":
                os._exit(9)
        dist.barrier()


def hang_after_failure(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def no_json(place: Place) -> object:
    return object()


def print_rank(place: Place) -> None:
    print("hello from", place.rank, flush=True)
    print("trouble on", place.rank, file=sys.stderr)


def write_pid_and_wait(place: Place, folder: str, stubborn: bool = False) -> str:
    """Wait for SIGINT; when stubborn, for ever."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    (Path(folder) / f"pid{place.rank}").write_text(str(os.getpid()))
    while stubborn or not received:
        time.sleep(0.01)
    time.sleep(0.3)  # a second signal would arrive now
    return ",".join(map(str, received))
