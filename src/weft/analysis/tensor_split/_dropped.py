"""Whether dropouts can tell which part of the whole activation a rank drops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from weft.analysis.tensor_split._dims import place_of
from weft.analysis.tensor_split._flow import ForwardFlow
from weft.analysis.trace._events import Event, Trace
from weft.config.recipe import SplitKind

Places = Sequence[tuple[Event, int]]
"""Events that work on parts, and the dim of their first result that is divided."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def is_dropout(module: nn.Module) -> bool:
    """Whether it drops by keys of its own, and a rule says of what it has a part."""
    return isinstance(module, _DROPOUTS)


def kind_on(event: Event, at: int) -> SplitKind:
    """How a dropout's rule says that its input is divided along a dim."""
    return "features" if at == len(event.outputs[0].shape) - 1 else "heads"


def has_parts_in_front(flow: ForwardFlow, along: Sequence[int], atom: int) -> bool:
    """Whether an atom is one of a dim, but not its first: parts of it do not lie behind one another."""
    return atom in along and any(flow.atoms.size(leaf) > 1 for leaf in along[: along.index(atom)])


def why_dropped_otherwise(
    trace: Trace, flow: ForwardFlow, root: nn.Module, atom: int, mine: Places, all_: Places
) -> str:
    """Why entries would be dropped that one process keeps, if an atom were divided; empty: they would not.

    `mine`: events on parts of it; `all_`: on parts of anything that is divided.
    """
    for event, at in mine:
        if event.name != "dropout":
            continue
        along, last = flow.atoms.leaves(flow.dims[event.outputs[0]][at]), len(event.outputs[0].shape) - 1
        by_rule = is_dropout(root.get_submodule(event.module))
        if has_parts_in_front(flow, along, atom) or (by_rule and at not in (1, last)):
            return f"{place_of(event)} drops parts of it that do not lie behind one another"
    kinds = {event.index: kind_on(event, at) for event, at in all_}
    for module in dict.fromkeys(event.module for event, _ in mine if event.name == "dropout"):
        runs = [event for event in trace.events if event.name == "dropout" and event.module == module]
        if is_dropout(root.get_submodule(module)) and len({kinds.get(event.index) for event in runs}) > 1:
            return f"{module} drops entries of what is divided otherwise, or not at all, too"
    return ""
