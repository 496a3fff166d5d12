"""Making the backend known to torch, and making its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.shared_memory._group import SharedMemoryGroup
from weft.comm.shared_memory._meeting import Meeting
from weft.comm.shared_memory._process import Process
from weft.comm.shared_memory._roll import RollCall

BACKEND = "weft"


def register_shared_memory_backend(*, use_engine: bool = True) -> None:
    """Let `init_process_group("cpu:weft")` and `new_group(backend="weft")` work in this process.

    No collective; on every rank before such a group is made.  Twice is as good as once.  `use_engine=False`: as if the
    C++ engine had not been built.

    A group whose ranks cannot share memory (they are on several hosts, or in containers of their own) is plain Gloo.
    Which of the three it became, the engine, pure Python or Gloo, is settled by all ranks alike; what is slower than it
    could be is said once, on rank 0.
    """
    create = partial(_create, use_engine=use_engine)
    if BACKEND in dist.Backend.backend_list:
        # torch refuses a second registration; the last one given is to hold.
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(create, True)  # pyright: ignore[reportPrivateUsage]
        return
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def shared_memory_group(group: dist.ProcessGroup | None) -> SharedMemoryGroup | None:
    """The group as one over shared memory; None where something else carries it."""
    return group if isinstance(group, SharedMemoryGroup) else None


def _create(options: Any, _: object, *, use_engine: bool) -> Any:
    """What torch calls on every rank of a new group."""
    rank, ranks = options.group_rank, list(options.global_ranks_in_group)
    num_ranks = options.group_size
    ranks = ranks or list(range(num_ranks))  # torch names none for the default group
    roll = RollCall(
        dist.PrefixStore("roll", options.store),
        rank=rank,
        ranks=ranks,
        seconds=options.timeout.total_seconds(),
        processes=_known(ranks),
    )
    roll.begin()
    store = dist.PrefixStore("gloo", options.store)
    gloo = roll.during("gloo", lambda: dist.ProcessGroupGloo(store, rank, num_ranks, options.timeout))
    gloo._set_sequence_number_for_group()
    local = dist.get_world_size() if dist.is_initialized() else num_ranks
    meeting = Meeting(
        roll=roll,
        rank=rank,
        num_ranks=num_ranks,
        num_local_ranks=max(local, num_ranks),
        speaks=ranks[rank] == 0,
        use_engine=use_engine,
    )
    transport = meeting.settle()
    if transport is None:
        # torch takes a whole group here, as it stands; one that is Gloo alone lacks nothing of torch's own.
        plain = dist.ProcessGroup(rank, num_ranks)  # pyright: ignore[reportCallIssue, reportArgumentType]  # see _group
        plain._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        plain._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return plain
    processes = {ranks[position]: process for position, process in roll.processes.items()}
    return SharedMemoryGroup(transport, gloo, rank=rank, ranks=ranks, timeout=options.timeout, processes=processes)


def _known(ranks: Sequence[int]) -> Mapping[int, Process]:
    """Processes, by position, of those ranks that this one met when the default group was formed."""
    default = shared_memory_group(dist.group.WORLD) if dist.is_initialized() else None
    met = default.processes if default is not None else {}
    return {position: met[rank] for position, rank in enumerate(ranks) if rank in met}
