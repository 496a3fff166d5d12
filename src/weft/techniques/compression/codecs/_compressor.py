"""What every compression offers, split as in GRACE (Xu et al., ICDCS 2021): codec, memory, and how it is reduced.

A codec is one file with its own rounding or selection, and says itself how its packets are summed, because that is
where codecs differ most: low-rank factors can be all-reduced, indices only gathered, quantised numbers neither.  The
memory (`ErrorFeedback`) belongs to none of them.  A reduction is a generator that yields whenever it waits for the
network, so that a bucket's second exchange starts while backward still fills the next bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait
from weft.techniques.compression.wire import Frame

Stages = Generator[Wait, None, None]
"""A reduction under way: yields the wait of each exchange that it has started, and goes on after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor that must outlive the step: part of a checkpoint."""

    kind: str
    """`residual`, `basis`, `draws`, `momentum` or `steps`."""
    name: str
    """Name of the parameter."""
    tensor: Tensor
    """Live and contiguous; loading copies into it."""
    is_own: bool
    """Whether every rank has values of its own, of which the sum over the ranks matters; else all hold the same."""


class Compressor(Protocol):
    """The codec of one flat storage of gradients, with whatever it learns from step to step.

    Everything must be called on every member of the group, in one order.
    """

    @property
    def is_biased(self) -> bool:
        """Whether it loses what it leaves out for good, unless an `ErrorFeedback` carries it over."""
        ...

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """Replace `flat` (frame.num_elements,) by the compressed sum over the members: the same bits on each.

        With `frame.regions` only this rank's region of `flat` is defined afterwards.  `owed`, as long as `flat`, gets
        what of this rank's values the sum does not contain.  A value that is not finite must make the sum not finite,
        too: the step is then skipped.
        """
        ...

    def begin_step(self) -> None:
        """Forget what the step before learnt, unless `keep` was called."""
        ...

    def keep(self, skipped: Collection[str]) -> None:
        """The step's sum has been applied, but for the parameters `skipped`: learn from it."""
        ...

    def kept(self, frame: Frame) -> Iterator[KeptTensor]:
        """Yield what must be saved."""
        ...


class Stateless:
    """The state methods of a codec that has no state."""

    def begin_step(self) -> None:
        """Nothing to forget."""

    def keep(self, skipped: Collection[str]) -> None:
        """Nothing to learn."""

    def kept(self, frame: Frame) -> Iterator[KeptTensor]:
        """Yield nothing."""
        yield from ()
