"""A save that dies, a disk that is full, a changed file: what was saved before loads, unchanged or not at all."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from layouts import ThreadRanks, one_shard
from pool import RankPool

from weft.comm.mesh import GroupView
from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer, Peers, SaveError
from weft.run.checkpoint._commit import create_partial
from weft.run.checkpoint._files import StoredFile
from weft.run.checkpoint._format import digest_of, read_manifest
from weft.run.checkpoint.export import read_tensors
from weft.techniques.core import CheckpointShard

SIZE = 50_000


def shards_at(step: int) -> list[CheckpointShard]:
    return [one_shard(f"model/{at}", torch.full((SIZE,), float(step))) for at in range(4)]


def load_step(folder: Path, which: str | Path = "latest") -> float:
    """Load and return the step whose values came back, checking that they are all of one step."""
    shards = shards_at(0)
    state = Checkpointer(folder).load(which, shards)  # type: ignore[arg-type]
    results = {float(value) for shard in shards for value in shard.tensor.unique()}
    assert results == {float(state["step"])}  # type: ignore[arg-type]
    return results.pop()


def save_step(folder: Path, step: int, **options: object) -> Path:
    return Checkpointer(folder, file_bytes=SIZE * 4).save(step, shards_at(step), {"step": step}, **options)  # type: ignore[arg-type]


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    save_step(tmp_path, 10)
    save_step(tmp_path, 20)
    return tmp_path


def save_until_killed(folder: str, notes: str) -> None:
    """Save as two ranks do, rank 0 noting what is finished; one step is saved again and again."""
    import torch.distributed as dist

    rank = dist.get_rank()
    peers = Peers.of_group(GroupView((0, 1), rank, dist.group.WORLD))
    (Path(notes) / f"pid-{rank}").write_text(str(os.getpid()))
    checkpointer = Checkpointer(Path(folder), peers, file_bytes=SIZE * 4)
    for step in range(1, 100_000):
        shards = [shard for at, shard in enumerate(shards_at(step)) if at % 2 == rank]
        checkpointer.save(step if step % 3 else 1, shards, {"step": step})
        if rank == 0:
            with (Path(notes) / "finished").open("a") as file:
                file.write(f"{step}\n")


@pytest.mark.parametrize("seed", range(8))
def test_a_save_killed_at_any_moment_leaves_the_one_before(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    folder, finished, killed = tmp_path / "checkpoints", tmp_path / "finished", seed % 2
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(ranks.run, 2, save_until_killed, str(folder), str(tmp_path), timeout=50)
        while not finished.exists() and not run.done():
            time.sleep(0.01)
        if run.done():
            run.result()  # it failed before anybody was killed
        time.sleep(random.Random(seed).uniform(0.0, 0.1))
        os.kill(int((tmp_path / f"pid-{killed}").read_text()), signal.SIGKILL)
        assert run.exception() is not None
    last = float(finished.read_text().split()[-1])
    assert load_step(folder) in {last, last + 1}, "nothing older than what was finished may come back"
    if killed == 0:  # the process whose save it was is gone
        save_step(folder, 9999)
        assert [path.name for path in folder.iterdir() if "." in path.name] == []


def test_a_save_in_a_newer_format_is_refused_and_the_one_before_is_taken(
    two_steps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = two_steps / "step-000020"
    page = json.loads((newest / "manifest.json").read_text())
    page["manifest"]["version"] += 1
    body = json.dumps(page["manifest"], sort_keys=True, separators=(",", ":"))
    (newest / "manifest.json").write_text(json.dumps({**page, "digest": digest_of(body.encode())}))
    with pytest.raises(CheckpointError, match=r"has format version 2; this Weft reads 1\. Use a newer Weft\."):
        load_step(two_steps, newest)
    assert load_step(two_steps) == 10
    assert "step-000020 is passed over" in caplog.text


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path, at: float) -> None:
    os.truncate(path, int(at * path.stat().st_size))


def remove(path: Path, _at: float) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, remove])
@pytest.mark.parametrize("name", ["rank-00000-0002.safetensors", "rank-00000.json", "manifest.json"])
@pytest.mark.parametrize("at", [0.0, 0.0001, 0.37, 0.99999])
def test_damage_is_found_before_anything_changes(
    two_steps: Path, damage: Callable[[Path, float], None], name: str, at: float, caplog: pytest.LogCaptureFixture
) -> None:
    newest = two_steps / "step-000020"
    damage(newest / name, at)
    targets = shards_at(0)
    if not (name == "manifest.json" and damage is flip and read_or_none(newest)):  # a flip in a blank changes nothing
        with pytest.raises(CheckpointError):
            Checkpointer(two_steps).load(newest, targets)
        assert all(not shard.tensor.any() for shard in targets)
        with caplog.at_level(logging.WARNING):
            assert load_step(two_steps) == 10
        assert name == "manifest.json" or "loading" in caplog.text
        assert name == "manifest.json" or "instead, because" in caplog.text


def read_or_none(folder: Path) -> object:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def test_every_bit_of_the_manifest_is_guarded(two_steps: Path) -> None:
    path = two_steps / "step-000020" / "manifest.json"
    original, sound = path.read_bytes(), read_manifest(path.parent)
    for position in range(len(original)):
        content = bytearray(original)
        content[position] ^= 1 << position % 8
        path.write_bytes(content)
        assert read_or_none(path.parent) in (None, sound)


def test_damage_that_only_another_rank_sees_makes_all_ranks_fall_back(two_steps: Path) -> None:
    flip(two_steps / "step-000020" / "rank-00000-0003.safetensors", 0.5)  # verified by rank 3 of 4

    def load(peers: Peers) -> float:
        shards = shards_at(0)
        Checkpointer(two_steps, peers).load("latest", shards)
        return float(shards[0].tensor[0])

    assert ThreadRanks().run(4, load) == [10.0] * 4


def test_nothing_left_to_load_says_why(two_steps: Path) -> None:
    for name in ("step-000010", "step-000020"):
        flip(two_steps / name / "rank-00000-0000.safetensors", 0.9)
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint that can be loaded.*step-000020.*step-000010.*digest"
    ):
        load_step(two_steps)
    with pytest.raises(CheckpointError, match='"latest" was asked for and no save has finished'):
        Checkpointer(two_steps / "none").load("latest", [])
    with pytest.raises(CheckpointError, match="none does not exist. Give the folder of a run"):
        Checkpointer(two_steps).load(two_steps / "none", [])


def rewrite(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change the index as somebody could who also repairs all digests."""
    index = folder / "rank-00000.json"
    content = json.loads(index.read_bytes())
    change(content)
    index.write_text(json.dumps(content))
    outer = json.loads((folder / "manifest.json").read_bytes())
    stored = StoredFile(name=index.name, size_bytes=index.stat().st_size, digest=digest_of(index.read_bytes()))
    outer["manifest"]["indexes"] = [{"name": stored.name, "size_bytes": stored.size_bytes, "digest": stored.digest}]
    canonical = json.dumps(outer["manifest"], sort_keys=True, separators=(",", ":"))
    outer["digest"] = digest_of(canonical.encode())
    (folder / "manifest.json").write_text(json.dumps(outer))


@pytest.mark.parametrize("name", ["../rank-00000-0000.safetensors", "/etc/passwd", "a/rank-00000-0000.safetensors", ""])
def test_no_file_outside_the_checkpoint_is_opened(two_steps: Path, name: str) -> None:
    def change(index: dict[str, object]) -> None:
        index["files"][0]["name"] = name  # type: ignore[index]
        index["runs"][0]["file"] = name  # type: ignore[index]

    rewrite(two_steps / "step-000020", change)
    with pytest.raises(CheckpointError, match="which no checkpoint has: not written by Weft"):
        load_step(two_steps, two_steps / "step-000020")


def test_no_link_is_followed(two_steps: Path) -> None:
    victim = two_steps / "step-000020" / "rank-00000-0000.safetensors"
    victim.rename(two_steps / "elsewhere")
    victim.symlink_to(two_steps / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        load_step(two_steps, two_steps / "step-000020")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start", 1),
        ("start", -1),
        ("length", 10**18),
        ("shape", [SIZE, -1]),
        ("dtype", "object"),
        ("split", [0, 0, 0, 0]),
    ],
)
def test_impossible_runs_are_refused(two_steps: Path, field: str, value: object) -> None:
    rewrite(two_steps / "step-000020", lambda index: index["runs"][0].update({field: value}))  # type: ignore[index]
    with pytest.raises(CheckpointError):
        load_step(two_steps, two_steps / "step-000020")


def test_a_deeply_nested_file_is_an_error_and_no_crash(two_steps: Path) -> None:
    (two_steps / "step-000020" / "manifest.json").write_text("[" * 200_000)
    assert load_step(two_steps) == 10


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 1000, SIZE * 4 + 100])
def test_a_failed_write_leaves_the_previous_checkpoint_and_lets_training_go_on(two_steps: Path, limit: int) -> None:
    before = sorted(two_steps.iterdir())
    big = [one_shard("model/0", torch.ones(SIZE * 2))]
    with (
        file_size_limit(limit),
        pytest.raises(SaveError, match="step 30 was not saved: File too large.*Make room") as caught,
    ):
        Checkpointer(two_steps).save(30, big)
    assert caught.value.training_can_continue
    assert sorted(two_steps.iterdir()) == before
    assert load_step(two_steps) == 20
    save_step(two_steps, 30)
    assert load_step(two_steps) == 30


@pytest.mark.needs_root
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    room = tmp_path / "small"
    room.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(room)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system here: {mounted.stderr.decode().strip()}")
    try:
        folder = room / "checkpoints"
        save_step(folder, 10)
        with pytest.raises(SaveError, match=r"No space left on device .*GB free\)"):
            Checkpointer(folder).save(20, [one_shard(f"model/{at}", torch.ones(SIZE)) for at in range(8)])
        assert [path.name for path in sorted(folder.iterdir())] == ["latest", "step-000010"]
        assert load_step(folder) == 10
        ballast = room / "ballast"
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(bytes(4 << 20))
        with pytest.raises(OSError, match="No space"):  # not even the note of whose it is
            create_partial(folder, 20, "ab")
        ballast.unlink()
        assert [path.name for path in sorted(folder.iterdir())] == ["latest", "step-000010"]
        assert shutil.disk_usage(room).free > 1 << 20
    finally:
        subprocess.run(["umount", str(room)], check=True)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save_step(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000004", "step-000005"]
    assert (tmp_path / "latest").read_text() == "step-000005\n"
    save_step(tmp_path, 3)  # an earlier step, saved later: a run that went back
    assert load_step(tmp_path) == 3


def test_saving_a_step_again_replaces_it_whole(two_steps: Path) -> None:
    Checkpointer(two_steps).save(20, [one_shard("model/new", torch.ones(1))])
    assert [name for name, _ in read_tensors(two_steps)] == ["new"]
    assert sorted(path.name for path in two_steps.iterdir()) == ["latest", "step-000010", "step-000020"]


def test_a_living_save_of_another_process_is_left_alone(two_steps: Path) -> None:
    partial = two_steps / "step-000030.partial-00ab"
    partial.mkdir()
    (partial / "owner.json").write_text(json.dumps({"machine": "another", "pid": 1, "started": "1"}))
    save_step(two_steps, 40)
    assert partial.exists()


def test_a_save_that_died_before_it_said_whose_it_is_is_removed(two_steps: Path) -> None:
    partial = two_steps / "step-000030.partial-00ab"
    partial.mkdir()
    (partial / "owner.json").touch()
    save_step(two_steps, 40)
    assert not partial.exists()
