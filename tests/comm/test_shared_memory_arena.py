"""Tensors in the group's memory: what becomes of them when the group ends, and when there is no more memory."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from shared_memory_jobs import data_of, everyones, reduced, same, traces

from weft.comm.memory import new_flat
from weft.comm.mesh import GroupView
from weft.comm.shared_memory import _handshake, shared_memory_group
from weft.comm.shared_memory._segment import create_segment
from weft.comm.shared_memory.engine import REBUILD, Engine, load_library, prepare
from weft.comm.shared_memory.group import SharedMemoryGroup
from weft.errors import CollectiveError

WEFT = "cpu:weft"


def _another_group() -> SharedMemoryGroup:
    found = shared_memory_group(dist.new_group(timeout=timedelta(seconds=20)))
    assert found is not None
    return found


def _outliving() -> tuple[list[int], float, str]:
    """Mappings of this kind: beside the default group's, with the group, with a tensor of it, and with nothing."""
    rank = dist.get_rank()
    mappings = [traces()["mappings"]]
    other = _another_group()
    kept = other.allocate(100_000).fill_(rank + 1.0)
    dist.all_reduce(kept, group=other)
    part = kept[10:20]
    mappings.append(traces()["mappings"])
    dist.destroy_process_group(other)
    with pytest.raises(CollectiveError) as caught:
        other.allocate(10)
    assert other.allocate_if_possible(10, torch.float32) is None
    del other, kept
    gc.collect()
    mappings.append(traces()["mappings"])
    part.add_(1.0)
    value = part.sum().item()
    again = _another_group()  # what lies in another group's memory is staged in this one, as any tensor is
    dist.all_reduce(part, group=again)
    assert part[0].item() == 8.0
    dist.destroy_process_group(again)
    del part, again
    gc.collect()
    mappings.append(traces()["mappings"])
    return mappings, value, str(caught.value)


def test_a_tensor_outlives_its_group(ranks: RankPool) -> None:
    for mappings, value, text in ranks.run(2, _outliving, backend=WEFT):
        assert mappings == [1, 2, 2, 1]
        assert value == 40.0
        assert "this rank has left the group" in text


def test_memory_that_is_not_there_is_no_bus_error() -> None:
    """Beyond the file's end, as where the machine has no page left: a write would end this process."""
    library = load_library()
    assert library is not None, f"not built; run {REBUILD}"
    arena = 1 << 20
    whole = int(library.weft_segment_bytes(1, arena))
    segment = create_segment(whole)
    try:
        prepare(library, segment, 1, arena)
        engine = Engine(library, segment, rank=0, num_ranks=1, num_local_ranks=1, arena_bytes=arena)
        os.ftruncate(segment.descriptor, engine._arena_offset + arena // 2)
        first = engine.allocate(arena // 4)
        assert first is not None
        first[:] = b"x" * (arena // 4)
        assert engine.allocate(arena // 2) is None
        assert engine.arena_taken_bytes == arena // 4, "a piece that could not be had is still taken"
        assert engine.allocate(arena // 4) is not None
        engine.close()
    finally:
        segment.forget_descriptor()


def _full() -> tuple[bool, list[str], int]:
    """A group whose arena holds three pages."""
    size, before = 3000, _handshake.ARENA_BYTES
    _handshake.ARENA_BYTES = 3 * 4096
    try:
        other = _another_group()
    finally:
        _handshake.ARENA_BYTES = before
    view = GroupView((0, 1), dist.get_rank(), other)
    cpu = torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = [new_flat(size, torch.float32, cpu, view) for _ in range(3)]
    for flat in held:
        flat.copy_(data_of(dist.get_rank(), size, torch.float32))
        dist.all_reduce(flat, group=other)
    is_right = all(same(flat, reduced(everyones(size, torch.float32), "SUM")) for flat in held)
    taken = other.engine.arena_taken_bytes
    dist.destroy_process_group(other)
    return is_right, [str(warning.message) for warning in caught], taken


def test_a_full_arena_is_said_once(ranks: RankPool) -> None:
    outcomes = ranks.run(2, _full, backend=WEFT)
    for is_right, _, taken in outcomes:
        assert is_right
        assert taken == 3 * 4096
    assert [len(said) for _, said, _ in outcomes] == [1, 0]
    assert "Buffers of 12,000 bytes do not fit any more into the shared memory of ranks 0, 1" in outcomes[0][1][0]


_SMALL = """
import os, sys, torch, torch.distributed as dist
from weft.comm.shared_memory import register_shared_memory_backend
rank = int(sys.argv[1])
free = os.statvfs("/dev/shm")
assert free.f_blocks * free.f_frsize <= 65536, "the small file system is not there"
register_shared_memory_backend()
dist.init_process_group("cpu:weft", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
tensor = dist.group.WORLD.allocate(4 << 20).fill_(1.0)
dist.all_reduce(tensor)
assert tensor.unique().tolist() == [2.0]
dist.destroy_process_group()
"""


@pytest.mark.needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_full_shared_memory_file_system_does_not_matter(tmp_path: Path) -> None:
    """The memory is an anonymous file, which takes nothing of what /dev/shm has."""
    script = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", _SMALL]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE) for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=150)[1].decode() for process in started]
        assert [process.returncode for process in started] == [0, 0], said
    finally:
        for process in started:
            process.kill()
            process.communicate()
