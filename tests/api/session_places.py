"""Sessions of ranks that a launcher has started, in ranks of the pool: each makes the default group itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def as_launched(port: int, *, has_agent: bool = True) -> Generator[int]:
    """Leave the pool's group and be placed by the environment, as under torchrun; yields the rank.

    With an agent the store is the process's that started the ranks, else rank 0's.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": has_agent}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield rank
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def agent() -> Generator[int]:
    """A store of this process, as a launcher has one, until the end; yields its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
