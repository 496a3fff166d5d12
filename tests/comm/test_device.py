"""The one file that knows devices."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.comm.device import (
    all_gather_single,
    backend_for,
    device_for_rank,
    memory_bytes,
    peak_memory_bytes,
    ranks_share_device,
    reduce_scatter_single,
    runs_on_gloo,
)
from weft.errors import ClusterError

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_the_cpu_is_taken_and_asking_for_one_is_an_error() -> None:
    assert device_for_rank("auto", 5) == CPU
    with pytest.raises(
        ClusterError, match=r'device = "cuda", but this machine has no accelerator .* Use device = "auto"'
    ):
        device_for_rank("cuda", 0)


def test_the_cpu_is_served_by_shared_memory() -> None:
    assert device_for_rank("cpu", 0) == CPU
    assert backend_for(CPU) == "cpu:weft"
    assert not ranks_share_device(CPU, 8)


def test_shared_memory_is_for_the_cpu() -> None:
    assert backend_for(CPU, wanted="gloo") == "gloo"
    assert backend_for(CPU, wanted="weft") == "cpu:weft"
    with pytest.raises(ClusterError, match=r'backend = "weft", but the ranks compute on cuda.* Use backend = "auto"'):
        backend_for(torch.device("cuda", 0), wanted="weft")


def test_several_ranks_on_one_gpu_are_served_by_gloo() -> None:
    assert backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert backend_for(torch.device("cuda", 0), shared=True) == "gloo"


def _carried() -> tuple[bool, bool, bool]:
    group = dist.group.WORLD
    assert group is not None
    return tuple(runs_on_gloo(torch.device(kind), group) for kind in ("cpu", "cuda", "meta"))


def test_gloo_carries_the_tensors_of_both_kinds_of_device_and_no_others(ranks: RankPool) -> None:
    assert ranks.run(2, _carried) == [(True, True, False)] * 2


def test_shared_memory_carries_what_gloo_does_not(ranks: RankPool) -> None:
    assert ranks.run(2, _carried, backend="cpu:weft") == [(False, False, False)] * 2


def test_memory_grows_with_what_is_held() -> None:
    before = memory_bytes(CPU)
    held = torch.ones(8 << 20)
    assert memory_bytes(CPU) - before > 24 << 20
    assert peak_memory_bytes(CPU) >= memory_bytes(CPU)
    assert memory_bytes(CPU) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert held.numel() == 8 << 20


def gather_and_scatter() -> tuple[list[float], list[float]]:
    import torch.distributed as dist

    rank = float(dist.get_rank())
    gathered = torch.empty(4)
    all_gather_single(gathered, torch.full((2,), rank))
    part = torch.empty(2)
    reduce_scatter_single(part, torch.arange(4.0) + rank)
    return gathered.tolist(), part.tolist()


def test_renamed_collectives_work_without_a_warning(ranks: RankPool) -> None:
    assert ranks.run(2, gather_and_scatter) == [([0, 0, 1, 1], [1, 3]), ([0, 0, 1, 1], [5, 7])]
