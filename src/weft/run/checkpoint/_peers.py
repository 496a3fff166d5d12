"""Agreement of ranks while they save and load, by one operation: the elementwise minimum of integers.

The minimum is enough for a number that all ranks share, and for the text of the first problem on any rank.  Nothing is
pickled, and a test can replace the operation by a thread barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.comm.collectives import all_reduce
from weft.comm.mesh import GroupView

MAXIMUM = 2**62
_TEXT_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that save and load together.  Every method is called by all of them, in one order."""

    rank: int = 0
    world: int = 1
    minimum: Callable[[list[int]], list[int]] = list
    """Elementwise minimum over the ranks of lists that are equally long everywhere; with one rank, the list itself."""

    @classmethod
    def of_group(cls, view: GroupView) -> Peers:
        """Ranks of a process group (usually `mesh["world"]`) whose backend carries CPU tensors."""
        if view.group is None:
            return cls()

        def minimum(values: list[int]) -> list[int]:
            tensor = torch.tensor(values, dtype=torch.int64)
            all_reduce(tensor, view, dist.ReduceOp.MIN)
            return [int(value) for value in tensor]

        return cls(view.index, view.size, minimum)

    def share(self, *values: int) -> list[int]:
        """Return rank 0's numbers, each below 2**62."""
        return self.minimum(list(values) if self.rank == 0 else [MAXIMUM] * len(values))

    def gather(self, number: int) -> list[int]:
        """Return every rank's number, each from 0 to below 2**62, by rank."""
        return self.minimum([number if rank == self.rank else MAXIMUM for rank in range(self.world)])

    def first_problem(self, problem: str | None) -> str | None:
        """Return the problem of the lowest rank that has one, on every rank; None when nobody has."""
        # The minimum of the ranks that have a problem names the one whose text is shown.
        first = self.minimum([self.rank if problem is not None else self.world])[0]
        if first == self.world:
            return None
        mine = (problem or "unknown").encode()[:_TEXT_BYTES] if first == self.rank else b""
        # Its length and then its bytes are shared in the same way: the other ranks take part with values that no length
        # and no byte exceeds.
        length = self.minimum([len(mine) if first == self.rank else MAXIMUM])[0]
        text = bytes(self.minimum(list(mine) if first == self.rank else [255] * length)).decode(errors="replace")
        return text if self.world == 1 else f"rank {first}: {text}"
