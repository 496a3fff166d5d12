"""Which samples the steps of a loop have trained on, for the ledger of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.api.batches.batch_shares import BatchShare
from weft.api.batches.stream import BatchStream, UserBatch, fields_of
from weft.comm.mesh import Mesh
from weft.errors import DataError
from weft.events import FolderToken, StepEvent
from weft.events.folder_lock import FolderLock
from weft.run.checkpoint import Peers
from weft.run.data.ledger import SampleLedger, SampleOrder


@final
class TrainedSamples:
    """The ledger of a session's model.  Calls are made on every rank alike; one rank of each data rank writes.

    A batch is known again by its tensors.  A loop may make others of it; then it is the one that was handed out last.
    """

    def __init__(
        self, folder: Path, lock: FolderLock | FolderToken, stream: BatchStream, mesh: Mesh, share: BatchShare
    ) -> None:
        """Raises `DataError`, on every rank, for a loader whose order is not known."""
        if stream.dataset is None:
            raise DataError(
                "weft.session(ledger=True): the loader only iterates, so nobody knows the indices of its samples. Give"
                " a DataLoader over a data set with __getitem__ and no sampler of its own, or leave ledger= out."
            )
        self._folder, self._lock, self._stream, self._mesh, self._share = folder, lock, stream, mesh, share
        self._peers = Peers.of_group(mesh["world"])
        self._of_field = WeakIdKeyDictionary()
        self._last = self._taken = 0, np.zeros(0, np.int64)
        """First position and sample ids of the share that was handed out last, and of the one that a step takes."""
        self._ledger: SampleLedger | None = None
        self._has_begun = False
        self._open()

    def _open(self) -> None:
        """Open the file of this data rank, for a generation that begins: the folder's token grows with each."""
        token = self._lock.token if isinstance(self._lock, FolderLock) else self._lock
        (number,) = self._peers.share(token.owner.token if token is not None else 0)
        self._has_begun = False
        if any(place for axis, place in self._mesh.coordinates.items() if axis not in ("replicate", "shard")):
            return
        self._ledger = SampleLedger(
            self._folder,
            self._order(),
            generation=number,
            data_index=self._mesh.data_index,
            num_data_ranks=self._mesh.plan.data,
            start=self._share.start,
            stop=self._share.stop,
        )

    def _order(self) -> SampleOrder:
        order = self._stream.order
        return SampleOrder(
            seed=self._stream.seed,
            sizes=order.sizes,
            weights=(),
            global_batch_size=self._stream.batch_size,
            fingerprint="",
            loader="shuffled" if self._stream.shuffles else "in order",
            pass_size=order.pass_sizes[0],
        )

    def restart(self) -> None:
        """The loop goes on from a save: what follows is of another generation than what it has done."""
        if not self._has_begun:
            return
        if isinstance(self._lock, FolderToken):
            raise DataError(
                "weft.session(ledger=True): a loop on several hosts cannot go back to a save once it has begun. Let it"
                " begin again, or leave ledger= out."
            )
        self.close()
        if self._lock.token is not None:
            self._lock.renew()
        self._open()

    def handed_out(self, batch: UserBatch, step: int) -> None:
        """The loop is handed the batch that was read for the step behind `step` finished ones."""
        self._last = step * self._stream.batch_size + self._share.start, self._stream.ids
        for value in fields_of(batch).values():
            self._of_field[value] = self._last

    def take(self, fields: Mapping[str, Tensor]) -> None:
        """A step takes a batch."""
        known = (self._of_field.get(value) for value in fields.values())
        self._taken = next((read for read in known if read is not None), self._last)

    def took(self, event: StepEvent) -> None:
        """Write the line of a step that is done.  Call it before the step can be part of a save."""
        if not self._has_begun and self._ledger is not None:
            self._ledger.begin(event.step - 1)
        self._has_begun = True
        if self._ledger is not None:
            first, ids = self._taken
            self._ledger.add_samples(event.step, range(first, first + len(ids)), ids, skipped=event.skipped)

    def sync(self) -> None:
        """Make the lines durable: a save is about to last."""
        if self._ledger is not None:
            self._ledger.sync()

    def close(self) -> None:
        """Close the file."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()
