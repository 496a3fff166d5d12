"""1-bit Adam's exchange: momenta as signs, once the variance is frozen (Tang et al., ICML 2021, arXiv 2102.02888).

Signs of gradients and Adam do not go together: Adam divides by the size of what it sees, and what it would see is the
error of the signs.  Its momentum, though, is a mean over many steps, which drifts slowly and takes signs well; and with
a variance that has settled, and is frozen, the update is linear in it.  So the first steps are plain AdamW with exact
sums.  After them each rank sends its *momentum* by signs, with error feedback at ranks and owners (`signsgd`).

The optimizer keeps its own momentum and asks for gradients, so a momentum is what travels, and a gradient what comes
out.  With M = Σ βᵗ⁻ˢ gₛ, the momentum over 1 − β, which all ranks know from the step before:

    each rank      x = β/n · M + own gradients + what it owes
    all ranks      M' = the sum of all x, by signs
    the optimizer  gets M' − β·M, from which its own recursion makes (1 − β)·M'

What is owed adds up as for every codec: Σ (M' − β·M) + residuals = Σ gradients.  A single such gradient is coarse, by
the error of a whole momentum; so norms of single steps say nothing, and clipping to them is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_reduce
from weft.techniques.compression.codecs._compressor import KeptTensor, Stages
from weft.techniques.compression.codecs.signsgd import SignSGD
from weft.techniques.compression.wire import Frame


@final
class OneBitMomentum:
    """Exact for `warmup_steps` applied steps, then signs of momenta.  Every rank gets the whole sum, under ZeRO, too.

    `decay` is β of the optimizer's momentum.
    """

    is_biased = True

    def __init__(self, decay: float, warmup_steps: int, frame: Frame, like: Tensor) -> None:
        """Begin without momentum, in the dtype and on the device of `like`."""
        assert 0 <= decay < 1, "a decay of momentum"
        self._decay = decay
        self._warmup_steps = warmup_steps
        self._packing = SignSGD()
        self._momenta = torch.zeros_like(like)
        self._coming: Tensor | None = None
        """State of the step under way, which may yet be skipped."""
        self._spans = {span.name: slice(span.offset, span.stop) for span in frame.spans}
        self._steps = {name: torch.zeros(1, dtype=torch.int64) for name in self._spans}
        self._rounds = 0

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """See `Compressor`."""
        before = self._momenta if self._coming is None else self._coming
        is_warm = self.is_warm()
        self._rounds += 1
        if is_warm:
            # Each rank adds an n-th of β·M, so that the sum over ranks has it once.
            flat.add_(before, alpha=self._decay / view.size)
            # Without regions: the next step needs the momentum of all elements on every rank.
            yield from self._packing.reduce(flat, replace(frame, regions=None), view, owed)
            self._coming = flat.clone()
            flat.sub_(before, alpha=self._decay)
        else:
            if owed is not None:
                owed.zero_()  # an exact sum leaves nothing out
            yield start_all_reduce(flat, view)
            self._coming = torch.add(flat, before, alpha=self._decay)

    def begin_step(self) -> None:
        """Forget the momentum of a step that was skipped."""
        self._rounds, self._coming = 0, None

    def keep(self, skipped: Collection[str]) -> None:
        """Take over the momenta of what was applied.  In place, because a checkpoint's pieces may look at them."""
        if self._coming is not None:
            for name, here in self._spans.items():
                if name not in skipped:
                    self._momenta[here].copy_(self._coming[here])
                    self._steps[name] += self._rounds
        self._rounds, self._coming = 0, None

    def kept(self, frame: Frame) -> Iterator[KeptTensor]:
        """Yield momenta, and how many applied steps they have seen."""
        for span in frame.spans:
            momentum = self._momenta[self._spans[span.name]]
            yield KeptTensor(kind="momentum", name=span.name, tensor=momentum, is_own=False)
            yield KeptTensor(kind="steps", name=span.name, tensor=self._steps[span.name], is_own=False)

    def is_warm(self) -> bool:
        """Whether compression has begun: the most used parameter has had its warm-up.  A storage begins as one."""
        return self._rounds + max(int(steps) for steps in self._steps.values()) >= self._warmup_steps
