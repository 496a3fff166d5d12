"""Hierarchical with any other algorithm across nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.comm.algorithms import hierarchical
from weft.comm.algorithms._arrange import Arrangement, flat
from weft.comm.algorithms._method import Algorithm, Links, Method, Task
from weft.comm.algorithms._schedule import Line, Runs

if TYPE_CHECKING:
    from weft.config.cluster import Collective


_Formula = Callable[[Sequence[int], float, tuple[float, float], tuple[float, float], hierarchical.OuterCost], float]
"""(ranks of each node, bytes, links inside, links across, what prices the collective across) → seconds."""


def _outer_task(task: Task, line: Line) -> Task:
    """The task of one rank of each node."""
    return replace(task, arrangement=flat(len(line)), line=line, root=0, servers=1)


def _outer_blocks(method: Method, task: Task, members: int) -> int:
    return method.num_blocks(_outer_task(task, Line(range(members), 0)))


def _outer_steps(method: Method, task: Task) -> hierarchical.Outer:
    return lambda line, blocks: method.steps(_outer_task(task, line), blocks)


def _outer_cost(method: Method) -> hierarchical.OuterCost:
    def seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
        return method.seconds(flat(members), size_bytes, Links(latency=latency, per_byte=per_byte))

    return seconds


def _priced(formula: _Formula, outer: Method) -> Callable[[Arrangement, float, Links], float]:
    return lambda place, size, links: formula(place.nodes, size, links.inside, links.across, _outer_cost(outer))


def _in_levels(
    formula: _Formula,
    outer: Method,
    num_blocks: Callable[[Task], int],
    levels: Callable[[Task, Sequence[Runs]], hierarchical.Levels],
) -> Method:
    return Method(_priced(formula, outer), num_blocks, lambda task, blocks: levels(task, blocks).steps, levels)


def _hierarchical_all_reduce(outer: Method) -> Method:
    def columns_of(task: Task, blocks: Sequence[Runs]) -> list[Sequence[Runs]]:
        count = min(task.arrangement.nodes)
        parts = len(blocks) // count
        return [blocks[column * parts : (column + 1) * parts] for column in range(count)]

    return _in_levels(
        hierarchical.all_reduce_seconds,
        outer,
        lambda task: min(task.arrangement.nodes) * _outer_blocks(outer, task, len(task.arrangement.nodes)),
        lambda task, blocks: hierarchical.all_reduce(
            task.line, task.arrangement.nodes, columns_of(task, blocks), _outer_steps(outer, task)
        ),
    )


def _hierarchical_half(
    outer: Method, levels: Callable[[Line, tuple[int, ...], Sequence[Runs], hierarchical.Outer], hierarchical.Levels]
) -> Method:
    return _in_levels(
        hierarchical.half_seconds,
        outer,
        lambda task: _outer_blocks(outer, task, len(task.arrangement.nodes)),
        lambda task, blocks: levels(task.line, task.arrangement.nodes, blocks, _outer_steps(outer, task)),
    )


def _hierarchical_broadcast(outer: Method) -> Method:
    return _in_levels(
        hierarchical.broadcast_seconds,
        outer,
        lambda task: _outer_blocks(outer, task, len(task.arrangement.nodes)),
        lambda task, blocks: hierarchical.broadcast(
            task.line, task.arrangement.nodes, blocks, task.root, _outer_steps(outer, task)
        ),
    )


def _hierarchical_all_to_all(outer: Method) -> Method:
    """Messages inside as well: memory that a node shares knows sums and spreading only."""
    return Method(
        _priced(hierarchical.all_to_all_seconds, outer),
        lambda task: _outer_blocks(outer, task, len(task.line) // math.gcd(*task.arrangement.nodes)),
        lambda task, blocks: hierarchical.all_to_all(
            task.line, task.arrangement.nodes, blocks, _outer_steps(outer, task)
        ),
    )


def hierarchical_with(name: str, across: str, outer: Mapping[Collective, Method]) -> Algorithm:
    """Return hierarchical with the collectives of `outer`, which is called `across` and does them across nodes."""
    forms: Mapping[Collective, Callable[[Method], Method]] = {
        "all_reduce": _hierarchical_all_reduce,
        "reduce_scatter": lambda method: _hierarchical_half(method, hierarchical.reduce_scatter),
        "all_gather": lambda method: _hierarchical_half(method, hierarchical.all_gather),
        "broadcast": _hierarchical_broadcast,
        "all_to_all": _hierarchical_all_to_all,
    }
    methods: dict[Collective, Method] = {collective: forms[collective](method) for collective, method in outer.items()}
    summary = f"slow links between nodes, fast ones inside: {across} across nodes, direct inside"
    return Algorithm(name, summary, ("rails", "tree", "switch"), methods)
