"""All algorithms by name: which collectives each defines, what they cost, where they fit, how they are scheduled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from weft.comm.algorithms import (
    bruck,
    direct,
    double_ring,
    double_tree,
    halving_doubling,
    one_shot,
    parameter_server,
    recursive_doubling,
    ring,
    scatter,
    torus,
    tree,
)
from weft.comm.algorithms._cost import power_below
from weft.comm.algorithms._method import Algorithm, FlatCost, Method, Task
from weft.comm.algorithms._nested import hierarchical_with
from weft.comm.algorithms._schedule import Line, Runs, Step
from weft.errors import CollectiveError, did_you_mean

if TYPE_CHECKING:
    from weft.config.cluster import Collective


LineSteps = Callable[[Line, Sequence[Runs]], list[Step]]


def _flat(
    seconds: FlatCost, num_blocks: Callable[[Task], int], steps: Callable[[Task, Sequence[Runs]], list[Step]]
) -> Method:
    """Return a method that knows one kind of links only."""
    # A step ends when its slowest message does, so a method that does not tell links apart costs what the slower do.
    return Method(lambda place, size, links: seconds(place.members, size, *links.across), num_blocks, steps)


def _on_line(seconds: FlatCost, num_blocks: Callable[[Task], int], steps: LineSteps) -> Method:
    """Return a flat method in which all ranks do the same."""
    return _flat(seconds, num_blocks, lambda task, blocks: steps(task.line, blocks))


def _rooted(seconds: FlatCost, num_blocks: Callable[[Task], int], steps: LineSteps) -> Method:
    """Return a flat method that begins at a root."""
    return _flat(seconds, num_blocks, lambda task, blocks: steps(task.rooted, blocks))


def _whole(seconds: FlatCost, steps: Callable[[Line, Runs], list[Step]], *, rooted: bool = False) -> Method:
    """Return a flat method that sends the buffer as one block."""
    return _flat(seconds, _one, lambda task, blocks: steps(task.rooted if rooted else task.line, blocks[0]))


def _one(task: Task) -> int:
    del task
    return 1


def _two(task: Task) -> int:
    del task
    return 2


def _members(task: Task) -> int:
    return len(task.line)


def _power(task: Task) -> int:
    return power_below(len(task.line))


def _halves(
    seconds: FlatCost,
    num_blocks: Callable[[Task], int],
    scatter_steps: LineSteps,
    gather_steps: LineSteps,
) -> dict[Collective, Method]:
    """Return methods for reduce-scatter and all-gather."""
    # They are the two halves of an all-reduce: one sends the messages of the other backwards, so they cost the same.
    return {
        "reduce_scatter": _on_line(seconds, num_blocks, scatter_steps),
        "all_gather": _on_line(seconds, num_blocks, gather_steps),
    }


_RING = Algorithm(
    "ring",
    "long tensors on any links, any number of ranks: each talks to its neighbours only",
    ("ring", "double_ring", "torus", "switch", "tree", "fully_connected", "rails"),
    {
        "all_reduce": _on_line(ring.all_reduce_seconds, _members, ring.all_reduce),
        **_halves(ring.half_seconds, _one, ring.reduce_scatter, ring.all_gather),
        "broadcast": _rooted(ring.broadcast_seconds, lambda task: task.pieces, ring.broadcast),
        "all_to_all": _on_line(ring.all_to_all_seconds, _one, ring.all_to_all),
    },
)
_DOUBLE_RING = Algorithm(
    "double_ring",
    "long tensors where both directions have links of their own",
    ("double_ring", "torus"),
    {
        "all_reduce": _on_line(double_ring.all_reduce_seconds, lambda task: 2 * len(task.line), double_ring.all_reduce),
        **_halves(double_ring.half_seconds, _two, double_ring.reduce_scatter, double_ring.all_gather),
        "broadcast": _rooted(double_ring.broadcast_seconds, lambda task: 2 * task.pieces, double_ring.broadcast),
        "all_to_all": _on_line(double_ring.all_to_all_seconds, _two, double_ring.all_to_all),
    },
)
_TREE = Algorithm(
    "tree",
    "short tensors and many ranks: whole tensors up and down a binomial tree",
    ("switch", "tree", "fully_connected", "rails"),
    {
        "all_reduce": _whole(tree.all_reduce_seconds, tree.all_reduce),
        "broadcast": _whole(tree.broadcast_seconds, tree.broadcast, rooted=True),
    },
)
_DOUBLE_TREE = Algorithm(
    "double_tree",
    "many ranks: a tree's latency and a ring's bytes, in pieces that follow one another",
    ("switch", "fully_connected"),
    {
        "all_reduce": _on_line(double_tree.all_reduce_seconds, lambda task: 2 * task.pieces, double_tree.all_reduce),
        "broadcast": _rooted(double_tree.broadcast_seconds, lambda task: 2 * task.pieces, double_tree.broadcast),
    },
)
_RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    "short tensors: whole ones, with partners 1, 2, 4, … away",
    ("switch", "fully_connected"),
    {
        "all_reduce": _whole(recursive_doubling.all_reduce_seconds, recursive_doubling.all_reduce),
        "all_gather": _on_line(recursive_doubling.all_gather_seconds, _one, recursive_doubling.all_gather),
    },
)
_HALVING_DOUBLING = Algorithm(
    "halving_doubling",
    "middle and long tensors where any rank reaches any other at full speed",
    ("switch", "fully_connected"),
    {
        "all_reduce": _on_line(halving_doubling.all_reduce_seconds, _power, halving_doubling.all_reduce),
        **_halves(halving_doubling.half_seconds, _one, halving_doubling.reduce_scatter, halving_doubling.all_gather),
    },
)
_DIRECT = Algorithm(
    "direct",
    "middle and long tensors on a few ranks: each sums one part, all talk to all",
    ("fully_connected", "switch"),
    {
        "all_reduce": _on_line(direct.all_reduce_seconds, _members, direct.all_reduce),
        **_halves(direct.half_seconds, _one, direct.reduce_scatter, direct.all_gather),
        "all_to_all": _on_line(direct.all_to_all_seconds, _one, direct.all_to_all),
    },
)
_ONE_SHOT = Algorithm(
    "one_shot",
    "the shortest tensors on a few ranks: one step",
    ("fully_connected", "switch"),
    {
        "all_reduce": _whole(one_shot.all_reduce_seconds, one_shot.all_reduce),
        "broadcast": _whole(one_shot.broadcast_seconds, one_shot.broadcast, rooted=True),
    },
)
_SCATTER = Algorithm(
    "scatter",
    "broadcasts of long tensors: a scatter, then a ring",
    ("switch", "tree", "fully_connected"),
    {"broadcast": _rooted(scatter.broadcast_seconds, _members, scatter.broadcast)},
)
_BRUCK = Algorithm(
    "bruck",
    "any number of ranks without folding; all-to-all of short tensors",
    ("switch", "fully_connected"),
    {
        "all_reduce": _on_line(bruck.all_reduce_seconds, _members, bruck.all_reduce),
        **_halves(bruck.half_seconds, _one, bruck.reduce_scatter, bruck.all_gather),
        "all_to_all": _on_line(bruck.all_to_all_seconds, _one, bruck.all_to_all),
    },
)
_TORUS = Algorithm(
    "torus",
    "long tensors on a grid of rings: rows and columns at once",
    ("torus",),
    {
        "all_reduce": Method(
            lambda place, size, links: torus.all_reduce_seconds(place.shape, size, *links.across),
            lambda task: 2 * len(task.line),
            lambda task, blocks: torus.all_reduce(task.line, task.arrangement.shape, blocks),
        ),
        "reduce_scatter": Method(
            lambda place, size, links: torus.all_reduce_seconds(place.shape, size, *links.across) / 2,
            _two,
            lambda task, blocks: torus.reduce_scatter(task.line, task.arrangement.shape, blocks),
        ),
        "all_gather": Method(
            lambda place, size, links: torus.all_reduce_seconds(place.shape, size, *links.across) / 2,
            _two,
            lambda task, blocks: torus.all_gather(task.line, task.arrangement.shape, blocks),
        ),
        "broadcast": Method(
            lambda place, size, links: torus.broadcast_seconds(place.shape, size, *links.across),
            lambda task: 2 * task.pieces,
            lambda task, blocks: torus.broadcast(task.line, task.arrangement.shape, blocks, task.root),
        ),
        "all_to_all": Method(
            lambda place, size, links: torus.all_to_all_seconds(place.shape, size, *links.across),
            _two,
            lambda task, blocks: torus.all_to_all(task.line, task.arrangement.shape, blocks),
        ),
    },
)
_PARAMETER_SERVER = Algorithm(
    "parameter_server",
    "a few ranks with faster links sum for all",
    ("switch", "fully_connected"),
    {
        "all_reduce": _on_line(
            parameter_server.all_reduce_seconds, lambda task: task.servers, parameter_server.all_reduce
        ),
        "broadcast": _rooted(parameter_server.broadcast_seconds, lambda task: task.servers, parameter_server.broadcast),
    },
)
_ACROSS: Mapping[str, Algorithm] = MappingProxyType(
    {
        algorithm.name: algorithm
        for algorithm in (
            *(_RING, _DOUBLE_RING, _TREE, _DOUBLE_TREE, _RECURSIVE_DOUBLING, _HALVING_DOUBLING),
            *(_DIRECT, _ONE_SHOT, _SCATTER, _BRUCK),
        )
    }
)
"""The algorithms that `hierarchical` can use across nodes."""


_HIERARCHICAL = hierarchical_with(
    "hierarchical",
    "ring",
    {**_RING.methods, "broadcast": _TREE.methods["broadcast"], "all_to_all": _DIRECT.methods["all_to_all"]},
)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        algorithm.name: algorithm
        for algorithm in (
            _RING,
            _DOUBLE_RING,
            _TREE,
            _DOUBLE_TREE,
            _RECURSIVE_DOUBLING,
            _HALVING_DOUBLING,
            _DIRECT,
            _ONE_SHOT,
            _SCATTER,
            _BRUCK,
            _HIERARCHICAL,
            _TORUS,
            _PARAMETER_SERVER,
        )
    }
)
"""Every algorithm by its name; `find_algorithm` also knows `hierarchical+direct` and the like."""


def find_algorithm(name: str) -> Algorithm:
    """Return an algorithm by name; `hierarchical+X` is hierarchical with X across nodes, for all collectives X does.

    Raises:
        CollectiveError: there is none of this name.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    whole, _, part = name.partition("+")
    if whole == "hierarchical":
        if part in _ACROSS:
            return hierarchical_with(name, part, _ACROSS[part].methods)
        raise CollectiveError(
            f"algorithm = {name!r}: across nodes there are {', '.join(_ACROSS)}.{did_you_mean(part, _ACROSS)}"
        )
    raise CollectiveError(
        f"algorithm = {name!r} does not exist. There are {', '.join(ALGORITHMS)}.{did_you_mean(name, ALGORITHMS)}"
    )
