"""Finds whether ranks may share the sequence of a model that says nothing of its attention, from its forward."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.describe._events import Event, Trace
from weft.describe._fused import WHOLE_ATTENTION
from weft.describe._pointwise import LAYOUT
from weft.describe._token_flow import AttentionKind, Meeting, TokenFlow, follow_tokens
from weft.describe._trace import trace
from weft.errors import RecipeError
from weft.models import Blueprint, token_example
from weft.stand_ins import copy_on_meta

_POSITIONS = "position_ids"
"""Keyword by which forwards take the places of tokens in their samples."""
_FEWEST = 4
"""Tokens of a sample: two runs for each of two ranks."""


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """How the tokens of a model meet."""

    position_input: str
    """Keyword that takes their places; empty: it needs none."""
    attention: AttentionKind
    attending: tuple[str, ...]
    """Modules that call attention of the tokens."""


class _NoSequenceError(Exception):
    """Why ranks cannot share it: a sentence without its end."""


def look_at_tokens(blueprint: Blueprint) -> None:
    """Where nothing says how the tokens of a model see one another, see whether its forward does.

    Enters into the blueprint how ranks may share its sequence, or why they cannot.
    """
    if blueprint.attention is not None or blueprint.no_shared_sequence or blueprint.sequence_length is None:
        return
    found = find_shared_sequence(blueprint)
    if isinstance(found, str):
        blueprint.no_shared_sequence = found
        return
    blueprint.position_input, blueprint.attention = found.position_input, found.attention
    blueprint.attending = found.attending
    _drop_masks(blueprint.module)


def _drop_masks(module: nn.Module) -> None:
    from weft.models.hf import drop_masks  # models of one's own may need nothing of transformers

    drop_masks(module)


def find_shared_sequence(blueprint: Blueprint) -> SharedSequence | str:
    """Return how the tokens of a model meet, or why ranks cannot share its sequence: a sentence without its end.

    A forward is followed as one process runs it, and another with the places of the tokens given, as ranks run it: both
    must compute the same.  Copies without memory run, so that what the forward counts or keeps stays as it is.
    """
    try:
        return _found(blueprint)
    except _NoSequenceError as problem:
        return str(problem)
    except RecipeError as problem:
        return f"its forward could not be followed ({str(problem).rstrip('.')})"
    except Exception as problem:  # a forward may do what no rule of the analysis foresaw
        said = next(iter(str(problem).splitlines()), "")
        return f"looking at its forward failed ({type(problem).__name__}: {said})"


def _found(blueprint: Blueprint) -> SharedSequence:
    length, others = blueprint.sequence_length, set(blueprint.inputs.values()) - {"tokens"}
    if length is None or length < _FEWEST or "tokens" not in blueprint.inputs.values():
        raise _NoSequenceError("its samples are no sequences of tokens")
    if others:
        raise _NoSequenceError(f"its forward also takes {', '.join(sorted(others))}, which nothing says how to share")
    if _POSITIONS not in inspect.signature(blueprint.module.forward).parameters:
        return SharedSequence("", *_followed(blueprint, length))
    alone = _trace(blueprint, length)
    _kind(_without_masks(follow_tokens(alone, ["tokens"]).calls))
    placed = replace(blueprint, inputs={**blueprint.inputs, _POSITIONS: "positions"})
    if _computed(alone) != _computed(_trace(placed, length, without_masks=True)):
        raise _NoSequenceError(f"it computes something else where it is given {_POSITIONS}")
    return SharedSequence(_POSITIONS, *_followed(placed, length))


def _followed(blueprint: Blueprint, length: int) -> tuple[AttentionKind, tuple[str, ...]]:
    """Follow a forward of the whole samples and one of a token less, as of ranks, which must compute the same."""
    whole, part = (_trace(blueprint, tokens, without_masks=True) for tokens in (length, length - 1))
    fields = list(dict.fromkeys(blueprint.inputs.values()))
    meetings, others = (_checked(follow_tokens(found, fields)) for found in (whole, part))
    if meetings != others or _computed(whole) != _computed(part):
        raise _NoSequenceError("what it computes depends on how many tokens it is given")
    return _kind(meetings), tuple(dict.fromkeys(meeting.module for meeting in meetings))


def _trace(blueprint: Blueprint, length: int, *, without_masks: bool = False) -> Trace:
    blueprint = replace(blueprint, example=token_example(length, blueprint.inputs.values()))
    module = copy_on_meta(blueprint.module)
    if without_masks:
        _drop_masks(module)
    return trace(replace(blueprint, module=module), torch.float32, loss=False, fused=WHOLE_ATTENTION)


def _checked(flow: TokenFlow) -> tuple[Meeting, ...]:
    if flow.problem:
        raise _NoSequenceError(f"its tokens meet outside of attention: {flow.problem}")
    return _without_masks(flow.meetings)


def _without_masks(meetings: tuple[Meeting, ...]) -> tuple[Meeting, ...]:
    for meeting in meetings:
        if meeting.masked:
            raise _NoSequenceError(f"{meeting.module} gives attention a mask, or scores to add")
        if meeting.dropped:
            raise _NoSequenceError(f"{meeting.module} drops attention by a function")
    return meetings


def _kind(meetings: tuple[Meeting, ...]) -> AttentionKind:
    kinds = {meeting.causal for meeting in meetings}
    if not kinds:
        raise _NoSequenceError("none of its attention of its tokens is a call of scaled_dot_product_attention")
    if len(kinds) > 1:
        raise _NoSequenceError("some of its attention is causal, and some sees every token")
    return "causal" if kinds.pop() else "full"


def _computed(found: Trace) -> Counter[tuple[object, ...]]:
    """Operators on numbers that are no integers, with the numbers that they are given; layouts left out."""
    return Counter(
        (event.name, *_numbers(event))
        for event in found.events
        if event.name not in LAYOUT and any(value.dtype.is_floating_point for value in event.outputs)
    )


def _numbers(event: Event) -> tuple[object, ...]:
    given = (*event.arguments, *(event.keywords[name] for name in sorted(event.keywords)))
    return tuple(number for number in given if isinstance(number, bool | int | float))
