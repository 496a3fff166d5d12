"""Reading ahead in threads: the same batches in any order, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weft.config.document import plain, typed
from weft.errors import DataError
from weft.run.data import Sampler
from weft.run.data._fields import Fields
from weft.run.data._prefetch import Prefetcher
from weft.run.data._reader import TrainReader, TrainSpec
from weft.run.data._samples import ImageSpec, TokenSpec
from weft.run.data._tokens import TokenTask

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
    made = Prefetcher(reader, workers=2)
    yield made
    made.close()
    made.close()


def test_batches_are_those_read_inline_in_any_order(reader: TrainReader, prefetcher: Prefetcher) -> None:
    for step in (*range(20), 7, 8, 9, 100, 0, 0, 0, 3, 4):
        assert equal(prefetcher.read(step), reader.read(step)), step


def test_a_batch_is_the_reader_s_own_copy(reader: TrainReader, prefetcher: Prefetcher) -> None:
    first = prefetcher.read(0)
    for step in range(1, 12):
        prefetcher.read(step)
    assert equal(first, reader.read(0))


def test_storage_that_does_not_answer_is_an_error() -> None:
    answers = threading.Event()

    class Hanging(TrainReader):
        def read(self, step: int) -> Fields:
            answers.wait()
            return super().read(step)

    prefetcher = Prefetcher(Hanging(SPEC, 2, 5), workers=1, stuck_seconds=0.2)
    try:
        with pytest.raises(DataError, match="step 3 have been read for 0.2 s and are not there: the storage"):
            prefetcher.read(3)
        began = time.monotonic()
        prefetcher.close()  # waits for nobody who hangs
        assert time.monotonic() - began < 5.0
    finally:
        answers.set()


def test_many_epochs_read_by_many_threads_keep_their_order(reader: TrainReader) -> None:
    """Permutations of epochs are kept for a while, and all threads look them up."""
    prefetcher = Prefetcher(reader, workers=8)
    try:
        for step in range(0, 3000, 7):
            assert equal(prefetcher.read(step), TrainReader(SPEC, 2, 5).read(step)), step
    finally:
        prefetcher.close()


class _Slow(TrainReader):
    def read(self, step: int) -> Fields:
        time.sleep(0.05)
        return super().read(step)


def test_steps_are_read_while_others_are_computed() -> None:
    prefetcher = Prefetcher(_Slow(SPEC, 2, 5), workers=1)
    try:
        waits: list[float] = []
        for step in range(8):
            began = time.perf_counter()
            prefetcher.read(step)
            waits.append(time.perf_counter() - began)
            time.sleep(0.1)
        assert sum(waits[1:]) < 7 * 0.05 / 2, waits
    finally:
        prefetcher.close()


def test_broken_sample_is_reported_by_name(tmp_path: Path) -> None:
    class Broken(TrainReader):
        def read(self, step: int) -> Fields:
            raise DataError(f"the sample of step {step} is broken")

    prefetcher = Prefetcher(Broken(SPEC, 2, 5), workers=1)
    try:
        for step in (0, 1, 0):
            with pytest.raises(DataError, match=f"sample of step {step} is broken"):
                prefetcher.read(step)
    finally:
        prefetcher.close()


def test_closing_ends_the_threads_and_what_was_begun(reader: TrainReader) -> None:
    before = threading.active_count()
    for _ in range(3):
        prefetcher = Prefetcher(reader, workers=2)
        prefetcher.read(0)
        assert all(thread.name.startswith("weft-data") for thread in threading.enumerate()[before:])
        prefetcher.close()
    assert threading.active_count() == before


def test_reading_and_preparation_do_not_import_torch() -> None:
    code = "import sys, weft.run.data, weft.run.data._prefetch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_specs_travel_as_json() -> None:
    image = ImageSpec(source="synthetic", split="train", shape=(1, 2, 2), num_classes=3, num_samples=9)
    for spec in (SPEC, TrainSpec(sets=(image,), weights=(1.0,), seed=-1, global_batch_size=2)):
        assert typed(TrainSpec, json.loads(json.dumps(plain(spec)))) == spec
    assert isinstance(TrainReader(SPEC, 0, 6).sampler, Sampler)
