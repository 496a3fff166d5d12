"""Finds whether ranks may share the sequence of a model that says nothing of its attention, from its forward."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.describe._events import Event, Trace
from weft.describe._fused import WHOLE_ATTENTION
from weft.describe._modes import BOTH, first_difference
from weft.describe._pointwise import LAYOUT
from weft.describe._token_flow import AttentionKind, Meeting, TokenFlow, follow_tokens
from weft.describe._trace import Mode, trace
from weft.errors import RecipeError
from weft.models import Blueprint, token_example
from weft.stand_ins import copy_on_meta
from weft.techniques.context.shares import tokens_of

_POSITIONS = "position_ids"
"""Keyword by which forwards take the places of tokens in their samples."""
_NOT_FOLLOWED = (nn.MultiheadAttention, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules whose attention, or whose draws, ranks could not share."""
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


def look_at_tokens(blueprint: Blueprint, ranks: int = 1) -> None:
    """Where nothing says how the tokens of a model of `transformers` see one another, see whether its forward does,
    also of as many tokens as each of `ranks` ranks would have.

    Enters into the blueprint how ranks may share its sequence, or why they cannot.  A module of one's own may do in its
    backward what no forward shows, so it must say it itself (`Blueprint.attention`).
    """
    length, known = blueprint.sequence_length, blueprint.attention is not None or blueprint.no_shared_sequence
    if known or length is None or not type(blueprint.module).__module__.startswith("transformers."):
        return
    found = find_shared_sequence(blueprint, {tokens_of(length, ranks, rank) for rank in range(ranks)})
    if isinstance(found, str):
        blueprint.no_shared_sequence = found
        return
    blueprint.position_input, blueprint.attention = found.position_input, found.attention
    blueprint.attending = found.attending
    if not _isolates(blueprint):  # masks that keep documents apart are asked for where nobody shares a sequence
        _drop_masks(blueprint.module)


def _isolates(blueprint: Blueprint) -> bool:
    """Whether the model is given the places of tokens in their documents, by which it keeps these apart."""
    return blueprint.inputs.get(_POSITIONS) == "positions"


def _drop_masks(module: nn.Module) -> None:
    from weft.models.hf import drop_masks  # models of one's own may need nothing of transformers

    drop_masks(module)


def find_shared_sequence(blueprint: Blueprint, lengths: Iterable[int] = ()) -> SharedSequence | str:
    """Return how the tokens of a model meet, or why ranks cannot share its sequence: a sentence without its end.

    A forward is followed as one process runs it, others with the places of the tokens given, as ranks run it, and of
    fewer tokens, `lengths` among them: all must compute the same, and in evaluation those that differ from it.  Copies
    without memory run, so that what the forward counts or keeps stays as it is.  What it does in its backward (a
    `torch.autograd.Function` of its own, hooks), and whether it runs parts again by itself, is not looked at.
    """
    try:
        return _found(blueprint, lengths)
    except _NoSequenceError as problem:
        return str(problem)
    except RecipeError as problem:
        return f"its forward could not be followed ({str(problem).rstrip('.')})"
    except Exception as problem:  # a forward may do what no rule of the analysis foresaw
        said = next(iter(str(problem).splitlines()), "")
        return f"looking at its forward failed ({type(problem).__name__}: {said})"


def _found(blueprint: Blueprint, lengths: Iterable[int]) -> SharedSequence:
    if _isolates(blueprint):  # that it does is known; who sees whom of one document is what one sample shows
        given = {keyword: name for keyword, name in blueprint.inputs.items() if keyword != _POSITIONS}
        blueprint = replace(blueprint, inputs=given)
    length, others = blueprint.sequence_length, set(blueprint.inputs.values()) - {"tokens"}
    if length is None or length < _FEWEST or "tokens" not in blueprint.inputs.values():
        raise _NoSequenceError("its samples are no sequences of tokens")
    if others:
        raise _NoSequenceError(f"its forward also takes {', '.join(sorted(others))}, which nothing says how to share")
    for name, module in blueprint.module.named_modules():
        if isinstance(module, _NOT_FOLLOWED):
            raise _NoSequenceError(f"{name} is an nn.{type(module).__name__}")
    if any(parameter.dim() > 2 for parameter in blueprint.module.parameters()):
        from weft.describe._expert_calls import proven_stacks  # loaded where there may be any

        blueprint = replace(blueprint, stacks=proven_stacks(blueprint))
    lengths = {length - 1, max(2, length // 2), max(2, length // 4), *lengths} - {length}
    placed = blueprint
    if _POSITIONS in inspect.signature(blueprint.module.forward).parameters:
        placed = replace(blueprint, inputs={**blueprint.inputs, _POSITIONS: "positions"})
    whole, evaluated = (_without_masks_of_transformers(placed, length, mode) for mode in BOTH)
    found = _in_mode(blueprint, placed, whole, lengths, "as it is")
    where = first_difference(blueprint.module, whole, evaluated)
    if where is not None:
        try:
            other = _in_mode(blueprint, placed, evaluated, lengths, "evaluation")
        except _NoSequenceError as problem:
            raise _NoSequenceError(f"in evaluation, {problem}") from problem
        if other != found:
            raise _NoSequenceError(f"its tokens meet otherwise in evaluation{f' ({where})' if where else ''}")
    return SharedSequence("" if placed is blueprint else _POSITIONS, *found)


_Found = tuple[AttentionKind, tuple[str, ...]]


def _in_mode(blueprint: Blueprint, placed: Blueprint, whole: Trace, shorter: Iterable[int], mode: Mode) -> _Found:
    """See how tokens meet in a mode; `placed` is the model that is given their places, or the same, and `whole` its
    forward."""
    assert blueprint.sequence_length is not None, "it was asked for"
    alone = _trace(blueprint, blueprint.sequence_length, mode)
    _kind(_without_masks(follow_tokens(alone, ["tokens"]).calls))
    if placed is not blueprint and _computed(alone) != _computed(whole):
        raise _NoSequenceError(f"it computes something else where it is given {_POSITIONS}, from 0 on")
    return _followed(placed, whole, shorter, mode)


def _followed(blueprint: Blueprint, whole: Trace, shorter: Iterable[int], mode: Mode) -> _Found:
    """Follow a forward of the whole samples beside some of fewer tokens, as ranks have: all must compute the same."""
    fields = list(dict.fromkeys(blueprint.inputs.values()))
    meetings: tuple[Meeting, ...] = ()
    for tokens in sorted(shorter):
        part = _trace(blueprint, tokens, mode, without_masks=True)
        if [_step(event) for event in whole.events] != [_step(event) for event in part.events]:
            raise _NoSequenceError("what it computes depends on how many tokens it is given")
        meetings, others = (_checked(follow_tokens(one, fields, two)) for one, two in ((whole, part), (part, whole)))
        if meetings != others:
            raise _NoSequenceError("what its tokens see depends on how many there are")
    return _kind(meetings), tuple(dict.fromkeys(meeting.module for meeting in meetings))


def _trace(blueprint: Blueprint, length: int, mode: Mode = "as it is", *, without_masks: bool = False) -> Trace:
    blueprint = replace(blueprint, example=token_example(length, blueprint.inputs.values()))
    module = copy_on_meta(blueprint.module)
    _count_places(module)
    if without_masks:
        _drop_masks(module)
    fused = WHOLE_ATTENTION
    if blueprint.stacks:
        from weft.describe._expert_calls import as_event, mix_by_token, stand_in_for_experts  # where there are any

        stand_in_for_experts(module, blueprint.stacks)
        fused = {**fused, mix_by_token: as_event}
    replaced = _replaced_buffers(module)
    blueprint = replace(blueprint, module=module)
    found = trace(blueprint, torch.float32, loss=False, fused=fused, reads=True, modes=(mode,))
    if replaced:  # what a forward writes into a buffer is followed
        raise _NoSequenceError(f"its forward puts something else in the place of its buffer {replaced[0]}")
    return found


def _replaced_buffers(module: nn.Module) -> list[str]:
    """Return what the names of the buffers will be that a forward has replaced."""
    before: dict[str, torch.Tensor] = {}
    names: list[str] = []

    def enter(module: nn.Module, args: object) -> None:
        before.update(module.named_buffers())

    def leave(module: nn.Module, args: object, output: object) -> None:
        names.extend(name for name, buffer in module.named_buffers() if before.get(name) is not buffer)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
    return names


def _without_masks_of_transformers(blueprint: Blueprint, length: int, mode: Mode) -> Trace:
    try:
        return _trace(blueprint, length, mode, without_masks=True)
    except RecipeError as problem:
        _trace(blueprint, length, mode)  # what stands against the model as it is, is said as that
        raise _NoSequenceError(
            "its forward does not run without a mask of who sees whom, which a rank would make of its own tokens alone"
        ) from problem


def _count_places(module: nn.Module) -> None:
    """Give buffers of places the values that they have in transformers, 0, 1, …, for there are none on the meta
    device."""
    for name, buffer in module.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf == _POSITIONS and buffer.is_meta and buffer.dtype == torch.int64 and buffer.dim() == 2:
            setattr(module.get_submodule(owner), leaf, torch.arange(buffer.shape[1]).expand(buffer.shape))


def _checked(flow: TokenFlow) -> tuple[Meeting, ...]:
    if flow.problem:
        raise _NoSequenceError(f"its tokens meet outside of attention: {flow.problem}")
    attending = {meeting.module for meeting in flow.meetings}
    if len([call for call in flow.calls if call.module in attending]) > len(flow.meetings):
        raise _NoSequenceError("a module attends between its tokens and between something else")
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
    """Operators on numbers that are no integers, with the numbers and places that they are given; layouts left out."""
    return Counter(
        (event.name, *_numbers(event), *event.reads)
        for event in found.events
        if event.name not in LAYOUT and any(value.dtype.is_floating_point for value in event.outputs)
    )


def _step(event: Event) -> tuple[object, ...]:
    """What an operator does, whatever the sizes: layouts are told by their names alone."""
    per_token = event.name not in LAYOUT and bool(event.inputs)
    return (event.name, event.module, *(_numbers(event) if per_token else ()))


def _numbers(event: Event) -> tuple[object, ...]:
    given = (*event.arguments, *(event.keywords[name] for name in sorted(event.keywords)))
    return tuple(number for number in given if isinstance(number, bool | int | float))
