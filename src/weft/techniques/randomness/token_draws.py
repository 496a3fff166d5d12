"""Dropout by a function inside attention that a model writes out, where ranks share the tokens of samples.

A rank computes the probabilities of its queries for the keys of one rank at a time, so nobody makes the whole draw.
Loaded where a model writes its attention out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.attention.scored import DrawnDropout
from weft.techniques.core._context import StepContext
from weft.techniques.randomness._draw_trace import DrawLayout
from weft.techniques.randomness.keyed_dropout import sample_words

_OF_DROPOUT = ("bernoulli_", "native_dropout")
"""Operators by which torch's dropout draws, one on CPUs, the other elsewhere."""


@dataclass(frozen=True, slots=True)
class PairDraw:
    """Which probabilities of attention a dropout by a function drops, of those that nobody computes together."""

    words: Tensor
    """int64 (samples,): the draw of each sample."""
    heads: int
    """Heads of the whole model."""
    view: GroupView
    """Ranks that may have parts of the heads."""
    keeps_all: bool = False
    """Whether it is left out of a proof."""

    def first_of(self, heads: int) -> int:
        """Return the first of the heads that this rank has.

        Raises:
            PlanError: they are no even part of all of them.
        """
        if heads == self.heads:
            return 0
        if heads * self.view.size != self.heads:
            raise PlanError(
                f"a rank attends with {heads} of {self.heads} heads, and plan.mesh.tensor = {self.view.size} does not"
                " say which, so it cannot draw which of its probabilities are dropped. Use plan.mesh.tensor = 1."
            )
        return heads * self.view.index


def claimed(rate: float, context: StepContext, view: GroupView) -> DrawnDropout:
    """Return the dropout by a function that an attention asks for, with its draw.

    Raises:
        PlanError: no forward has shown it.
    """
    state = context.require()
    calls: list[Any] = [mode for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "claim")]
    found: tuple[str, DrawLayout, int] | None = calls[-1].claim(_OF_DROPOUT) if calls else None
    if found is None or not _is_of_pairs(found[1], found[2]):
        raise PlanError(
            "plan.mesh.context lets ranks share a sequence, but attention that is written out is dropped by a function"
            " where a forward of the model has shown no such draw. Use plan.mesh.context = 1."
        )
    key, layout, _ = found
    if context.ledger is not None:  # draws are left out, and noted
        context.ledger.note(key, context)
    words = sample_words(key, state.seed, state.step, state.sample_ids)
    draw = PairDraw(words, math.prod(layout.whole[:-2]), view, keeps_all=context.ledger is not None)
    return DrawnDropout(rate, draw)


def _is_of_pairs(layout: DrawLayout, length: int) -> bool:
    """Whether a draw is of samples × heads, in one dim or in two, and of all pairs of tokens."""
    place = {3: "flat", 4: "sample"}.get(len(layout.whole))
    return place == layout.place and layout.dim == 0 and layout.whole[-2:] == (length, length)
