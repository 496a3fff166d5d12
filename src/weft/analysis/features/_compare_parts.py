"""Whether a forward on one of several parts of the features does what the whole one does, operator by operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.utils._pytree import tree_leaves

from weft.analysis.features._feature_flow import FeatureWalker, NoPartsError, Parts
from weft.analysis.tensor_split._rehearse import RESHAPES, misshaped
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._fused import FUSED_NAMES
from weft.analysis.trace._trace import Unfinished

_LAID_OUT = frozenset({*RESHAPES, "clone", "alias", "detach", "_assert_tensor_metadata", "_assert_async", "narrowed"})
"""Operators that may run or not, as a part lies in memory."""
_PIECES = ("split", "split_with_sizes", "chunk", "unsafe_split", "expand")


def compare(walker: FeatureWalker, share: tuple[Trace | Unfinished, Sequence[Event]], parts: int) -> None:
    """Refuse a forward that does something else on a part.

    Raises:
        NoPartsError: names the first operator that differs.
    """
    done = 0
    held, theirs = walker.parts, _Steps(share[1])
    reshaped: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def local(value: Value, narrowed: Mapping[Value, int] = MappingProxyType({})) -> tuple[int, ...]:
        found = held.get(value)
        at = narrowed.get(value) if found is None else found.dim
        return tuple(size // parts if at == dim else size for dim, size in enumerate(value.shape))

    for mine in walker.trace.events:
        if mine.name in RESHAPES and mine.inputs[0] in held:
            reshaped.append((local(mine.inputs[0]), local(mine.outputs[0])))
        if mine.name in _LAID_OUT:
            continue
        other, before = theirs.next()
        at = partial(local, narrowed=walker.narrowed.get(mine.index, {}))
        problem = _ending(share[0]) if other is None else _difference(mine, other, at, held, parts)
        problem = problem or misshaped(reshaped, before)
        if problem:
            found = NoPartsError(f"{mine.module or 'the forward'} cannot work on a part of the features: {problem}")
            found.suspects, found.done, found.place = walker.made_by(mine), done, mine.module
            raise found
        reshaped.clear()
        done += 1
    if theirs.next()[0] is not None or isinstance(share[0], Unfinished):
        found = NoPartsError("its forward on a part of the features goes on where the whole one ends")
        found.done = done
        raise found


def _ending(share: Trace | Unfinished) -> str:
    return "it ends" if isinstance(share, Trace) else str(share).splitlines()[0].split(". ")[0]


class _Steps:
    def __init__(self, events: Iterable[Event]) -> None:
        self._events = iter(events)

    def next(self) -> tuple[Event | None, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Return the next event that computes something, and what was reshaped before it."""
        reshaped: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for event in self._events:
            if event.name in RESHAPES:
                reshaped.append((event.inputs[0].shape, event.outputs[0].shape))
            if event.name not in _LAID_OUT:
                return event, reshaped
        return None, reshaped


def _difference(mine: Event, other: Event, local: Any, held: Mapping[Value, Parts], parts: int) -> str:
    if (mine.name, mine.module) != (other.name, other.module):
        return f"it computes {other.name} where the whole model computes {mine.name}"
    count = 1 if mine.name in FUSED_NAMES else None  # others are what a kernel keeps
    made = mine.outputs[:count], other.outputs[:count]
    for what, values, found in (("takes", mine.inputs, other.inputs), ("makes", *made)):
        shapes = [local(value) for value in values], [value.shape for value in found]
        if shapes[0] != shapes[1]:
            return f"{mine.name} {what} {shapes[1]} instead of {shapes[0]}"
    numbers = list(_numbers(mine, held, parts)), list(_numbers(other, {}, 1))
    if numbers[0] != numbers[1]:
        return f"{mine.name} takes the numbers {numbers[1]} instead of {numbers[0]}"
    return "" if mine.reads == other.reads else f"{mine.name} takes other values"


def _numbers(event: Event, held: Mapping[Value, Parts], parts: int) -> Iterator[object]:
    """Numbers that an operator computes with, and where it does; sizes left out, which the shapes tell."""
    if event.name in _PIECES:
        given: Sequence[Any] = ()
    elif event.name == "slice":
        at, start = int(event.arguments[1]), int(event.arguments[2] or 0)
        found = held.get(event.inputs[0])
        yield at
        yield start // parts if found and found.dim == at % len(event.inputs[0].shape) else start
        given = event.arguments[4:]
    else:
        shape = list(event.outputs[0].shape) if event.outputs else []
        given = [each for each in event.arguments if not (isinstance(each, list | tuple) and list(each) == shape)]
    for leaf in tree_leaves((list(given), {name: event.keywords[name] for name in sorted(event.keywords)})):
        if isinstance(leaf, int | float | str):
            yield leaf
