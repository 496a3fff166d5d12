"""Which batches of the user's loader a state has taken, so that others, on a rank or after a resume, are noticed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.api.batches.stream import digest_of
from weft.errors import DataError


class SeenBatches:
    """Digests of batches.  `shared_by_all`: no rank has a share of its own, so all train on the same batch."""

    def __init__(self, *, shared_by_all: bool) -> None:
        self._shared_by_all = shared_by_all
        self._of_field: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensor that was handed out → digest of the whole batch that it is a share of."""
        self.now = ""
        """Digest of this step's batch, where all ranks must have the same; empty where that is not known."""

    def note(self, fields: Mapping[str, Tensor], digest: str) -> None:
        """Remember of which batch the fields are a share."""
        for value in fields.values():
            self._of_field[value] = digest

    def take(self, fields: Mapping[str, Tensor]) -> None:
        """Say that the next step trains on `fields`, which the loop may have made anew."""
        known = (self._of_field.get(value) for value in fields.values())
        self.now = digest_of(fields) if self._shared_by_all else next((d for d in known if d is not None), "")

    def check_skipped(self, digest: str, last: str, number: int) -> None:
        """Look at the last batch that the run passes over, where it goes on within a pass: it must be the one that it
        took there, whose digest was `last` (empty: not known).

        Raises:
            DataError: it is another.
        """
        if last and digest != last:
            raise DataError(
                f"batch {number} of the loader is not the one that the run took there before, so samples would be"
                " repeated and left out. Make the loader's order a function of seed and epoch (a generator= of the"
                " sampler's own, seeded anew in each pass), or take and save whole passes."
            )

    def check_reached(self, number: int, skipped: int) -> None:
        """Look at a pass that is through after `number` batches, of which `skipped` were to be passed over.

        Raises:
            DataError: there were fewer.
        """
        if number < skipped:
            raise DataError(
                f"the loader has {number} batches, and the saved run had taken {skipped} of its pass: none is left."
                " Give it the data of the saved run, or save where a pass ends."
            )
