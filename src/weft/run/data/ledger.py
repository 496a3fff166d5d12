"""A ledger of samples: which part of the order was in each step, written by the ranks while they train.

    ledger/order.json         the order that all positions count in: seed, sizes of the corpora, batch
    ledger/data-00000.txt     one line for each step of a data rank, in the order in which they were done
        begin 2 12 4              generation 2 goes on after 12 finished steps, on 4 data ranks
        step 2 13 96 98 5a1f…     step 13: positions 96 and 97 of the order, and the xxh3-64 of their sample ids
        step 2 14 104 106 07c2… skipped

A line reaches the operating system before the step can be part of a save, so a killed rank loses none of what was
committed; saves that last sync it to the disk first.  `weft.run.data.check_ledger` reads it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from weft.config.document import typed
from weft.errors import DataError
from weft.files import write_whole
from weft.run.data._batches import BatchSource
from weft.run.data._prepared import PreparedData
from weft.run.data._sampler import Sampler
from weft.run.data.loader_order import LoaderOrder

if TYPE_CHECKING:
    from torch import Tensor

    from weft.comm.mesh import Mesh

logger = logging.getLogger(__name__)

FOLDER, ORDER = "ledger", "order.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """All that decides the order of a run's samples."""

    seed: int
    sizes: tuple[int, ...]
    """Samples of each corpus."""
    weights: tuple[float, ...]
    """Proportions in which the corpora are drawn from."""
    global_batch_size: int
    fingerprint: str
    """Digest of the data; empty for a session's loader."""
    loader: Literal["", "shuffled", "in order"] = ""
    """How the passes of a session's loader are ordered; empty for the data of a recipe."""
    pass_size: int = 0
    """Samples of a pass of that loader."""

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Samples of an epoch of each corpus."""
        return (self.pass_size,) if self.loader else self.sizes

    def sampler(self) -> Sampler | LoaderOrder:
        """Return what says the order."""
        if self.loader:
            return LoaderOrder(self.sizes[0], self.pass_size, seed=self.seed, shuffles=self.loader == "shuffled")
        return Sampler(
            self.sizes, seed=self.seed, global_batch_size=self.global_batch_size, weights=self.weights or None
        )

    def write(self, path: Path) -> None:
        """Keep it for good; where one is there, compare.

        Raises:
            DataError: the folder has the ledger of another order.
            OSError: the disk is full or not writable.
        """
        if path.is_file():
            if typed(SampleOrder, json.loads(path.read_text())) != self:
                raise DataError(
                    f"{path} is of another order of samples than that of this run. Move the folder {path.parent} away,"
                    " or go on with the recipe, or loader, and the data that it was begun with."
                )
            return
        write_whole(path, json.dumps(asdict(self)), durable=True)


def digest_of_ids(ids: NDArray[np.int64]) -> str:
    """Return the xxh3-64 of sample ids, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, "<i8").tobytes())


class SampleLedger:
    """Writes the ledger of one data rank.  Make it on one rank of each data rank."""

    def __init__(
        self,
        folder: Path,
        order: SampleOrder,
        *,
        generation: int,
        data_index: int,
        num_data_ranks: int,
        start: int,
        stop: int,
    ) -> None:
        """Open the file of a data rank, and end a line that a killed rank left unfinished.

        Args:
            folder: the folder of the run.
            generation: number that grows with every start of ranks in this folder.
            start, stop: the data rank's part of every global batch.

        Raises:
            DataError: the folder has the ledger of another order.
            OSError: the disk is full or not writable.
        """
        self._folder = folder / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if data_index == 0:
            order.write(self._folder / ORDER)
        self._generation, self._num_data_ranks = generation, num_data_ranks
        self._batch, self._start, self._stop = order.global_batch_size, start, stop
        path = self._folder / f"data-{data_index:05d}.txt"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        content = path.read_bytes()
        self._end = content.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, self._end)
        self._unwritten = b""
        """Lines that a full disk has not taken yet."""

    def begin(self, step: int) -> None:
        """The loop begins after `step` finished steps."""
        self._write(f"begin {self._generation} {step} {self._num_data_ranks}")

    def add(self, step: int, microbatches: Sequence[Mapping[str, Tensor]], *, skipped: bool) -> None:
        """A step, counted from 1, has been done with these microbatches; `skipped`: without its update."""
        ids = np.concatenate([batch["sample_ids"].cpu().numpy() for batch in microbatches])
        first = (step - 1) * self._batch
        self.add_samples(step, range(first + self._start, first + self._stop), ids, skipped=skipped)

    def add_samples(self, step: int, positions: range, ids: NDArray[np.int64], *, skipped: bool) -> None:
        """`add`, of a step that took samples with these ids, which a loader read at these positions of the order."""
        line = f"step {self._generation} {step} {positions.start} {positions.stop} {digest_of_ids(ids)}"
        self._write(f"{line} skipped" if skipped else line)

    def sync(self) -> None:
        """Make what was written so far durable: a save is about to last.  A failure is only warned about."""
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            logger.warning("%s could not be synced: %s", self._folder, problem)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, line: str) -> None:
        """Append a line at a known place, so that one which the disk took in part is written again."""
        content = self._unwritten + line.encode() + b"\n"
        try:
            written = os.pwrite(self._descriptor, content, self._end)
            if written == len(content):
                self._end, self._unwritten = self._end + written, b""
                return
            os.ftruncate(self._descriptor, self._end)
            problem = "the disk took only a part of a line"
        except OSError as error:
            problem = error.strerror
        if not self._unwritten:
            logger.warning("%s is not written (%s); training goes on, and its lines are kept", self._folder, problem)
        self._unwritten = content


def open_ledger(
    data: BatchSource, prepared: PreparedData, mesh: Mesh, folder: Path, generation: int
) -> SampleLedger | None:
    """Open this data rank's ledger on the first of its ranks; None on the others, which read the same samples."""
    if any(place for axis, place in mesh.coordinates.items() if axis not in ("replicate", "shard")):
        return None
    spec = prepared.train
    order = SampleOrder(
        seed=spec.seed,
        sizes=data.sizes,
        weights=spec.weights,
        global_batch_size=spec.global_batch_size,
        fingerprint=prepared.fingerprint,
    )
    start, stop = data.part
    return SampleLedger(
        folder,
        order,
        generation=generation,
        data_index=mesh.data_index,
        num_data_ranks=mesh.plan.data,
        start=start,
        stop=stop,
    )
