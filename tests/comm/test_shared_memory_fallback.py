"""Without the C++ engine, and where ranks share no memory."""

from __future__ import annotations

import gc
import os
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.comm._process import boot_id
from weft.comm.device import runs_on_gloo
from weft.comm.shared_memory import register_shared_memory_backend, shared_memory_group
from weft.comm.shared_memory._segment import Unreachable, create_segment, open_segment

WEFT = "cpu:weft"


def _again(folder: str, *, use_engine: bool) -> list[str]:
    """Form the default group again, and return what was said."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    gc.collect()
    store = dist.FileStore(f"{folder}/store", world)
    register_shared_memory_backend(use_engine=use_engine)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.init_process_group(WEFT, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
            dist.new_group()
    finally:
        register_shared_memory_backend()
    return [str(warning.message) for warning in caught]


def _without_the_engine(folder: str) -> tuple[list[str], bool, float]:
    said = _again(folder, use_engine=False)
    value = torch.ones(100)
    dist.all_reduce(value)
    return said, shared_memory_group(dist.group.WORLD) is None, value[0].item()


@pytest.mark.parametrize("world", [2, 3])
def test_without_the_engine_gloo_does_it(ranks: RankPool, tmp_path: Path, world: int) -> None:
    outcomes = ranks.run(world, _without_the_engine, str(tmp_path))
    for rank, (said, is_gloo, value) in enumerate(outcomes):
        assert is_gloo
        assert value == world
        assert len(said) == (2 if rank == 0 else 0)  # one per group
        assert all("uses Gloo instead of shared memory" in text for text in said)
        assert all("setup.py build_ext --inplace (rank 0)" in text for text in said)


def _out_of_reach(folder: str) -> tuple[list[str], bool, bool, float]:
    """Rank 1 sees another boot id, as on another host."""
    if dist.get_rank() == 1:
        elsewhere = Path(folder) / "boot_id"
        elsewhere.write_text("another boot\n")
        boot_id.__globals__["_BOOT_ID"] = elsewhere
    try:
        said = _again(folder, use_engine=True)
    finally:
        if "_BOOT_ID" in boot_id.__globals__:
            boot_id.__globals__["_BOOT_ID"] = Path("/proc/sys/kernel/random/boot_id")
    value = torch.ones(100)
    dist.all_reduce(value)
    world = dist.group.WORLD
    assert world is not None
    return said, shared_memory_group(world) is None, runs_on_gloo(torch.device("cpu"), world), value[0].item()


def test_ranks_of_different_hosts_use_gloo(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(2, _out_of_reach, str(tmp_path))
    for said, is_plain, is_gloo, value in outcomes:
        assert is_plain
        assert is_gloo
        assert value == 2.0
        assert said == [] or all("uses Gloo instead of shared memory: the group's ranks are on" in t for t in said)
    assert len(outcomes[0][0]) == 2
    assert outcomes[1][0] == []


def test_a_segment_is_known_by_its_nonce() -> None:
    segment = create_segment(1 << 16)
    try:
        told = segment.describe()
        again = open_segment(told)
        again.memory[5000:5003] = b"abc"
        assert segment.memory[5000:5003] == b"abc"
        assert os.fstat(segment.descriptor).st_mode & 0o777 == 0o600
        with pytest.raises(Unreachable, match="leads to other memory"):
            open_segment(told.replace(segment.nonce.hex(), "00" * 16))
        with pytest.raises(Unreachable, match="leads to another file"):
            open_segment(told.replace("65536", "65537"))
        with pytest.raises(Unreachable, match="different hosts"):
            open_segment(told.replace('"boot_id": "', '"boot_id": "x'))
    finally:
        segment.forget_descriptor()
    with pytest.raises(Unreachable, match="cannot be opened"):
        open_segment(told)
