"""What one rank does in a collective: an algorithm's steps over the parts of a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.comm.algorithms._arrange import Arrangement, flat
from weft.comm.algorithms._method import Method, Task
from weft.comm.algorithms._registry import ALGORITHMS, find_algorithm
from weft.comm.algorithms._schedule import Line, Runs, Schedule, singles
from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.config.cluster import Collective

_REGIONS: frozenset[Collective] = frozenset({"reduce_scatter", "all_gather", "all_to_all"})
"""Collectives with one region of the buffer per rank."""


def build_schedule(
    name: str,
    collective: Collective,
    rank: int,
    members: int,
    *,
    arrangement: Arrangement | None = None,
    root: int = 0,
    pieces: int = 1,
    servers: int = 1,
    shares_node: bool = False,
) -> Schedule:
    """Return what one rank does.  A pure function: ranks that call it alike get schedules that fit together.

    Args:
        arrangement: how the ranks lie on the links (see `arrange`); by default in their order, all in one node.
        root: rank that broadcasts.
        pieces: into which pipelined algorithms cut what one tree or chain takes: double_tree, and broadcasts by ring,
            double_ring and torus.
        servers: of parameter_server, the first of the order.
        shares_node: whether the ranks of this rank's node share memory, and do their part of an algorithm that knows
            nodes there (but of an all-to-all).  That concerns nobody outside of the node, whose ranks must do alike:
            the messages between nodes are the same.

    Raises:
        CollectiveError: the algorithm does not exist or does not define the collective, or a number is out of range.
    """
    method = _method(name, collective)
    task = _task(rank, members, arrangement, root, pieces, servers)
    blocks = _blocks(method, task, collective)
    levels = method.levels(task, blocks) if shares_node and method.levels is not None else None
    return Schedule(
        name,
        collective,
        rank,
        members,
        num_parts=len(blocks),
        root=root if collective == "broadcast" else 0,
        steps=tuple(method.steps(task, blocks) if levels is None else levels.across),
        before=() if levels is None else levels.before.rounds,
        after=() if levels is None else levels.after.rounds,
    )


def _method(name: str, collective: Collective) -> Method:
    algorithm = find_algorithm(name)
    method = algorithm.methods.get(collective)
    if method is None:
        others = [other.name for other in ALGORITHMS.values() if collective in other.methods]
        raise CollectiveError(
            f"algorithm {name!r} does not define {collective}: it does {', '.join(algorithm.collectives)}. "
            f"For {collective} there are {', '.join(others) or 'none'}."
        )
    return method


def _task(rank: int, members: int, arrangement: Arrangement | None, root: int, pieces: int, servers: int) -> Task:
    place = arrangement if arrangement is not None else flat(members)
    _check(rank, members, place, root, pieces, servers)
    order = place.order
    return Task(
        arrangement=place,
        line=Line(order, order.index(rank)),
        root=order.index(root),
        pieces=pieces,
        servers=servers,
    )


def _blocks(method: Method, task: Task, collective: Collective) -> list[Runs]:
    """Blocks of one part each: those of each rank's region in the order of the line, or of the whole buffer."""
    count = method.num_blocks(task)
    if collective in _REGIONS:
        return [block for owner in task.arrangement.order for block in singles(owner * count, count)]
    return singles(0, count)


def _check(rank: int, members: int, place: Arrangement, root: int, pieces: int, servers: int) -> None:
    if place.members != members:
        raise CollectiveError(f"the arrangement holds {place.members} ranks, and the group has {members}.")
    for what, value in (("rank", rank), ("root", root)):
        if not 0 <= value < members:
            raise CollectiveError(f"{what} = {value} is not in a group of {members}: use 0 to {members - 1}.")
    if pieces < 1:
        raise CollectiveError(f"pieces = {pieces}: use 1 or more.")
    if not 1 <= servers <= members:
        raise CollectiveError(f"servers = {servers}: a group of {members} has 1 to {members} of them.")
