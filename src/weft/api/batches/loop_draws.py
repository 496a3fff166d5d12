"""Random numbers that a loop of the user's own draws for a batch.

They come from the rank's generator, so that every rank would draw others for its samples than one process does.  Where
steps are Weft's, a batch that the loop has drawn into is refused (`YieldedBatch`); it may draw for other things.  Where
the loop keeps its own steps, its draws are made for the global batch (`PlacedDraws`).
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from weft.api.batches.batch_shape import ROWS
from weft.errors import PlanError
from weft.model.seeding import others_draw
from weft.techniques.core import Generators
from weft.techniques.core._draw_net import DrawMode
from weft.techniques.randomness.draws import shape_of_draw

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


class YieldedBatch:
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


Draw = Callable[..., Any]

_OF_TORCH = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal"),
    "randperm",
)
_OF_NUMPY = (
    *("beta", "binomial", "choice", "exponential", "gamma", "normal", "permutation", "poisson", "rand", "randint"),
    *("randn", "random", "random_sample", "standard_normal", "uniform"),
)
_IN_PLACE = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_DEEPEST = 8
"""Calls between a loop and a draw that are told apart."""
_ELSE = (
    "Draw with a row for each sample (len(x)), in the model's forward or in the dataset's __getitem__, whose draws are"
    " keyed by sample; or give the draw a torch.Generator of your own, for numbers that are the same on every rank."
)


@final
class PlacedDraws:
    """The draws of a loop between a batch and the next: on several data ranks for the whole batch, of which each rank
    takes its rows.

    All ranks' generators stand where rank 0's stood when a pass began, and every rank draws alike from then on, so the
    numbers are those of one process.  Torch's functions that draw are changed for that while such a session is open; in
    models, loaders and steps they do what they always do, and what else draws is noticed by the generator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = self._start = self._stop = 0
        """Samples of the batch in hand, and those of this rank."""
        self._is_on = self._makes = False
        self._aside = 0
        self._thread = threading.get_ident()
        self._put_back: list[Callable[[], None]] = []
        self._stood: tuple[bytes, ...] = ()
        """States of the generators behind the last draw that was seen."""
        self._known: dict[tuple[Any, ...], bool] = {}
        self._alike: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """Draws by line of the loop: whether they are for its samples, and else their shape."""
        self.has_drawn = False
        """Whether the loop has drawn since the session began."""

    # ── when ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, size: int, start: int, stop: int, *, is_made: bool = False) -> None:
        """The loop has a batch of `size` samples, of which this rank has those from `start` to `stop`.

        `is_made`: the loop makes its batches itself, by draws for all samples, which are the same on all ranks.
        """
        if not self._put_back:
            self._install()
        self._size, self._start, self._stop, self._makes = size, start, stop, is_made
        self._is_on, self._stood = True, self._states()

    def end(self) -> None:
        """Note that the loop has no batch: loaders draw now, or the loop for itself."""
        self._is_on = False

    def enter(self, *_: Any) -> None:
        """Note that a model is called, or trained: its draws are its own."""
        self._aside += 1

    def leave(self, *_: Any) -> None:
        """Note that a model's call has ended."""
        self._aside -= 1

    @contextmanager
    def aside(self) -> Generator[None]:
        """Draws within this block do not count as the loop's."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def check(self) -> None:
        """Refuse draws that were not seen.

        Raises:
            PlanError: a generator has moved otherwise than by what this module places.
        """
        # Every draw that is seen is noted in `_stood`: a generator that stands elsewhere was moved by something unseen.
        if self._is_on and self._states() != self._stood:
            raise PlanError(
                "the loop drew from torch's generator between a batch and session.backward() by what has no row for"
                " each sample (a dropout, a gamma or Poisson draw, a function that torch was asked for before), and"
                " this rank has a part of the batch's samples: its numbers would be others than those of one process."
                f" {_ELSE}"
            )

    def digest(self) -> str:
        """Return a digest of the generators' states; the same on all ranks while all draw alike."""
        digest = xxhash.xxh3_64()
        for state in self._states():
            digest.update(state)
        return digest.hexdigest()

    def _states(self) -> tuple[bytes, ...]:
        own = torch.get_rng_state().numpy().tobytes()
        if self._device.type == "cpu":
            return (own,)
        return own, torch.get_device_module(self._device).get_rng_state(self._device).numpy().tobytes()

    # ── how ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _install(self) -> None:
        for name in _OF_TORCH:
            self._put(torch, name, self._of_torch)
        for name in _IN_PLACE:
            self._put(Tensor, name, self._of_torch)
        for name in _OF_NUMPY:
            self._put(np.random, name, self._of_numpy)

    def _put(self, owner: Any, name: str, make: Callable[[Draw], Draw]) -> None:
        plain, is_own = getattr(owner, name), name in vars(owner)
        draw = make(plain)

        @functools.wraps(plain)
        def placed(*args: Any, **kwargs: Any) -> Any:
            # A draw in another thread, or from a generator of the loop's own, is not the loop's here.
            seen = self._is_on and not self._aside and threading.get_ident() == self._thread
            if not seen or kwargs.get("generator") is not None:
                return plain(*args, **kwargs)
            self.check()
            self.has_drawn = True
            drawn = draw(*args, **kwargs)
            self._stood = self._states()
            return drawn

        setattr(owner, name, placed)

        def put_back() -> None:
            if getattr(owner, name) is placed:
                setattr(owner, name, plain) if is_own else delattr(owner, name)

        self._put_back.append(put_back)

    def close(self) -> None:
        """Give torch its functions back."""
        self.end()
        while self._put_back:
            self._put_back.pop()()

    @property
    def _rows(self) -> int:
        """Samples that the loop was handed: one where it has none of its own."""
        return max(self._stop - self._start, 1)

    def _is_of_samples(self, shape: Sequence[int], name: str) -> bool:
        """Whether a draw has a row for each of this rank's samples; if not, it is the same on all ranks.

        Where a number could be either, what the same line drew of other batches tells.

        Raises:
            PlanError: neither can be told.
        """
        if not shape or 0 in shape:
            return False
        rows, place = self._rows, _place_of_call()
        # A line that drew for samples once draws for them again; only what a shape leaves open is looked up.
        known = self._known.get(place)
        if self._makes and (shape[0] != rows or known is False):
            is_drawn = False  # for a batch that the loop makes
        # One row per rank: the size 1 says nothing.
        elif rows == 1:
            is_drawn = known if known is None or not known else shape[0] == 1 or None
        elif shape[0] == rows:
            is_drawn = known is None or known is True or self._alike.get(place) != tuple(shape)
        else:
            # A multiple of the rows may be several numbers for each sample.
            is_drawn = False if shape[0] == 1 or (shape[0] % rows and rows not in shape) else None
        if is_drawn is None:
            raise PlanError(
                f"the loop drew {name} of shape {tuple(shape)} where this rank has {rows} of the batch's {self._size}"
                f" samples, and nothing says which numbers are whose. {_ELSE}"
            )
        self._known[place] = is_drawn
        if not is_drawn:
            self._alike[place] = tuple(shape)
        return is_drawn

    def _cut(self, whole: Tensor) -> Tensor:
        # A rank without samples computes on the first one of all.
        stop = self._stop if self._start < self._stop else 1
        start = self._start if self._start < self._stop else 0
        return whole[start:stop].clone(memory_format=torch.preserve_format)

    def _like_full_batch(self, tensor: Tensor) -> Tensor:
        """Room for what a tensor has for this rank's samples, for all samples."""
        order = torch.channels_last if _is_channels_last(tensor) else torch.contiguous_format
        shape = (self._size, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=order)

    def _of_torch(self, plain: Draw) -> Draw:
        name = plain.__name__ if plain.__name__.endswith("_") else f"torch.{plain.__name__}"

        def draw(*args: Any, **kwargs: Any) -> Any:
            shown = f"{name}(out=…)" if kwargs.get("out") is not None else name
            with DrawMode(lambda func, args, kwargs: self._place(shown, func, args, kwargs)):
                return plain(*args, **kwargs)

        return draw

    def _place(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that draws: for all samples, of which this rank's rows are kept, where it has a row each."""
        shape, _ = shape_of_draw(func, args, kwargs)
        if name == "torch.randperm" and shape[0] == self._rows:
            raise PlanError(
                f"the loop drew torch.randperm({shape[0]}), an order of this rank's {shape[0]} samples, where one"
                f" process has one of all {self._size}: samples of other ranks are not here to be mixed with. Mix them"
                " in collate_fn, which is given the whole batch where it draws, or use one data rank."
            )
        if not self._is_of_samples(shape, name):
            return func(*args, **kwargs)
        if name.endswith("(out=…)"):
            raise PlanError(f"{name} draws for this rank's samples alone. Leave out= out, and use what it returns.")
        op, names = func.overloadpacket.__name__, [argument.name for argument in func._schema.arguments]
        is_in_place = op.endswith("_")
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        for key, value in named.items():
            if key == "size":
                named[key] = [self._size, *shape[1:]]
            elif isinstance(value, Tensor):
                has_no_values = key == "self" and (is_in_place or op.endswith("_like"))
                named[key] = self._like_full_batch(value) if has_no_values else self._spread(value, len(shape))
        placed = [named.pop(name) for name in names[: len(args)]]
        whole = self._cut(func(*placed, **named))
        return args[0].copy_(whole) if is_in_place else whole

    def _of_numpy(self, plain: Draw) -> Draw:
        def draw(*args: Any, **kwargs: Any) -> Any:
            drawn, name = plain(*args, **kwargs), f"numpy.random.{plain.__name__}"
            if isinstance(drawn, np.ndarray) and self._is_of_samples(drawn.shape, name):
                raise PlanError(
                    f"the loop drew {name} with a row for each of this rank's {self._rows} samples, which would be"
                    " others than those of one process. Draw them by torch (torch.rand(len(x))), which draws for the"
                    " whole batch."
                )
            return drawn

        return draw

    def _spread(self, value: Any, ndim: int) -> Any:
        """Return, of an argument with a row for each of this rank's samples, one for all samples, with these rows in
        their places."""
        if not isinstance(value, Tensor) or value.ndim != ndim or value.shape[0] != self._rows:
            return value
        whole = self._like_full_batch(value.detach())
        # Other ranks' rows are not here; any valid value will do, for their numbers are thrown away, and the generator
        # moves by the shape alone.
        whole.copy_(value.detach()[:1].expand_as(whole))
        if self._start < self._stop:
            whole[self._start : self._stop] = value.detach()
        return whole


def _place_of_call() -> tuple[Any, ...]:
    """Return the line of the loop, and those of the functions that it calls, at which a draw stands."""
    place: list[Any] = []
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and len(place) < _DEEPEST:
        if frame.f_code.co_filename != __file__:
            place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(place)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
