"""What ranks that share the sequence of a sample know of its tokens; loaded where there are such ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weft.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTokens:
    """Which tokens of each sample a rank has, where several ranks share the sequence."""

    length: int
    """Number of tokens of a full sample."""
    runs: tuple[tuple[int, int], ...]
    """[start, stop) of this rank's positions, in rising order.  Its own tokens are these runs, end to end."""
    documents: Tensor | None = None
    """Document of every token of the whole samples, int64 (samples, length); None: a sample is one document."""

    places: Tensor | None = None
    """Positions of its tokens, int64 (samples, tokens), for a model that skips padding in its count; None: those of
    `runs`."""

    @property
    def held(self) -> int:
        """Number of a sample's tokens on this rank."""
        return sum(stop - start for start, stop in self.runs)

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the positions, as runs, of this rank's own tokens from `start` to `stop`."""
        runs: list[tuple[int, int]] = []
        for first, last in self.runs:
            low, high = max(start, 0), min(stop, last - first)
            if low < high:
                runs.append((first + low, first + high))
            start, stop = start - (last - first), stop - (last - first)
        return runs

    def rows_of(self, x: Tensor, samples: int, own: tuple[int, int], key: str) -> list[tuple[int, int]]:
        """Return, as runs, which rows of the whole samples an activation has, whose last dim is that of features.

        `own`: [start, stop) of this rank's tokens that it is about, of which tensor ranks may have a part; `key` names
        who asks.

        Raises:
            PlanError: dim 1 is not that of the tokens.
        """
        tokens = own[1] - own[0]
        row_size, left = divmod(x.numel() // max(samples * x.shape[-1], 1), max(tokens, 1))
        is_flat = x.dim() == 2 and x.shape[0] == samples * tokens
        if left or not (is_flat or (x.dim() > 2 and x.shape[1] == tokens)):
            raise PlanError(
                f"{key} drops elements of {tuple(x.shape)}, in which dim 1 is not that of the {tokens} tokens that this"
                " rank has of each sample, so that plans would drop different ones. Set this dropout to 0, or use"
                " plan.mesh.context = 1."
            )
        return [(row_size * first, row_size * last) for first, last in self.within(*own)]


class SequenceShard(Protocol):
    """How ranks share out the tokens of a batch."""

    def cut_batch(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LocalTokens | None]:
        """Return the fields of this rank's tokens, and which they are; None: whole samples, of which it has some."""
        ...
