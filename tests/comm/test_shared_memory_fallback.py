"""Without the C++ engine, and where ranks share no memory."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shared_memory_jobs import ARITHMETIC, BITWISE, group, movements, reductions, traces

from pool import RankError, RankPool
from weft.comm import carried_by_gloo, register_shared_memory_backend, shared_memory_group
from weft.comm.shared_memory import _meeting
from weft.comm.shared_memory._segment import Unreachable, create_segment, open_segment
from weft.errors import CollectiveError

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


def _without_the_engine(folder: str) -> tuple[list[str], str, list[str]]:
    said = _again(folder, use_engine=False)
    cases = [(torch.float32, op) for op in ARITHMETIC]
    cases += [(torch.bfloat16, "SUM"), (torch.float16, "AVG"), (torch.bool, "SUM"), (torch.int8, "SUM")]
    cases += [(torch.int64, op) for op in (*ARITHMETIC, *BITWISE)]
    wrong = reductions(cases, (0, 1, 1_000, 300_007))
    wrong += movements((torch.float32, torch.bool), (0, 1, 1_001, 150_003))
    return wrong, group().transport.name, said


@pytest.mark.parametrize("world", [2, 3])
def test_pure_python_gives_the_same_results(ranks: RankPool, tmp_path: Path, world: int) -> None:
    outcomes = ranks.run(world, _without_the_engine, str(tmp_path))
    for rank, (wrong, name, said) in enumerate(outcomes):
        assert wrong == []
        assert name == "shared memory in pure Python"
        assert len(said) == (2 if rank == 0 else 0)  # one per group
        assert all("by pure Python, the same results" in text for text in said)
        assert all("setup.py build_ext --inplace" in text for text in said)


def _python_failures(folder: str) -> None:
    _again(folder, use_engine=False)
    dist.all_reduce(torch.ones(5))
    if dist.get_rank() == 1:
        (Path(folder) / "when").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="rank 1 has died") as caught:
        dist.all_reduce(torch.ones(5))
    seconds = time.time() - float((Path(folder) / "when").read_text())
    dist.destroy_process_group()
    gc.collect()
    found = traces()
    (Path(folder) / f"rank{dist.get_rank() if dist.is_initialized() else 0}").write_text(
        f"{seconds} {found['mappings']} {caught.value}"
    )


def test_pure_python_names_a_dead_rank_and_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        ranks.run(2, _python_failures, str(tmp_path))
    seconds, mappings, _ = (tmp_path / "rank0").read_text().split(maxsplit=2)
    assert float(seconds) <= 1.0
    assert int(mappings) == 0


def _mismatch(folder: str) -> str:
    _again(folder, use_engine=False)
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(5 + dist.get_rank()))
    dist.destroy_process_group()
    return str(caught.value)


def test_pure_python_notices_different_calls(ranks: RankPool, tmp_path: Path) -> None:
    assert all("does not fit" in text for text in ranks.run(2, _mismatch, str(tmp_path)))


def _out_of_reach(folder: str) -> tuple[list[str], bool, bool, float]:
    """Rank 1 sees another boot id, as on another host."""
    if dist.get_rank() == 1:
        elsewhere = Path(folder) / "boot_id"
        elsewhere.write_text("another boot\n")
        _meeting.open_segment.__globals__["_BOOT_ID"] = elsewhere
    try:
        said = _again(folder, use_engine=True)
    finally:
        if "_BOOT_ID" in _meeting.open_segment.__globals__:
            _meeting.open_segment.__globals__["_BOOT_ID"] = Path("/proc/sys/kernel/random/boot_id")
    value = torch.ones(100)
    dist.all_reduce(value)
    world = dist.group.WORLD
    assert world is not None
    return said, shared_memory_group(world) is None, carried_by_gloo(torch.device("cpu"), world), value[0].item()


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
