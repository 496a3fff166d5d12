"""All-reduces, reduce-scatters and all-gathers of flat storages, each by the way that is chosen for its size.

Every rank must choose alike, or they wait for one another for ever.  So a choice is a pure function of collective and
size that all ranks were given alike: by the plan, or by a table that the group's first rank has read and sent to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from weft.comm._node import NodeMemory
from weft.comm.algorithms import BUILT_IN, Arrangement, defines
from weft.comm.device import all_gather_single, backend_of
from weft.comm.flat import Collectives
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.comm.reduce import (
    Wait,
    WorksDone,
    nothing_to_wait_for,
    start_broadcasts,
    start_exchange,
    start_handing_out,
    traced_as,
)

if TYPE_CHECKING:
    from weft.config.cluster import Collective

Choose = Callable[["Collective", int], str | None]
"""Collective and bytes of the whole tensor → a built-in way or an algorithm; None: what Weft does without a choice."""


def choose_nothing(collective: Collective, size_bytes: int) -> None:
    """The choice where nobody has chosen."""


class ChosenCollectives(Collectives):
    """Starts collectives by what is chosen; `weft.comm.algorithms.stand_in` says what is done where an algorithm lacks
    one.

    The first collective by messages starts a thread, which `close` ends.
    """

    def __init__(
        self,
        view: GroupView,
        choose: Choose = choose_nothing,
        place: Arrangement | None = None,
        node: NodeMemory | None = None,
    ) -> None:
        """`place` is how the ranks lie on the links; by default in their order, all in one node.  `node` is what the
        ranks of this host share (`share_node_memory`), and is closed with this object."""
        super().__init__(view)
        self._is_shared = view.group is not None and backend_of(view.group) == "weft"
        self._choose = choose
        self._place = place
        self._node = node
        self._messenger: Messenger | None = None
        self._is_closed = False

    @property
    def num_messages(self) -> int:
        return 0 if self._messenger is None else self._messenger.num_messages

    def close(self) -> None:
        """Finish what was started by messages and end their thread.  Closing again does nothing; what is started
        afterwards by messages is an error."""
        self._is_closed = True
        if self._messenger is not None:
            self._messenger.close()
        if self._node is not None:
            self._node.close()

    def start_all_reduce(self, flat: Tensor, *, by: str | None = None) -> Wait:
        """Sum `flat` in place over the group.  `by` overrides the choice, here and below."""
        algorithm = self._algorithm("all_reduce", flat, by)
        if algorithm is None or algorithm in BUILT_IN:
            return super().start_all_reduce(flat)
        return self._messages().start(flat, "all_reduce", algorithm, arrangement=self._place)

    def start_reduce_scatter(
        self, flat: Tensor, regions: Sequence[tuple[int, int]], *, even: bool, by: str | None = None
    ) -> Wait:
        algorithm = self._algorithm("reduce_scatter", flat, by)
        if algorithm is None or (algorithm == "backend" and self._is_shared):
            return super().start_reduce_scatter(flat, regions, even=even)
        if algorithm == "exchange":
            return start_exchange(flat, regions, self.view)
        if algorithm == "backend" or not defines(algorithm, "reduce_scatter"):
            return traced_as("reduce_scatter", flat, self.view, lambda: self.start_all_reduce(flat, by=algorithm))
        return self._messages().start(flat, "reduce_scatter", algorithm, regions=regions, arrangement=self._place)

    def start_all_gather(
        self, flat: Tensor, regions: Sequence[tuple[int, int]], *, even: bool, by: str | None = None
    ) -> Wait:
        algorithm = self._algorithm("all_gather", flat, by)
        if algorithm is None or (algorithm == "backend" and self._is_shared):
            return super().start_all_gather(flat, regions, even=even)
        if algorithm == "exchange" or not defines(algorithm, "all_gather"):
            return start_handing_out(flat, regions, self.view)
        if algorithm == "backend":
            return _start_backend_gather(flat, regions, self.view, even=even)
        return self._messages().start(flat, "all_gather", algorithm, regions=regions, arrangement=self._place)

    def _algorithm(self, collective: Collective, flat: Tensor, by: str | None) -> str | None:
        return by if by is not None else self._choose(collective, flat.numel() * flat.element_size())

    def _messages(self) -> Messenger:
        if self._messenger is None:
            self._messenger = Messenger(self.view, node=self._node)
            if self._is_closed:
                self._messenger.close()  # so that it says why nothing can be started
        return self._messenger


def _start_backend_gather(
    flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView, *, even: bool
) -> Wait:  # fmt: skip
    if view.group is None:
        return nothing_to_wait_for
    start, stop = regions[view.index]
    if even:
        # Gloo reads the shard while it writes the whole: it needs a storage of its own.
        return WorksDone.of([all_gather_single(flat, flat[start:stop].clone(), view.group, async_op=True)])
    return traced_as("all_gather", flat, view, lambda: start_broadcasts(flat, regions, view))
