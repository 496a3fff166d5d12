"""Error feedback: what a compressed sum leaves out is added to the next step's gradients.

After every step, on each rank, Σ decoded + residual = Σ gradients, so nothing is lost for good; without it, biased
compressions (top-k, low rank) drop the same directions again and again and end elsewhere (Karimireddy et al., ICML
2019, arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from weft.techniques.compression.codecs._compressor import KeptTensor
from weft.techniques.compression.wire import Frame


class ErrorFeedback:
    """The residuals of one flat storage on this rank.

    Two copies: what is owed after the last applied step, and after the step under way, which may yet be skipped.
    """

    def __init__(self, frame: Frame, like: Tensor) -> None:
        """Start with residuals of zero, as long as `like`, in its dtype and on its device."""
        self._frame = frame
        # (elements,) each.  Two, because an fp16 step may still be skipped after its sum: then nothing was applied, and
        # what was owed before is owed again.
        self._kept, self._coming = torch.zeros_like(like), torch.zeros_like(like)
        self._is_under_way = False

    def begin_step(self) -> None:
        """Forget what a step that was skipped would have left."""
        self._is_under_way = False

    def add_to(self, flat: Tensor) -> Tensor:
        """Add the residual to the gradients `flat`, and return the storage for the residual of the coming sum."""
        # A later round of one step (ZeRO-2 reduces per microbatch) owes what the round before it left.
        flat.add_(self._coming if self._is_under_way else self._kept)
        self._is_under_way = True
        return self._coming

    def keep(self, skipped: Collection[str]) -> None:
        """Keep the residuals of an applied step; the parameters `skipped` keep those from before it."""
        if not self._is_under_way:
            return
        for span in self._frame.spans:
            if span.name in skipped:
                self._coming[span.offset : span.stop].copy_(self._kept[span.offset : span.stop])
        self._kept, self._coming = self._coming, self._kept
        self._is_under_way = False

    def kept(self) -> Iterator[KeptTensor]:
        """Yield the residual of every parameter."""
        for span in self._frame.spans:
            tensor = self._kept[span.offset : span.stop]
            yield KeptTensor(kind="residual", name=span.name, tensor=tensor, is_own=True)
