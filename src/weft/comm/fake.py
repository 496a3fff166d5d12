"""A world of which only one rank exists: its collectives return at once and carry nothing."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def fake_world(rank: int, world_size: int) -> Generator[None]:
    """Be rank `rank` of `world_size` for a while, in a process that has joined no group.

    For dry runs: groups of any size are made at once, sends go nowhere, and receives leave their buffer as it is.
    The backend is torch's own `fake`, registered by a module that torch keeps for its tests (2.11 to 2.13).
    """
    assert not dist.is_initialized(), "a dry run needs a process that has joined no group"
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch wraps it, to print the rank before every line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def group_of(argument: object) -> dist.ProcessGroup:
    """Return the process group inside an argument of an operator of torch's `c10d` namespace."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    assert isinstance(argument, torch.ScriptObject), f"{type(argument).__name__} holds no process group"
    return dist.ProcessGroup.unbox(argument)
