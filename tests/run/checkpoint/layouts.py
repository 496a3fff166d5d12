"""Ways to spread tensors over ranks, as plans do, for tests that save under one and load under another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from weft.run.checkpoint import Peers
from weft.techniques.core import CheckpointShard, NestedSplit, Split

T = TypeVar("T")


@dataclass(frozen=True)
class Cut:
    """How one tensor is spread: split over `parts` ranks, each part cut into flat runs over `len(bounds) + 1` ranks."""

    dim: int = 0
    parts: int = 1
    blocks: int = 1
    bounds: tuple[float, ...] = ()
    """Where the flat runs end, as shares of the part, ascending."""
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.parts * (len(self.bounds) + 1) * self.replicas


def shards_of(name: str, whole: Tensor, cut: Cut, rank: int, *, filled: bool) -> list[CheckpointShard]:
    """Return rank's shards of a tensor, holding its values or zeros; ranks beyond the cut have none."""
    if rank >= cut.world:
        return []
    runs = len(cut.bounds) + 1
    index, run, replica = rank // (runs * cut.replicas), rank // cut.replicas % runs, rank % cut.replicas
    split = NestedSplit((Split(dim=cut.dim, parts=cut.parts, index=index, blocks=cut.blocks),) if cut.parts > 1 else ())
    local = split.slice(whole).reshape(-1)
    ends = [0, *(round(bound * local.numel()) for bound in cut.bounds), local.numel()]
    part = local[ends[run] : ends[run + 1]].clone()
    tensor = part if filled else torch.zeros_like(part)
    return [
        CheckpointShard(name=name, shape=whole.shape, tensor=tensor, split=split, start=ends[run], counts=replica == 0)
    ]


class ThreadRanks:
    """Ranks as threads of this process: `run(world, job)` calls job(peers) for each and returns the results by rank."""

    def run(self, world: int, job: Callable[[Peers], T]) -> list[T]:
        barrier = threading.Barrier(world)
        slots: list[list[int]] = [[] for _ in range(world)]

        def minimum_of(rank: int) -> Callable[[list[int]], list[int]]:
            def minimum(values: list[int]) -> list[int]:
                slots[rank] = values
                barrier.wait(timeout=30)
                lowest = [min(column) for column in zip(*slots, strict=True)]
                barrier.wait(timeout=30)
                return lowest

            return minimum

        with ThreadPoolExecutor(world) as pool:
            futures = [pool.submit(job, Peers(rank, world, minimum_of(rank))) for rank in range(world)]
            return [future.result() for future in futures]


def one_shard(name: str, tensor: Tensor) -> CheckpointShard:
    return CheckpointShard(name=name, shape=tensor.shape, tensor=tensor.reshape(-1).clone())


def values(shards: Sequence[CheckpointShard]) -> dict[str, list[float]]:
    return {shard.name: shard.tensor.tolist() for shard in shards}
