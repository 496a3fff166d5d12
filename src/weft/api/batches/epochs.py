"""Passes through the data, for loops that count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.errors import DataError, RecipeError


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass through the data: yields this rank's share of its global batches, and has their number as its `len`."""

    number: int
    """Counted from 0."""
    _batches: Callable[[], Iterator[Any]]
    _num_steps: int | None
    _at_end: Callable[[], None]
    """What happens when all batches have been taken."""

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches()
        self._at_end()

    def __len__(self) -> int:
        if self._num_steps is None:
            raise DataError(
                "the loader only iterates, so nobody knows how many steps an epoch has. Give a DataLoader over a"
                " map-style dataset, or count the batches yourself."
            )
        return self._num_steps


class Epochs:
    """The epochs up to a number, from the one that the run is in; `len` is how many of them are left.

    `at_end` is called when the last of them is through.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        now: Callable[[], int],
        num_steps: int | None,
        number: int,
        at_end: Callable[[], None],
    ) -> None:
        if type(number) is not int or number < 0:
            raise RecipeError(f"state.epochs({number!r}) is no number of epochs. Give a whole number from 0 on.")
        self._batches, self._now, self._num_steps, self._number = batches, now, num_steps, number
        self._at_end = at_end

    def __len__(self) -> int:
        return max(self._number - self._now(), 0)

    def __iter__(self) -> Iterator[Epoch]:
        for number in range(self._now(), self._number):
            at_end = self._at_end if number + 1 == self._number else _nothing
            yield Epoch(number, self._batches, self._num_steps, at_end)
            if self._now() == number:
                raise RecipeError(
                    f"epoch {number} was left before its last step, so the next one would begin with the rest of it."
                    " Take all its batches, or `break` out of both loops."
                )


def _nothing() -> None:
    """Before the last epoch there is nothing to do."""
