"""`weft check` on the ranks of the pool, which have imported everything: a run costs no fresh processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from pool import RankPool

from weft.api.training.check import Launch
from weft.run.launch import RankInfo
from weft.verify.numerics._check_rank import run_rank


def on_ranks(ranks: RankPool) -> Launch:
    """What `check_by` starts its ranks with."""

    def launch(arguments: dict[str, Any], world_size: int, meanwhile: Callable[[], object]) -> object:
        meanwhile()
        return ranks.run(world_size, _run_rank, arguments, timeout=300.0)  # two or three trials in one run

    return launch


def _run_rank(arguments: dict[str, Any]) -> None:
    known = set(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    run_rank(RankInfo(rank, world, rank, world), **arguments)
    for name in [name for name in os.environ if "TORCHINDUCTOR" in name and name not in known]:
        del os.environ[name]
