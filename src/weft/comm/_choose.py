"""What carries a group's collectives by algorithms: as a plan names them, or as a kept table says that was measured."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.comm._chosen import ChosenCollectives
from weft.comm._hosts import discover_nodes
from weft.comm._node import NodeMemory, share_node_memory
from weft.comm._share import share_table
from weft.comm.algorithms import Arrangement, ChoiceTable, TableRow, find_table, parse_choices, tables_of_others
from weft.comm.device import backend_of
from weft.comm.mesh import GroupView
from weft.comm.selector import seconds_of
from weft.errors import PlanError
from weft.formatting import format_number

if TYPE_CHECKING:
    from weft.config.cluster import Collective

DRIFT = 1.3
"""A group that is so many times slower or faster than its table says is said to have changed."""
_CHECKED_SECONDS = 0.02
"""What is timed to find out takes no more than that, so that it is over in half a second."""


def named_collectives(view: GroupView, algorithm: str) -> ChosenCollectives:
    """Return what carries collectives by a plan's list of algorithms by size."""
    choices = parse_choices(algorithm)
    place, node = _levels_of(choices.names, view)
    return ChosenCollectives(view, lambda collective, size_bytes: choices.algorithm_for(size_bytes), place, node)


def measured_collectives(view: GroupView, folder: Path | None) -> ChosenCollectives:
    """Return what carries collectives as a kept table says; warn on the first rank where the links have drifted.

    Raises:
        PlanError: there is no table of such a group.
    """
    place = discover_nodes(view)
    table = _kept_table(view, place, folder)
    _, node = _levels_of([row.choice for row in table.rows], view, place)
    chosen = ChosenCollectives(view, table.choose, place, node)
    drift = drift_of(chosen, table)
    if view.index == 0 and not 1 / DRIFT <= drift <= DRIFT:
        warnings.warn(
            f"collectives of {view.size} ranks take {format_number(drift, 2)} times what their table says: the links,"
            f" or what else uses them, have changed since. The choices stay;"
            f" {_measuring(view, place)} makes them anew.",
            stacklevel=2,
        )
    return chosen


def drift_of(chosen: ChosenCollectives, table: ChoiceTable) -> float:
    """Return how many times longer collectives take than a table says, from one size of each; 1 where none is short.

    Call on every rank of the group alike; all get the same, in half a second at most.
    """
    ratios: list[float] = []
    kinds: dict[Collective, None] = dict.fromkeys(row.collective for row in table.rows)
    for collective in kinds:
        known = [(seconds, row) for row in table.rows if row.collective == collective and (seconds := _expected(row))]
        short = [(seconds, row) for seconds, row in known if seconds <= _CHECKED_SECONDS]
        if short:
            expected, row = max(short, key=lambda pair: pair[1].size_bytes)
            ratios.append(seconds_of(chosen, collective, row.size_bytes, row.choice) / expected)
    return statistics.median(ratios) if ratios else 1.0


def _measuring(view: GroupView, place: Arrangement) -> str:
    """The command that measures such a group; one host's ranks share memory unless they are told not to."""
    assert view.group is not None, "one rank has nothing to choose"
    is_kept_off = len(place.nodes) == 1 and backend_of(view.group) == "gloo"
    return f"weft comm explain --measure --processes {view.size}{' --backend gloo' if is_kept_off else ''}"


def _expected(row: TableRow) -> float | None:
    return next((candidate.measured_seconds for candidate in row.candidates if candidate.name == row.choice), None)


def _kept_table(view: GroupView, place: Arrangement, folder: Path | None) -> ChoiceTable:
    """The table that the first rank finds, on all ranks."""
    assert view.group is not None, "one rank has nothing to choose"
    mine: ChoiceTable | None = None
    others, backend = "", backend_of(view.group)
    if view.index == 0:
        mine = find_table(view.size, place.nodes, backend, folder=folder)
        others = "" if mine is not None else tables_of_others(view.size, place.nodes, backend, folder=folder)
    table = share_table(mine, view)
    if table is None:
        raise PlanError(
            f'plan.data_parallel.algorithm = "measured", but nothing has been measured for {view.size} ranks that lie'
            f' as these do.{others} Run {_measuring(view, place)}, or use "auto".'
        )
    return table


def _levels_of(
    names: Iterable[str], view: GroupView, place: Arrangement | None = None
) -> tuple[Arrangement | None, NodeMemory | None]:
    """How the ranks lie and what those of this host share, where one of the algorithms asks for it."""
    if not any(name.startswith("hierarchical") for name in names):
        return place, None
    place = place if place is not None else discover_nodes(view)
    return place, share_node_memory(view, place)
