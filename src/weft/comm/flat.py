"""All-reduces, reduce-scatters and all-gathers of flat storages over one group, as Weft does them without a choice."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait, start_all_gather, start_all_reduce, start_reduce_scatter


class Collectives:
    """Starts collectives over one group.

    Build it on every member, call it there alike and in one order, and close it before the group is destroyed.
    """

    def __init__(self, view: GroupView) -> None:
        self.view = view

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what was started for this object alone.  Closing again does nothing."""

    @property
    def num_messages(self) -> int:
        """Messages that this rank was told to send by algorithms of `weft.comm.algorithms` until now."""
        return 0

    def start_all_reduce(self, flat: Tensor) -> Wait:
        """Sum `flat` in place over the group."""
        return start_all_reduce(flat, self.view)

    def start_reduce_scatter(self, flat: Tensor, regions: Sequence[tuple[int, int]], *, even: bool) -> Wait:
        """Sum over the group so that afterwards `flat[regions[index]]` holds the sum; the rest of `flat` is undefined.

        `regions` lie side by side and cover `flat`; `even` says whether they are equally long.
        """
        return start_reduce_scatter(flat, regions, self.view, even=even)

    def start_all_gather(self, flat: Tensor, regions: Sequence[tuple[int, int]], *, even: bool) -> Wait:
        """Fill `flat` with every rank's own region of it."""
        return start_all_gather(flat, regions, self.view, even=even)
