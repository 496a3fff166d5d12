"""The queue of a search, the least bound first: groups of splits, their rows, and rows to be priced."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from weft.planning.search._bounds import Floats
from weft.planning.search._finalists import Finalists


class Frontier:
    """Branch and bound, best first (Land and Doig 1960; Lawler and Wood 1966): what is taken off puts closer bounds of
    its parts on, or prices; when the least bound is no lower than the best price, that is the best of all."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[Finalists], None]]] = []
        self._count = 0

    def push(self, bound: float, look: Callable[[Finalists], None]) -> None:
        """Add something that no price in it is below `bound`; `look` is called if that may matter."""
        heapq.heappush(self._heap, (bound, self._count, look))
        self._count += 1

    def push_rows(self, bounds: Floats, look: Callable[[int, Finalists], None]) -> None:
        """Add rows of a table by their bounds, which rise."""
        self._push_row(bounds, look, 0)

    def _push_row(self, bounds: Floats, look: Callable[[int, Finalists], None], row: int) -> None:
        def here(finalists: Finalists) -> None:
            look(row, finalists)
            if row + 1 < len(bounds):
                self._push_row(bounds, look, row + 1)

        self.push(float(bounds[row]), here)

    def run(self, finalists: Finalists) -> None:
        """Look at everything whose bound is below the limit, which is the best price."""
        while self._heap and self._heap[0][0] < finalists.limit:
            heapq.heappop(self._heap)[2](finalists)

    def look(self, finalists: Finalists, *, most: int) -> Iterator[None]:
        """Look at up to `most` further things of the least bounds, one at a time."""
        while most and self._heap and self._heap[0][0] < finalists.limit:
            heapq.heappop(self._heap)[2](finalists)
            most -= 1
            yield
