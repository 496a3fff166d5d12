"""Passes through a loader that only iterates, which a run resumes in the middle of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from weft.checkpoint import Json
from weft.entry._seen_batches import SeenBatches
from weft.entry._user_batches import BatchStream, UserBatch


@final
class LoaderPasses:
    """Where a training is in such a loader: `number` of passes that are through, batches `taken` of the present one."""

    def __init__(self, stream: BatchStream, seen: SeenBatches) -> None:
        self._stream, self._seen = stream, seen
        self.number = self.taken = 0
        self._last = ""
        """Digest of the last batch that was handed out: the stream may have looked at one more."""
        self._expected = ""
        """The same of the save that the run goes on from, until it has gone on."""

    def batches(self, steps: int | None) -> Iterator[UserBatch]:
        """Yield the coming batches whole: `steps` of them, or all to the end of the pass."""
        skipped, number = self.taken, -1
        for number, batch in enumerate(self._stream.iterate()):
            if number < skipped:
                if number + 1 == skipped:
                    self._seen.check_skipped(self._stream.digest, self._expected, number)
                continue
            if steps is not None and number >= skipped + steps:
                return
            self.taken, self._last, self._expected = number + 1, self._stream.digest, ""
            yield batch
        self._seen.check_reached(number + 1, skipped)
        self.taken = 0
        self.number += 1

    def state(self) -> dict[str, Json]:
        """What `load` takes back."""
        return {"in_pass": self.taken, "passes": self.number, "last_batch": self._last}

    def load(self, state: Mapping[str, Json]) -> None:
        """Go on where the run was saved; a save of another kind of loader begins a pass."""
        taken, number = state.get("in_pass"), state.get("passes")
        self.taken = taken if isinstance(taken, int) else 0
        self.number = number if isinstance(number, int) else 0
        self._last = self._expected = str(state.get("last_batch") or "")
