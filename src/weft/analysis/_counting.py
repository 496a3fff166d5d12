"""Whether a forward counts the places of its tokens beside a padding token, as RoBERTa does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.analysis.trace._events import Event, Trace

_COUNTING = frozenset({"ne", "cumsum", "add", "mul", "_to_copy"})
"""Operators of a forward that counts positions itself, where it is not given any."""
_NEEDED = ("ne", "cumsum", "mul")


def token_beside(alone: Trace) -> int | None:
    """Return the token with which a forward compares its tokens, if it counts anything: None, if there is none, or
    several."""
    tokens = alone.inputs["tokens"]
    asked = {
        event.arguments[1]
        for event in alone.events
        if event.name == "ne" and event.inputs == (tokens,) and isinstance(event.arguments[1], int)
    }
    counts = any(event.name == "cumsum" for event in alone.events)
    return asked.pop() if counts and len(asked) == 1 else None


def counts_alone(alone: Trace, placed: Trace) -> bool:
    """Whether a forward that is given no places does nothing else with its tokens than one that is given them, but for
    counting.

    What comes of sums of a mask, of products with it and of sums with numbers is known by its values: those of a sample
    that has padding in it are compared (`Event.reads`), and no threshold can hide among these operators.
    """
    more = Counter(map(_what, _from_tokens(alone))) - Counter(map(_what, placed.events))
    names = Counter(name for name, *_ in more.elements())
    return _COUNTING.issuperset(names) and all(names[name] == 1 for name in _NEEDED)


def _from_tokens(trace: Trace) -> Iterator[Event]:
    """Return the storages that depend on which tokens there are: masks that one process makes of nothing do not."""
    known = {trace.inputs["tokens"].storage}
    for event in trace.events:
        if any(value.storage in known for value in event.inputs):
            known.update(value.storage for value in (*event.outputs, *(event.inputs[:1] if event.mutates else ())))
            yield event


def _what(event: Event) -> tuple[object, ...]:
    return (event.name, event.module, tuple(value.shape for value in event.outputs))
