"""Prefetch by processes: the same batches, whatever happens to a helper, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weft.data import Sampler
from weft.data._fields import Fields
from weft.data._prefetch import Prefetcher
from weft.data._reader import TrainReader, TrainSpec
from weft.data._samples import ImageSpec, TokenSpec
from weft.data._tokens import TokenTask
from weft.errors import DataError

TASK = TokenTask(kind="causal_lm", sequence_length=16, vocabulary_size=100, separator=0, isolated=True)
TOKENS = TokenSpec(
    folder=None, fingerprint="synthetic", split="train", validation_fraction=0.0, task=TASK, num_samples=37
)
SPEC = TrainSpec(sets=(TOKENS, TOKENS), weights=(2.0, 1.0), seed=5, global_batch_size=6)


def equal(left: Fields, right: Fields) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.fixture
def reader() -> TrainReader:
    return TrainReader(SPEC, 2, 5)


@pytest.fixture
def prefetcher(reader: TrainReader) -> Iterator[Prefetcher]:
    made = Prefetcher(reader, SPEC, 2, 5, workers=2, timeout_seconds=5.0)
    yield made
    made.close()
    made.close()


def test_batches_are_those_read_inline_in_any_order(reader: TrainReader, prefetcher: Prefetcher) -> None:
    assert prefetcher.worker_pids == []
    for step in (*range(20), 7, 8, 9, 100, 0, 0, 0, 3, 4):
        assert equal(prefetcher.read(step), reader.read(step)), step
    assert len(prefetcher.worker_pids) == 2


def test_a_batch_is_the_reader_s_own_copy(reader: TrainReader, prefetcher: Prefetcher) -> None:
    first = prefetcher.read(0)
    for step in range(1, 12):
        prefetcher.read(step)
    assert equal(first, reader.read(0))


def test_killed_helpers_are_replaced_with_the_same_order(reader: TrainReader, prefetcher: Prefetcher) -> None:
    for step in range(24):
        if step % 5 == 2:
            os.kill(prefetcher.worker_pids[step % 2], signal.SIGKILL)
        assert equal(prefetcher.read(step), reader.read(step)), step


def test_stuck_helper_is_replaced(reader: TrainReader) -> None:
    prefetcher = Prefetcher(reader, SPEC, 2, 5, workers=1, timeout_seconds=1.5)
    try:
        prefetcher.read(0)
        stuck = prefetcher.worker_pids[0]
        os.kill(stuck, signal.SIGSTOP)
        for step in range(1, 6):
            assert equal(prefetcher.read(step), reader.read(step))
        assert prefetcher.worker_pids[0] != stuck
        assert not Path(f"/proc/{stuck}").exists()
    finally:
        prefetcher.close()


def test_helpers_ignore_the_signals_of_a_stop(reader: TrainReader, prefetcher: Prefetcher) -> None:
    for step in range(3):  # every helper has answered once: it is up, and has set what it does on a signal
        prefetcher.read(step)
    pids = prefetcher.worker_pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    for step in range(3, 8):
        assert equal(prefetcher.read(step), reader.read(step))
    assert prefetcher.worker_pids == pids


def test_broken_sample_is_reported_by_name(reader: TrainReader, tmp_path: Path) -> None:
    gone = TokenSpec(
        folder=str(tmp_path), fingerprint="x", split="train", validation_fraction=0.0, task=TASK, num_samples=0
    )
    spec = TrainSpec(sets=(gone,), weights=(1.0,), seed=1, global_batch_size=6)
    prefetcher = Prefetcher(reader, spec, 2, 5, workers=1)
    try:
        with pytest.raises(DataError, match="holds no prepared data"):
            prefetcher.read(0)
    finally:
        prefetcher.close()


def test_helper_that_cannot_start_is_an_error(reader: TrainReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    prefetcher = Prefetcher(reader, SPEC, 2, 5, workers=1)
    try:
        with pytest.raises(DataError, match=r"batch of step 0 ended with status 1, 3 times.*prefetch_workers = 0"):
            prefetcher.read(0)
    finally:
        prefetcher.close()


PARENT = """
import sys, time
from test_prefetch import SPEC
from weft.data._prefetch import Prefetcher
from weft.data._reader import TrainReader
prefetcher = Prefetcher(TrainReader(SPEC, 2, 5), SPEC, 2, 5, workers=2)
prefetcher.read(0)
print(*prefetcher.worker_pids, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["exit", "wait"])
def test_helpers_end_with_their_parent(ending: str) -> None:
    command = [sys.executable, "-W", "error", "-c", PARENT, ending]
    parent = subprocess.Popen(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    if ending == "wait":
        parent.kill()
    _, complaints = parent.communicate(timeout=30)
    assert complaints == ""
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_closing_frees_descriptors(reader: TrainReader) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        prefetcher = Prefetcher(reader, SPEC, 2, 5, workers=1)
        prefetcher.read(0)
        prefetcher.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_helpers_and_preparation_do_not_import_torch() -> None:
    code = "import sys, weft.data, weft.data._prefetch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_specs_travel_as_json() -> None:
    image = ImageSpec(source="synthetic", split="train", shape=(1, 2, 2), num_classes=3, num_samples=9)
    for spec in (SPEC, TrainSpec(sets=(image,), weights=(1.0,), seed=-1, global_batch_size=2)):
        assert TrainSpec.from_json(spec.to_json()) == spec
    assert isinstance(TrainReader(SPEC, 0, 6).sampler, Sampler)
