"""Saves in memory that are copied to the disk beside training, and what is done where they cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.errors import LaunchError
from weft.run.checkpoint import Checkpointer, StoredCheckpoint
from weft.run.checkpoint.tiers import (
    DiskFolder,
    Drain,
    Drained,
    TieredCheckpointer,
)
from weft.run.launch.memory_folder import create_memory_folder, remove_memory_folder
from weft.techniques.core import CheckpointShard


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = create_memory_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    yield folder
    remove_memory_folder(folder)
    assert not folder.exists()


def shards(value: float, size: int = 1000) -> list[CheckpointShard]:
    shape = torch.Size((size,))
    names = ("model/a", "model/b")
    return [CheckpointShard(name=name, shape=shape, tensor=torch.full((size,), value)) for name in names]


def tiers_of(disk: Path, memory: Path | None) -> TieredCheckpointer:
    return TieredCheckpointer(Checkpointer(disk), memory, ranks_on_host=1)


def drained(tiers: TieredCheckpointer, seconds: float = 10.0) -> Drained:
    until = time.monotonic() + seconds
    while (done := tiers.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return done


def value_of(checkpoint: Path) -> float:
    stored = StoredCheckpoint(checkpoint)
    stored.verify()
    (value,) = set(stored.whole("model/a").tolist())
    return value


def test_saves_reach_the_disk_in_order_and_the_oldest_go(memory: Path, tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path / "disk", memory)
    with Drain(memory, DiskFolder(tmp_path / "disk", 2, None)):
        for step in (1, 2, 3):
            saved = tiers.save(step, shards(step), {"step": step}, at_once=False)
            assert not saved.is_durable
            done = drained(tiers)
            assert (done.step, done.path, done.problem) == (step, str(saved.path), "")
            assert value_of(saved.path) == step
        last = tiers.save(4, shards(4), {}, at_once=True)
    assert last.is_durable
    assert sorted(path.name for path in (tmp_path / "disk").glob("step-*")) == ["step-000003", "step-000004"]
    assert (tmp_path / "disk" / "latest").read_text() == "step-000004\n"


def test_the_second_save_waits_until_the_first_is_on_the_disk(memory: Path, tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path / "disk", memory)
    tiers.save(1, shards(1, 1_000_000), {}, at_once=False)
    with Drain(memory, DiskFolder(tmp_path / "disk", 2, None)):
        tiers.save(2, shards(2), {}, at_once=False)
        assert value_of(tmp_path / "disk" / "step-000001") == 1  # whole, before the second save began to be copied
        assert drained(tiers).step in (1, 2)


def test_the_newest_of_both_tiers_is_loaded_and_flushed(memory: Path, tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path / "disk", memory)
    tiers.save(5, shards(5), {"at": 5}, at_once=True)
    tiers.begin(5)
    tiers.snapshot(8, shards(8), {"at": 8}, step_seconds=1.0)
    assert tiers.next_snapshot > 8
    loaded = shards(0)
    assert tiers_of(tmp_path / "disk", memory).load("latest", loaded) == {"at": 8}
    assert set(loaded[0].tensor.tolist()) == {8.0}
    Drain(memory, DiskFolder(tmp_path / "disk", 2, None)).flush()
    assert value_of(tmp_path / "disk" / "step-000008") == 8


def test_the_next_generation_waits_for_a_copy_that_is_under_way(memory: Path, tmp_path: Path) -> None:
    tiers_of(tmp_path / "disk", memory).save(1, shards(1, 1_000_000), {}, at_once=False)  # and its ranks are killed
    again = tiers_of(tmp_path / "disk", memory)
    again.load("latest", shards(0, 1_000_000))
    again.begin(1)
    assert again.wanted_step == 1
    again.next_snapshot = 2
    again.snapshot(2, shards(2, 1_000_000), {}, step_seconds=1.0)  # it would take the place of the save
    assert (memory / "step-000001").is_dir()
    with Drain(memory, DiskFolder(tmp_path / "disk", 2, None)):
        again.save(2, shards(2, 1_000_000), {}, at_once=True)
    assert (tmp_path / "disk" / "latest").read_text() == "step-000002\n"
    assert value_of(tmp_path / "disk" / "step-000001") == 1


class Taken:
    """A folder that another run has taken over."""

    def check(self) -> None:
        raise LaunchError("the folder is another run's by now")

    def beat(self) -> None:
        """No sign of life."""


def test_a_copy_into_a_folder_that_is_anothers_is_refused_and_said(memory: Path, tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path / "disk", memory)
    with Drain(memory, DiskFolder(tmp_path / "disk", 2, Taken())):
        tiers.save(1, shards(1), {}, at_once=False)
        done = drained(tiers)
    assert done.problem == "the checkpoint of step 1 did not reach the disk: the folder is another run's by now"
    assert list((tmp_path / "disk").glob("step-*")) == []


@pytest.mark.needs_root
def test_a_full_disk_is_said_and_leaves_the_checkpoint_before(memory: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=True)
    try:
        tiers = tiers_of(disk, memory)
        with Drain(memory, DiskFolder(disk, 2, None)):
            tiers.save(1, shards(1), {}, at_once=False)
            assert drained(tiers).problem == ""
            tiers.save(2, shards(2, 1_000_000), {}, at_once=False)
            assert "did not reach the disk: [Errno 28] No space left" in drained(tiers).problem
            tiers.save(3, shards(3), {}, at_once=False)
            assert drained(tiers).problem == ""
        names = sorted(path.name for path in disk.iterdir())
        assert names == ["latest", "step-000001", "step-000003"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_without_room_in_memory_saves_go_to_the_disk(memory: Path, tmp_path: Path) -> None:
    tiers = TieredCheckpointer(Checkpointer(tmp_path / "disk"), memory, ranks_on_host=1 << 40)
    tiers.begin(0)
    assert tiers.save(1, shards(1), {}, at_once=False).is_durable
    assert tiers.next_snapshot == 0
    assert value_of(tmp_path / "disk" / "step-000001") == 1


ORPHAN = """
import os, sys
from weft.run.launch.memory_folder import create_memory_folder
print(create_memory_folder(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_supervisor_left_is_removed_by_the_next(memory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    assert json.loads((left / "owner.json").read_text())["pid"] != os.getpid()
    remove_memory_folder(create_memory_folder() or left)
    assert not left.exists()
    assert memory.is_dir()  # its owner lives
