"""What a loop of the user's own draws into a batch between taking it and training on it.

Such numbers come from the rank's generator, so that every rank would draw others for its samples than one process does.
A loop may draw for other things (a loader of its own, a print of samples): only a batch that was changed counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.api.batches.batch_shape import ROWS
from weft.errors import PlanError
from weft.model.seeding import others_draw
from weft.techniques.core import Generators

_ELSEWHERE = (
    "Draw by state.randn(batch, …), state.rand or state.randint, which are keyed by sample, in the dataset's"
    " __getitem__, whose generators are seeded by sample, or in the model or the loss, whose draws are keyed."
)
_DREW = (
    "between state.batches() and state.step() the loop changed {} and drew from {} generator: every rank would draw"
    " other numbers for its samples than one process does. " + _ELSEWHERE
)
_UNTOLD = (
    "between state.batches() and state.step() the loop changed {} while {} generator moved. If the loop drew, and not"
    " another thread of this process, every rank has drawn other numbers for its samples than one process does. "
    + _ELSEWHERE
)


class Yielded:
    """A batch as it was handed to the loop, and the generators at that time."""

    def __init__(self, fields: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        self._versions = {id(value): (value, value._version) for value in fields.values()}
        self._rows = fields.get(ROWS)
        """Made anew whenever a batch is looked at."""
        self._generators = Generators.now(device)

    def check(self, fields: Mapping[str, Tensor]) -> None:
        """Refuse a batch that is not as it was handed out, when numbers were drawn since.

        Where other threads may have moved it, a warning says so.

        Raises:
            PlanError: it was changed, or is another, and a generator has moved.
        """
        same = {name: self._is_same(value) for name, value in fields.items() if name != ROWS}
        if ROWS in fields:
            same[ROWS] = self._rows is not None and torch.equal(self._rows, fields[ROWS])
        changed = [name for name, is_same in same.items() if not is_same]
        whose = self._generators.moved(Generators.now(self._device)) if changed else ""
        if not whose:
            return
        if others_draw():
            warnings.warn(_UNTOLD.format(", ".join(changed), whose), stacklevel=3)
        else:
            raise PlanError(_DREW.format(", ".join(changed), whose))

    def _is_same(self, value: Tensor) -> bool:
        known = self._versions.get(id(value))
        return known is not None and known[0] is value and known[1] == value._version
