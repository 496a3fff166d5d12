"""Loads altered checkpoints of each tier, and judges what came of it.

    python tests/run/checkpoint/altered.py --number 10000 --report benchmarks/results/alterations.json

The judge: what was altered by accident is found and said, and the save before is loaded bit for bit; what somebody
altered who repaired every digest loads the tensors that its files hold, or the save before, and nothing else; no code
runs; and an unaltered checkpoint is loaded without a word.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "support"), str(Path(__file__).parents[3])]

import fsspec
import pytest
import torch
from alterations import Alteration, Case, alter, alter_folder, write_files
from layouts import ThreadRanks
from s3_server import S3Server

from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.store import CheckpointStore
from weft.run.checkpoint.tiers import DiskFolder, Drain, TieredCheckpointer
from weft.run.launch.memory_folder import create_memory_folder, remove_memory_folder
from weft.techniques.core import CheckpointShard, NestedSplit, Split

SHAPE = torch.Size((4, 6))
BEFORE, NEWEST, REFUSED = 10, 20, -1
NEWEST_NAME = "step-000020"
AT_ONCE = 500
"""Alterations after which the report is written."""
SHARE_OF_FOLDERS = 0.1
"""Share of the alterations that only a folder can have."""


def shards_of(step: int, rank: int = 0, world: int = 1) -> list[CheckpointShard]:
    """Rank's shards of a matrix cut in two, two vectors, a half-precision one and a number, with values of the step."""
    whole = torch.arange(24.0).view(SHAPE) + step
    parts = [NestedSplit((Split(dim=0, parts=2, index=index),)) for index in range(2)]
    cut = [
        CheckpointShard(name="model/a", shape=SHAPE, tensor=part.slice(whole).reshape(-1), split=part) for part in parts
    ]
    flat = {
        "model/b": torch.arange(30.0) * step,
        "optimizer/exp_avg/b": torch.arange(30.0) - step,
        "buffer/half": (torch.arange(8.0) + step).bfloat16(),
        "buffer/number": torch.full((1,), float(step)),
    }
    shards = [*cut, *(CheckpointShard(name=name, shape=value.shape, tensor=value) for name, value in flat.items())]
    return shards[rank::world]


def save_steps(folder: Path, steps: tuple[int, ...] = (BEFORE, NEWEST), *, file_bytes: int = 64) -> None:
    """Save checkpoints, by two ranks."""

    def save(peers: Peers) -> None:
        for step in steps:
            checkpointer = Checkpointer(
                folder, peers, file_bytes=file_bytes, keep=9, provenance={"run": "altered", "plan": "1234"}
            )
            checkpointer.save(step, shards_of(step, peers.rank, 2), {"step": step, "data": {"cursor": step, "x": 0.5}})

    ThreadRanks().run(2, save)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def loaded_step(shards: list[CheckpointShard]) -> int:
    """The step whose values all shards have, bit for bit."""
    step = int(shards[-1].tensor)
    wrong = [
        one.name for one, two in zip(shards, shards_of(step), strict=True) if not torch.equal(one.tensor, two.tensor)
    ]
    assert not wrong, f"other values in {wrong}"
    return step


class Warnings(logging.Handler):
    """Keeps what Weft warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings_of_weft() -> Generator[list[str]]:
    handler, logger = Warnings(), logging.getLogger("weft")
    passes_on, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = passes_on


class DiskTier:
    """Both saves lie in a run's folder."""

    looks_again_every = 1
    """Tries after which an unaltered checkpoint is loaded."""

    def __init__(self, scratch: Path) -> None:
        self.folder = scratch / "checkpoints"
        save_steps(self.folder)
        self.case = Case(files_of(self.folder / NEWEST_NAME), files_of(self.folder / "step-000010"), scratch / "canary")

    def alter(self, draw: random.Random) -> Alteration:
        newest = self._newest()
        if draw.random() < SHARE_OF_FOLDERS:
            write_files(newest, self.case.files)
            return Alteration(alter_folder(newest, draw), {})
        altered = alter(self.case, draw)
        write_files(newest, altered.files)
        return altered

    def restore(self) -> None:
        for path in self._newest().parent.glob("*"):
            if path.name not in ("step-000010", NEWEST_NAME, "latest", "owner.json"):
                write_files(path, {}) if path.is_dir() else path.unlink()
                if path.is_dir():
                    path.rmdir()
        write_files(self._newest(), self.case.files)

    def load(self) -> list[CheckpointShard]:
        shards = [_zeroed(shard) for shard in shards_of(NEWEST)]
        Checkpointer(self.folder).load("latest", shards)
        return shards

    def check_altered(self, step: int) -> None:
        """Nothing more to look at on a disk."""

    def _newest(self) -> Path:
        return self.folder / NEWEST_NAME

    def close(self) -> None:
        """Nothing outside of the scratch folder."""


class MemoryTier(DiskTier):
    """The newest save lies in memory, and the one before on the disk."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        write_files(self.folder / NEWEST_NAME, {})
        (self.folder / NEWEST_NAME).rmdir()
        memory = create_memory_folder()
        assert memory is not None
        self.memory = memory
        self.restore()

    def load(self) -> list[CheckpointShard]:
        shards = [_zeroed(shard) for shard in shards_of(NEWEST)]
        TieredCheckpointer(Checkpointer(self.folder), self.memory, ranks_on_host=1).load("latest", shards)
        return shards

    def check_altered(self, step: int) -> None:
        """What was found when it was loaded does not reach the disk either, or is no model of this run."""
        if step != BEFORE:
            return
        with warnings_of_weft():
            Drain(self.memory, DiskFolder(self.folder, 2, None)).flush()
        for copied in self.folder.glob("step-*"):
            if copied.name != "step-000010":
                with pytest.raises(CheckpointError, match="does not fit"):
                    Checkpointer(self.folder).load(copied, [_zeroed(shard) for shard in shards_of(NEWEST)])
                shutil.rmtree(copied)
        assert sorted(path.name for path in self.folder.iterdir()) in (
            ["latest", "step-000010"],
            ["step-000010"],
        ), "left behind"

    def _newest(self) -> Path:
        return self.memory / NEWEST_NAME

    def close(self) -> None:
        remove_memory_folder(self.memory)


class StoreTier(DiskTier):
    """Both saves lie in an object store; what is loaded is brought into a folder of this host first."""

    looks_again_every = 10

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        save_steps(scratch / "saved", file_bytes=4096)
        self.server = S3Server()
        self.server.start("bucket")
        os.environ.update(self.server.environment)
        self.store = CheckpointStore("s3://bucket/run")
        for step in (BEFORE, NEWEST):
            self.store.copy(scratch / "saved" / f"step-{step:06d}")
        self.files: Any = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        self.case = Case(self._stored(NEWEST_NAME), self._stored("step-000010"), scratch / "canary")
        self.now = dict(self.case.files)

    def alter(self, draw: random.Random) -> Alteration:
        altered = alter(self.case, draw)
        self._put(altered.files)
        return altered

    def restore(self) -> None:
        self._put(self.case.files)

    def load(self) -> list[CheckpointShard]:
        here = self.scratch / "here"
        try:
            self.store.fetch_newest(here)
            shards = [_zeroed(shard) for shard in shards_of(NEWEST)]
            Checkpointer(here).load("latest", shards)
            return shards
        finally:
            assert not [path.name for path in here.glob("*.partial-*")], "left behind"
            shutil.rmtree(here, ignore_errors=True)

    def close(self) -> None:
        self.server.kill()
        for name in self.server.environment:
            del os.environ[name]

    def _stored(self, name: str) -> dict[str, bytes]:
        paths = self.files.find(f"bucket/run/{name}")
        return {path.rpartition("/")[2]: self.files.cat_file(path) for path in paths}

    def _put(self, files: Mapping[str, bytes]) -> None:
        for name in self.now.keys() - files.keys():
            self.files.rm_file(f"bucket/run/{NEWEST_NAME}/{name}")
        for name, content in files.items():
            if self.now.get(name) != content:
                self.files.pipe_file(f"bucket/run/{NEWEST_NAME}/{name}", content)
        self.now = dict(files)


TIERS = {"disk": DiskTier, "memory": MemoryTier, "store": StoreTier}


def _zeroed(shard: CheckpointShard) -> CheckpointShard:
    shard.tensor.zero_()
    return shard


def try_altered(tier: DiskTier, seed: int) -> str:
    """Alter, load and judge once; return how it came out.  Raises AssertionError."""
    draw = random.Random(seed)
    altered = tier.alter(draw)
    try:
        with warnings_of_weft() as said:
            step = _loaded_or_refused(tier, altered)
        if not altered.is_forged:
            assert step == BEFORE, "what was altered was loaded"
            assert said, "passed over without a word"
        assert step in (BEFORE, NEWEST, REFUSED)
        assert not tier.case.canary.exists(), "code was run"
        tier.check_altered(step)
        tier.restore()
        if seed % tier.looks_again_every == 0:
            with warnings_of_weft() as said:
                assert loaded_step(tier.load()) == NEWEST, "a sound one was not loaded"
            assert not said, f"false alarm: {said}"
    except Exception as problem:
        raise AssertionError(f"seed {seed}: {altered.what}: {problem!r}") from problem
    if not altered.is_forged:
        return "found"
    return "forged_loaded" if step == NEWEST else "forged_refused"


def _loaded_or_refused(tier: DiskTier, altered: Alteration) -> int:
    try:
        return loaded_step(tier.load())
    except CheckpointError as problem:
        # The checkpoint of another model, whose digests fit, is sound: loading it is refused with what differs.
        if altered.is_forged and "does not fit" in str(problem):
            return REFUSED
        raise


def try_many(name: str, seeds: range, scratch: Path) -> Counter[str]:
    """Try one seed after another on one tier; return how many came out how.  Raises AssertionError."""
    tier = TIERS[name](scratch)
    try:
        return Counter(try_altered(tier, seed) for seed in seeds)
    finally:
        tier.close()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--number", type=int, default=10_000, help="alterations of each tier")
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument("--tiers", nargs="+", default=[*TIERS], choices=[*TIERS])
    options.add_argument("--report", type=Path, help="JSON file for the counts")
    chosen = options.parse_args()
    from benchmarks._results import machine, versions

    report = {"name": "alterations", "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    report |= {"machine": machine(), "versions": versions(), "first_seed": chosen.first_seed, "tiers": {}}
    for name in chosen.tiers:
        counts, seconds = Counter[str](), 0.0
        for first in range(chosen.first_seed, chosen.first_seed + chosen.number, AT_ONCE):
            began = time.perf_counter()
            seeds = range(first, min(first + AT_ONCE, chosen.first_seed + chosen.number))
            with tempfile.TemporaryDirectory() as scratch:
                counts += try_many(name, seeds, Path(scratch))
            seconds += time.perf_counter() - began
            tried = {"altered": counts.total(), **counts, "false_alarms": 0, "seconds": round(seconds, 1)}
            report["tiers"][name] = tried
            print(f"{name:8} {counts.total():,} altered: {dict(counts)}, no false alarm, {seconds:.0f} s", flush=True)
            if chosen.report:
                chosen.report.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
