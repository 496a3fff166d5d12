"""What the ranks of the launch tests run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pool
import torch
import torch.distributed as dist

from weft.comm.device import BackendKind
from weft.errors import CollectiveError, PlanError
from weft.run.launch import RankInfo, initialise_distributed


def add_up(rank_info: RankInfo, offset: int) -> dict[str, float]:
    with initialise_distributed("cpu", rank_info) as distributed:
        value = torch.tensor([float(distributed.rank + offset)])
        dist.all_reduce(value)
        return {"rank": distributed.rank, "sum": value.item(), "threads": torch.get_num_threads()}


def addresses(rank_info: RankInfo) -> list[str]:
    """Where this rank listens."""
    with initialise_distributed("cpu", rank_info):
        dist.barrier()
        return sorted(pool.listening_ports({os.getpid()}))


def fail_with_plan_error(rank_info: RankInfo) -> None:
    raise PlanError("tensor = 3 does not divide num_heads = 8. Use 1, 2, 4 or 8.")


def fail_on_rank_one(rank_info: RankInfo, kind: str) -> None:
    with initialise_distributed("cpu", rank_info):
        if rank_info.rank == 1:
            if kind == "error":
                raise ValueError("a long story\n" + "and more of it\n" * 40)
            if kind == "plan":
                raise PlanError("only here")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "exit":
                os._exit(9)
        dist.barrier()


def lose_rank_one(rank_info: RankInfo, folder: str, kind: str, backend: BackendKind) -> None:
    """Rank 1 fails.  Rank 2 waits for rank 0, which lives and does not come, in a group that has no rank 1."""
    begun = 0.0
    try:
        with initialise_distributed("cpu", rank_info, backend=backend) as distributed:
            group = dist.new_group([0, 2])
            dist.barrier()
            begun = time.monotonic()
            if rank_info.rank == 1:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise PlanError("only here")
            if rank_info.rank == 2:
                dist.all_reduce(torch.ones(3), group=group)
            while distributed.rank_failure is None:
                time.sleep(0.01)
            dist.all_reduce(torch.ones(3), group=group)
    except CollectiveError as error:
        (Path(folder) / f"rank{rank_info.rank}").write_text(f"{time.monotonic() - begun:.3f} {error}")
        raise


def wait_for_a_stopped_rank(rank_info: RankInfo) -> None:
    with initialise_distributed("cpu", rank_info, timeout_seconds=1.0):
        if rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()


def hang_after_failure(rank_info: RankInfo) -> None:
    if rank_info.rank == 1:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def no_json(rank_info: RankInfo) -> object:
    return object()


def print_rank(rank_info: RankInfo) -> None:
    print("hello from", rank_info.rank, flush=True)
    print("trouble on", rank_info.rank, file=sys.stderr)


def write_pid_and_wait(rank_info: RankInfo, folder: str, stubborn: bool = False) -> str:
    """Wait for SIGINT; when stubborn, for ever."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    (Path(folder) / f"pid{rank_info.rank}").write_text(str(os.getpid()))
    while stubborn or not received:
        time.sleep(0.01)
    time.sleep(0.3)  # a second signal would arrive now
    return ",".join(map(str, received))


def where_from(rank_info: RankInfo) -> dict[str, str | int]:
    """Who forked this rank's parent, where it works, and on how many threads."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    fork_server = int(stat.rpartition(")")[2].split()[1])
    return {
        "fork_server": fork_server,
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "rank": rank_info.rank,
    }
