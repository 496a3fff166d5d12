"""Which probabilities of attention are dropped, for any queries and keys of whole samples.

`nn.Dropout` over (samples, heads, queries, keys) draws by sample, layer and element
(`techniques/randomness/keyed_dropout.py`). Ranks that share a sequence have some of its queries, and see the keys of
one rank at a time: they draw of the same mask what they need of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.techniques.randomness.keyed_dropout import RESOLUTION, KeyedDropout, kept_rows, layer_words

Run = tuple[int, int]
"""[start, stop) of positions in a sample."""


@dataclass(frozen=True, slots=True)
class DroppedAttention:
    """What one call of attention drops."""

    words: Tensor
    """int64 (samples,): the draw of each sample for this layer and step."""
    count: int
    """Dropped of `RESOLUTION` elements."""
    first_head: int
    """The first of this rank's heads, of those of all tensor ranks."""
    length: int
    """Tokens of a whole sample."""

    @classmethod
    def of(cls, dropout: KeyedDropout, heads: int, length: int) -> DroppedAttention | None:
        """What `dropout` drops of `heads` heads of this rank; None: nothing."""
        if not dropout.training or dropout.p == 0.0:
            return None
        state = dropout.context.require()
        if dropout.context.ledger is not None:  # draws are left out, and noted
            dropout.context.ledger.note(f"{dropout.key}\0{dropout.call_number()}", dropout.context)
            return None
        make = torch.ops.weft.layer_words if torch.compiler.is_compiling() else layer_words
        words = make(state.sample_ids, state.moment, dropout.encoded, dropout.call_number())
        is_cut = dropout.view is not None and dropout.cut_dim == 1
        first = dropout.view.index * heads if is_cut and dropout.view is not None else 0
        return cls(words, min(max(round(dropout.p * RESOLUTION), 1), RESOLUTION), first, length)

    @property
    def scale(self) -> float:
        """Factor of what is kept."""
        return 0.0 if self.count == RESOLUTION else RESOLUTION / (RESOLUTION - self.count)

    def kept(self, heads: Run, queries: Tensor, keys: Sequence[Run]) -> Tensor:
        """Return which probabilities are kept: bool (samples, heads, queries, keys).

        `heads` counts from this rank's first one; `queries` are positions, int64; `keys` runs of positions.
        """
        device, (start, stop) = queries.device, heads
        rows = (
            torch.arange(self.first_head + start, self.first_head + stop, device=device)[:, None] * self.length
            + queries
        )
        shape = (self.words.numel(), stop - start, queries.numel())
        if self.count == RESOLUTION:
            width = sum(last - first for first, last in keys)
            return torch.zeros((*shape, width), dtype=torch.bool, device=device)
        numbers = rows.flatten()
        return torch.cat([kept_rows(self.words, numbers, run, self.count) for run in keys], 1).view(*shape, -1)
