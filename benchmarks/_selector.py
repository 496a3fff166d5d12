"""One rank of the selector benchmark: it measures a table as a user would, or races all ways of every cell."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.comm.algorithms import ALGORITHMS, BUILT_IN, Arrangement, defines, table_to_json
from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait
from weft.comm.selector import (
    ChosenCollectives,
    discover_nodes,
    measure_table,
    share_node_memory,
    slowest_of,
    time_once,
    work_of,
)
from weft.config.cluster import Collective

HOPELESS = 3.0
"""A way that takes so many times the fastest, in a run that all have warmed up for, is not run again."""
_KEPT_ALWAYS = ("ring", "hierarchical", "hierarchical+recursive_doubling")
"""They are compared with each other, too."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 6, 60
_ACROSS = ("recursive_doubling", "direct", "tree")


def table_rank(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A contender whose step measures a table as `weft comm explain` does, and writes it to `output`."""
    view = _world()

    def step(index: int) -> float:
        del index
        table = measure_table(view, collectives=settings["collectives"], sizes=settings["sizes"])
        if view.index == 0:
            Path(settings["output"]).write_text(table_to_json(table))
        return 0.0

    return step


def race_rank(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A contender whose step races all ways of every cell, each cell for about `seconds`, and writes to `output`:
    {collective: {size: {"seconds": {way: [by round]}, "left_out": {way: seconds of one run}}}}."""
    view = _world()
    place = discover_nodes(view)

    def step(index: int) -> float:
        del index
        found: dict[str, dict[str, Any]] = {}
        with ChosenCollectives(view, place=place, node=share_node_memory(view, place)) as carrier:
            for collective in settings["collectives"]:
                cells = found.setdefault(collective, {})
                for size in settings["sizes"]:
                    works = {name: work_of(carrier, collective, size, name) for name in ways_of(collective, place)}
                    cells[str(size)] = race(works, view, settings["seconds"], settings["chosen"])
        if view.index == 0:
            Path(settings["output"]).write_text(json.dumps({"nodes": place.nodes, "cells": found}))
        return 0.0

    return step


def ways_of(collective: Collective, place: Arrangement) -> list[str]:
    """Every way that does a collective on ranks that lie so."""
    names = [*BUILT_IN, *ALGORITHMS]
    if len(place.nodes) == 1:
        names.remove("hierarchical")
    else:
        names += [f"hierarchical+{across}" for across in _ACROSS]
    return [name for name in names if defines(name, collective)]


def race(
    works: Mapping[str, Callable[[], Wait]], view: GroupView, seconds: float, chosen: Sequence[str]
) -> dict[str, Any]:
    """Run all works in turn, round after round, an even number of times; seconds of the slowest rank.  What is `chosen`
    somewhere is never left out.  Call on every
    rank of the group."""
    _round(list(works.values()), 0, view)  # connects ranks and prepares schedules
    begin = time.perf_counter()
    once = slowest_of([_round(list(works.values()), 0, view)], view)[0].tolist()
    first = dict(zip(works, once, strict=True))
    limit = HOPELESS * min(once)
    kept = [name for name in works if first[name] <= limit or name in (*_KEPT_ALWAYS, *chosen)]
    share = sum(first[name] for name in kept) / sum(once)
    each = float(slowest_of([[(time.perf_counter() - begin) * share]], view))
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / each) // 2 * 2))
    samples = [_round([works[name] for name in kept], turn, view) for turn in range(rounds)]
    table = slowest_of(samples, view)
    return {
        "seconds": {name: table[:, column].tolist() for column, name in enumerate(kept)},
        "left_out": {name: first[name] for name in works if name not in kept},
    }


def _round(works: Sequence[Callable[[], Wait]], turn: int, view: GroupView) -> list[float]:
    """Seconds of each, by work; who begins differs from round to round."""
    first = turn % len(works)
    found = {index: time_once(works[index], view) for index in (*range(first, len(works)), *range(first))}
    return [found[index] for index in range(len(works))]


def _world() -> GroupView:
    dist.init_process_group("gloo")
    return GroupView(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
