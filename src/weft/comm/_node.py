"""The ranks of one host as a leg of collectives that go beyond it: their part over the memory that they share.

    node = share_node_memory(view, place)            # on every rank of the group; None where it would serve nothing
    messenger = Messenger(view, node=node)
    messenger.run(gradient, "all_reduce", "hierarchical", arrangement=place)

Each host decides for itself.  Where one has no memory that its ranks share, they send each other messages, and the
messages between hosts are the same.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._collective_steps import Combine, NodeCall
from weft.comm._hosts import kernel_number
from weft.comm.algorithms import Arrangement
from weft.comm.collectives import all_gather
from weft.comm.device import group_store
from weft.comm.mesh import GroupView
from weft.comm.shared_memory._call import DTYPES, Call, Kind, Region
from weft.comm.shared_memory._handshake import Handshake
from weft.comm.shared_memory.engine import Engine
from weft.comm.shared_memory.forming import arrived

_NONCE_BITS = 62


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory that this rank's node shares, as one rank sees it.  Build it with `share_node_memory`."""

    engine: Engine
    place: Arrangement
    """The arrangement of the group's ranks on hosts."""
    members: tuple[int, ...]
    """The group's ranks on this node, in the order of the node's collectives."""
    index: int
    """Position of this rank among them."""

    def carries(self, arrangement: Arrangement | None, dtype: torch.dtype, combine: Combine | None) -> bool:
        """Return whether a collective can use it: it must take the ranks as they lie, and its sums be defined here."""
        if arrangement is None or (*arrangement.order,) != (*self.place.order,):
            return False
        if arrangement.nodes != self.place.nodes:
            return False
        return combine is None or (dtype in DTYPES and self.engine.supports(DTYPES[dtype], combine.number))

    def perform(self, call: NodeCall, flat: Tensor, combine: Combine | None, timeout_seconds: float) -> None:
        """Do one call on a flat CPU tensor.  On every rank of the node, in one order.

        Raises:
            GroupFailed: a rank of the node is missing, or has given up.
        """
        at, size = flat.data_ptr(), flat.element_size()
        regions: list[Region] = [(at + start * size, (stop - start) * size) for start, stop in call.regions]
        own = regions[self.index][0]
        if call.kind == "spread":
            asked = Call(Kind.ALL_GATHER, input=own, receive=regions)
        else:
            assert combine is not None, "only reductions sum"
            asked = Call(Kind.REDUCE_SCATTER, DTYPES[flat.dtype], combine.number, output=own, send=regions)
        ticket = self.engine.submit(asked, timeout_seconds, background=False)
        self.engine.wait(ticket, timeout_seconds)

    def abort(self) -> None:
        """Release every rank of the node that waits here; nothing can be done over it afterwards."""
        self.engine.abort()

    def close(self) -> None:
        """Leave.  Closing again does nothing."""
        self.engine.close()


def share_node_memory(
    view: GroupView, place: Arrangement, *, timeout_seconds: float | None = None, use_engine: bool = True
) -> NodeMemory | None:
    """Let the ranks of each node share memory, and return this rank's part.  Call on every rank of the group alike.

    None where it would serve nothing: in a group within one node, of one rank per node, or where this rank is alone in
    its node; and where the node's ranks turn out to have no common memory, which its first rank says aloud.  `place`
    only says where to try: each rank proves that it sees the others' memory.

    Close it before the group is destroyed.  `timeout_seconds` is how long ranks wait for one another while it is made;
    by default as long as in the group.  `use_engine=False`: as if the C++ engine had not been built.
    """
    if view.group is None or len(place.nodes) < 2 or max(place.nodes) < 2:
        return None
    # The gather tells each rank which others run under the same kernel; the first rank's random number names the
    # rendezvous, so that groups formed one after another do not meet at an old one.
    mine = torch.tensor([kernel_number(), secrets.randbits(_NONCE_BITS)], dtype=torch.int64)
    segments = all_gather(mine, view)
    node, members = _node_of(place, view.index)
    if len(members) == 1:
        return None
    # Ranks of other groups compute on this machine, too: as many for each of this group's as there are groups.
    here = int((segments[:, 0] == mine[0]).sum())
    rendezvous = arrived(
        dist.PrefixStore(f"weft/node/{int(segments[0, 1]):x}/{node}", group_store()),
        members.index(view.index),
        [view.ranks[member] for member in members],
        timedelta(seconds=view.timeout_seconds if timeout_seconds is None else timeout_seconds),
    )
    engine = Handshake(
        rendezvous,
        num_local_ranks=-(-here * dist.get_world_size() // view.size),
        warns=members[0] == view.index,
        use_engine=use_engine,
    ).open_engine()
    return None if engine is None else NodeMemory(engine, place, members, members.index(view.index))


def _node_of(place: Arrangement, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of a rank's node, and the node's ranks in the order of the arrangement."""
    start = 0
    for node, count in enumerate(place.nodes):
        members = tuple(place.order[start : start + count])
        if rank in members:
            return node, members
        start += count
    raise AssertionError("an arrangement holds every rank of the group")
