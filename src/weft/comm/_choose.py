"""What carries the collectives of a training: as its plan says, or as a kept table says that was measured before."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.collective import Arrangement, ChoiceTable, Row, find_table, parse_choices, tables_of_others
from weft.comm._chosen import Collectives
from weft.comm._device import carrier_of, sends_messages
from weft.comm._hosts import discover_nodes
from weft.comm._mesh import GroupView
from weft.comm._node import NodeMemory, share_node_memory
from weft.comm._share import share_table
from weft.comm.selector import seconds_of
from weft.errors import PlanError
from weft.figures import spell_figure

if TYPE_CHECKING:
    from weft.cluster import Collective

DRIFT = 1.3
"""So many times slower or faster than its table says, a group is said to have changed."""
_CHECKED_SECONDS = 0.02
"""What is timed to find out takes no more than that, so that it is over in half a second."""


def collectives_for(
    view: GroupView, device: torch.device, algorithm: str = "auto", *, folder: Path | None = None
) -> Collectives:
    """Return what carries collectives of a device's tensors over a group.  Call on every rank of the group alike.

    Algorithms that are named send messages over Gloo, also in a group whose ranks share memory, which goes on to carry
    everything else in it.

    Args:
        algorithm: as in a plan.  `auto` is what Weft does without a choice, always the same.  `measured` takes the
            table kept of such a group in `folder` (by default below ~/.cache/weft), as the first rank reads it.  Where
            the links have drifted since, that rank warns; the choices stay.

    Raises:
        PlanError: an algorithm is named for an accelerator, whose library chooses itself; `measured`, and nothing has
            been.
    """
    if algorithm != "auto" and device.type != "cpu":
        raise PlanError(
            f'plan.data_parallel.algorithm = "{algorithm}" cannot be run on {device.type}: on CUDA NCCL chooses. '
            'Use "auto".'
        )
    if algorithm == "auto" or view.group is None or not sends_messages(device, view.group):
        return Collectives(view)  # also in a dry run, whose group carries nothing
    if algorithm != "measured":
        choices = parse_choices(algorithm)
        place, node = _levels_of(choices.names, view)
        return Collectives(view, lambda collective, size_bytes: choices.algorithm_for(size_bytes), place, node)
    place = discover_nodes(view)
    table = _kept_table(view, place, folder)
    _, node = _levels_of([row.choice for row in table.rows], view, place)
    carrier = Collectives(view, table.choose, place, node)
    drift = drift_of(carrier, table)
    if view.index == 0 and not 1 / DRIFT <= drift <= DRIFT:
        warnings.warn(
            f"collectives of {view.size} ranks take {spell_figure(drift, 2)} times what their table says: the links,"
            f" or what else uses them, have changed since. The choices stay;"
            f" {_measuring(view, place)} makes them anew.",
            stacklevel=2,
        )
    return carrier


def drift_of(carrier: Collectives, table: ChoiceTable) -> float:
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
            ratios.append(seconds_of(carrier, collective, row.size_bytes, row.choice) / expected)
    return statistics.median(ratios) if ratios else 1.0


def _measuring(view: GroupView, place: Arrangement) -> str:
    """The command that measures such a group; one host's ranks share memory unless they are told not to."""
    assert view.group is not None, "one rank has nothing to choose"
    is_kept_off = len(place.nodes) == 1 and carrier_of(view.group) == "gloo"
    return f"weft comm explain --measure --processes {view.size}{' --backend gloo' if is_kept_off else ''}"


def _expected(row: Row) -> float | None:
    return next((each.measured_seconds for each in row.candidates if each.name == row.choice), None)


def _kept_table(view: GroupView, place: Arrangement, folder: Path | None) -> ChoiceTable:
    """The table that the first rank finds, on all ranks."""
    assert view.group is not None, "one rank has nothing to choose"
    mine: ChoiceTable | None = None
    others, backend = "", carrier_of(view.group)
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
