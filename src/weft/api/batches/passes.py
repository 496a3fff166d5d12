"""The place of a run in its data: passes through a loader, epochs, and whether a save was of the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from weft.api.batches.stream import BatchStream, UserBatch
from weft.config.document import Json
from weft.errors import CheckpointError, DataError, RecipeError


@final
class LoaderPasses:
    """The place of a training in a loader that only iterates: `number` of finished passes, batches `taken` of the
    present one."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream
        self.number = self.taken = 0
        self._last = ""
        """Digest of the last batch that was handed out: the stream may have looked at one more."""
        self._expected = ""
        """The same digest of the save that the run goes on from, until it has gone on."""

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
                if number + 1 == skipped and self._expected not in ("", self._stream.digest):
                    raise DataError(
                        f"batch {number} of the loader is not the one that the run took there before, so samples would"
                        " be repeated and left out. Make the loader's order a function of seed and epoch (a generator="
                        " of the sampler's own, seeded anew in each pass), or take and save whole passes."
                    )
                continue
            if most is not None and number >= skipped + most:
                return
            self.taken, self._last, self._expected = number + 1, self._stream.digest, ""
            yield batch
        if number + 1 < skipped:
            raise DataError(
                f"the loader has {number + 1} batches, and the saved run had taken {skipped} of its pass: none is left."
                " Give it the data of the saved run, or save where a pass ends."
            )
        self.taken = 0
        self.number += 1

    def state(self) -> dict[str, Json]:
        """Return the state that `load` takes back."""
        return {"in_pass": self.taken, "passes": self.number, "last_batch": self._last}

    def load(self, state: Mapping[str, Json]) -> None:
        """Go on where the run was saved; a save of another kind of loader begins a pass."""
        taken, number = state.get("in_pass"), state.get("passes")
        self.taken = taken if isinstance(taken, int) else 0
        self.number = number if isinstance(number, int) else 0
        self._last = self._expected = str(state.get("last_batch") or "")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass through the data: yields this rank's share of its global batches, and has their number as its `len`."""

    number: int
    """Counted from 0."""
    _batches: Callable[[], Iterator[Any]]
    _num_steps: int | None
    _at_end: Callable[[], None]
    """Note that all batches have been taken."""

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
    """Do nothing: there is no work before the last epoch."""


def refuse_other_data(state: Mapping[str, Json], *, batch_size: int, num_samples: int | None, seed: int) -> None:
    """Steps, samples and schedules count in the saved run's batches: with others they would mean something else.

    Raises:
        CheckpointError: the save has another global batch, another number of samples or another seed.
    """
    now: dict[str, tuple[Json, str, str]] = {
        "batch_size": (batch_size, "a global batch of {}", "Give the loader batch_size={}"),
        "num_samples": (num_samples, "{} samples in the loader", "Give it the same data"),
        "seed": (seed, "the seed {}", "Write weft.session(seed={})"),
    }
    for name, (mine, what, fix) in now.items():
        saved = state.get(name, mine)
        if saved != mine:
            raise CheckpointError(
                f"the run was saved with {what.format(saved)}, and this session has {what.format(mine)}: samples"
                f" would be repeated and skipped. {fix.format(saved)}, or begin a new run from the weights alone"
                " (state.export, and load them before prepare)."
            )
