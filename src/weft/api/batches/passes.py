"""Passes through a loader that only iterates, which a run resumes in the middle of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from weft.api.batches.seen_batches import SeenBatches
from weft.api.batches.stream import BatchStream, UserBatch
from weft.config.document import Json
from weft.errors import DataError


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
        """Yield the coming batches whole: `steps` of them, through as many passes as that takes, or all to the end of
        the pass."""
        left = steps
        while left is None or left > 0:
            before, is_new = left, not self.taken
            for batch in self._pass(left):
                left = None if left is None else left - 1
                yield batch
            if left is None:
                return
            if is_new and left == before:
                raise DataError(
                    f"the loader yielded no batch in pass {self.number}, and {left} more steps were asked for. Give an"
                    " iterable whose __iter__ starts anew, or ask for no more steps than it has batches."
                )

    def _pass(self, most: int | None) -> Iterator[UserBatch]:
        """The rest of the present pass, or `most` batches of it."""
        skipped, number = self.taken, -1
        for number, batch in enumerate(self._stream.iterate()):
            if number < skipped:
                if number + 1 == skipped:
                    self._seen.check_skipped(self._stream.digest, self._expected, number)
                continue
            if most is not None and number >= skipped + most:
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
