"""All algorithms by name: which collectives each defines, what they cost, where they fit, how they are scheduled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from weft.collective import (
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
from weft.collective._cost import power_below
from weft.collective._method import Algorithm, FlatCost, Method, Task
from weft.collective._nested import hierarchical_with
from weft.collective._schedule import Line, Runs, Step
from weft.errors import CollectiveError, did_you_mean

if TYPE_CHECKING:
    from weft.cluster import Collective


def _flat(
    seconds: FlatCost, num_blocks: Callable[[Task], int], steps: Callable[[Task, Sequence[Runs]], list[Step]]
) -> Method:
    """A method that knows one kind of links only, and is priced at the slower ones."""
    return Method(lambda place, size, links: seconds(place.members, size, *links.across), num_blocks, steps)


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
    scatter_steps: Callable[[Line, Sequence[Runs]], list[Step]],
    gather_steps: Callable[[Line, Sequence[Runs]], list[Step]],
) -> dict[Collective, Method]:
    """Reduce-scatter and all-gather, which cost the same."""
    return {
        "reduce_scatter": _flat(seconds, num_blocks, lambda task, blocks: scatter_steps(task.line, blocks)),
        "all_gather": _flat(seconds, num_blocks, lambda task, blocks: gather_steps(task.line, blocks)),
    }


_RING = Algorithm(
    "ring",
    "long tensors on any links, any number of ranks: each talks to its neighbours only",
    ("ring", "double_ring", "torus", "switch", "tree", "fully_connected", "rails"),
    {
        "all_reduce": _flat(ring.all_reduce_seconds, _members, lambda task, blocks: ring.all_reduce(task.line, blocks)),
        **_halves(ring.half_seconds, _one, ring.reduce_scatter, ring.all_gather),
        "broadcast": _flat(
            ring.broadcast_seconds, lambda task: task.pieces, lambda task, blocks: ring.broadcast(task.rooted, blocks)
        ),
        "all_to_all": _flat(ring.all_to_all_seconds, _one, lambda task, blocks: ring.all_to_all(task.line, blocks)),
    },
)
_DOUBLE_RING = Algorithm(
    "double_ring",
    "long tensors where both directions have links of their own",
    ("double_ring", "torus"),
    {
        "all_reduce": _flat(
            double_ring.all_reduce_seconds,
            lambda task: 2 * len(task.line),
            lambda task, blocks: double_ring.all_reduce(task.line, blocks),
        ),
        **_halves(double_ring.half_seconds, _two, double_ring.reduce_scatter, double_ring.all_gather),
        "broadcast": _flat(
            double_ring.broadcast_seconds,
            lambda task: 2 * task.pieces,
            lambda task, blocks: double_ring.broadcast(task.rooted, blocks),
        ),
        "all_to_all": _flat(
            double_ring.all_to_all_seconds, _two, lambda task, blocks: double_ring.all_to_all(task.line, blocks)
        ),
    },
)
_TREE = Algorithm(
    "tree",
    "short tensors and many ranks: whole tensors up and down a binomial tree",
    ("switch", "tree", "fully_connected", "rails"),
    {
        "all_reduce": _flat(tree.all_reduce_seconds, _one, lambda task, blocks: tree.all_reduce(task.line, blocks[0])),
        "broadcast": _flat(tree.broadcast_seconds, _one, lambda task, blocks: tree.broadcast(task.rooted, blocks[0])),
    },
)
_DOUBLE_TREE = Algorithm(
    "double_tree",
    "many ranks: a tree's latency and a ring's bytes, in pieces that follow one another",
    ("switch", "fully_connected"),
    {
        "all_reduce": _flat(
            double_tree.all_reduce_seconds,
            lambda task: 2 * task.pieces,
            lambda task, blocks: double_tree.all_reduce(task.line, blocks),
        ),
        "broadcast": _flat(
            double_tree.broadcast_seconds,
            lambda task: 2 * task.pieces,
            lambda task, blocks: double_tree.broadcast(task.rooted, blocks),
        ),
    },
)
_RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    "short tensors: whole ones, with partners 1, 2, 4, … away",
    ("switch", "fully_connected"),
    {
        "all_reduce": _flat(
            recursive_doubling.all_reduce_seconds,
            _one,
            lambda task, blocks: recursive_doubling.all_reduce(task.line, blocks[0]),
        ),
        "all_gather": _flat(
            recursive_doubling.all_gather_seconds,
            _one,
            lambda task, blocks: recursive_doubling.all_gather(task.line, blocks),
        ),
    },
)
_HALVING_DOUBLING = Algorithm(
    "halving_doubling",
    "middle and long tensors where any rank reaches any other at full speed",
    ("switch", "fully_connected"),
    {
        "all_reduce": _flat(
            halving_doubling.all_reduce_seconds,
            _power,
            lambda task, blocks: halving_doubling.all_reduce(task.line, blocks),
        ),
        **_halves(halving_doubling.half_seconds, _one, halving_doubling.reduce_scatter, halving_doubling.all_gather),
    },
)
_DIRECT = Algorithm(
    "direct",
    "middle and long tensors on a few ranks: each sums one part, all talk to all",
    ("fully_connected", "switch"),
    {
        "all_reduce": _flat(
            direct.all_reduce_seconds, _members, lambda task, blocks: direct.all_reduce(task.line, blocks)
        ),
        **_halves(direct.half_seconds, _one, direct.reduce_scatter, direct.all_gather),
        "all_to_all": _flat(direct.all_to_all_seconds, _one, lambda task, blocks: direct.all_to_all(task.line, blocks)),
    },
)
_ONE_SHOT = Algorithm(
    "one_shot",
    "the shortest tensors on a few ranks: one step",
    ("fully_connected", "switch"),
    {
        "all_reduce": _flat(
            one_shot.all_reduce_seconds, _one, lambda task, blocks: one_shot.all_reduce(task.line, blocks[0])
        ),
        "broadcast": _flat(
            one_shot.broadcast_seconds, _one, lambda task, blocks: one_shot.broadcast(task.rooted, blocks[0])
        ),
    },
)
_SCATTER = Algorithm(
    "scatter",
    "broadcasts of long tensors: a scatter, then a ring",
    ("switch", "tree", "fully_connected"),
    {
        "broadcast": _flat(
            scatter.broadcast_seconds, _members, lambda task, blocks: scatter.broadcast(task.rooted, blocks)
        )
    },
)
_BRUCK = Algorithm(
    "bruck",
    "any number of ranks without folding; all-to-all of short tensors",
    ("switch", "fully_connected"),
    {
        "all_reduce": _flat(
            bruck.all_reduce_seconds, _members, lambda task, blocks: bruck.all_reduce(task.line, blocks)
        ),
        **_halves(bruck.half_seconds, _one, bruck.reduce_scatter, bruck.all_gather),
        "all_to_all": _flat(bruck.all_to_all_seconds, _one, lambda task, blocks: bruck.all_to_all(task.line, blocks)),
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
        "all_reduce": _flat(
            parameter_server.all_reduce_seconds,
            lambda task: task.servers,
            lambda task, blocks: parameter_server.all_reduce(task.line, blocks),
        ),
        "broadcast": _flat(
            parameter_server.broadcast_seconds,
            lambda task: task.servers,
            lambda task, blocks: parameter_server.broadcast(task.rooted, blocks),
        ),
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
"""What hierarchical can use across nodes."""


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
"""Every algorithm by its name.  `find_algorithm` also knows `hierarchical+direct` and the like."""


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
