"""Finds whether ranks may share the sequence of a model that says nothing of its attention, from its forward."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.analysis._counting import counts_alone, token_beside
from weft.analysis.tokens._own_backward import own_backward
from weft.analysis.tokens._token_flow import AttentionCall, AttentionKind, TokenFlow, follow_tokens, live_events
from weft.analysis.trace._events import Event, Trace
from weft.analysis.trace._fused import WHOLE_ATTENTION
from weft.analysis.trace._modes import BOTH, first_difference
from weft.analysis.trace._pointwise import LAYOUT
from weft.analysis.trace._trace import Mode, trace
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.meta_forward import copy_on_meta
from weft.techniques.context.token_runs import tokens_of

_POSITIONS = "position_ids"
"""Keyword by which forwards take the places of tokens in their samples."""
_WARNS = "warn_if_padding_and_no_attention_mask"
_NOT_FOLLOWED = (nn.MultiheadAttention, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules whose attention, or whose draws, ranks could not share."""
_WRITTEN_OUT = (
    "it writes its attention out as products and a softmax, or has none: ranks share what calls"
    " scaled_dot_product_attention, or the attention interface of transformers"
)
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
    modified: bool = False
    """Whether some of it does more to its scores than to scale them."""
    padding_token: int | None = None
    """Token beside which places are counted; None: they are 0, 1, …"""


class _NoSequenceError(Exception):
    """Why ranks cannot share it: a sentence without its end."""


def look_at_tokens(blueprint: Blueprint, ranks: int = 1) -> None:
    """Find in a model's forward how its tokens see one another, where nothing says it: in a model of `transformers`,
    also with as many tokens as each of `ranks` ranks would have.

    Writes into the blueprint how ranks may share its sequence, or why they cannot.  A module of one's own may do in its
    backward what no forward shows, so it must say it itself (`Blueprint.attention`).
    """
    length, known = blueprint.sequence_length, blueprint.attention is not None or "context" in blueprint.limits
    if known or length is None or not type(blueprint.module).__module__.startswith("transformers."):
        return
    from weft.model.hf import register, take_interface  # models of one's own may need nothing of transformers

    register()  # a model that a factory made knows Weft's attention then, as those of folders do
    if problem := own_backward(blueprint.module):
        blueprint.limit("context", f"{problem} (`Blueprint.attention` says how its tokens meet)")
        return
    undo = take_interface(blueprint.module)
    sequence = find_shared_sequence(blueprint, {tokens_of(length, ranks, rank) for rank in range(ranks)})
    if isinstance(sequence, str):
        undo()
        blueprint.limit("context", sequence)
        return
    blueprint.position_input, blueprint.attention = sequence.position_input, sequence.attention
    blueprint.attending, blueprint.padding_token = sequence.attending, sequence.padding_token
    blueprint.modifies_scores = sequence.modified
    if not _isolates(blueprint):  # masks that keep documents apart are asked for where nobody shares a sequence
        _drop_masks(blueprint.module)


def _isolates(blueprint: Blueprint) -> bool:
    """Whether the model is given the places of tokens in their documents, by which it keeps these apart."""
    return blueprint.inputs.get(_POSITIONS) == "positions"


def _drop_masks(module: nn.Module) -> None:
    from weft.model.hf import drop_masks  # models of one's own may need nothing of transformers

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
    # That it keeps documents apart is known; who sees whom of one of them is what one sample shows.
    if _isolates(blueprint):
        inputs = {keyword: name for keyword, name in blueprint.inputs.items() if keyword != _POSITIONS}
        blueprint = replace(blueprint, inputs=inputs)
    length, others = blueprint.sequence_length, set(blueprint.inputs.values()) - {"tokens"}
    if length is None or length < _FEWEST or "tokens" not in blueprint.inputs.values():
        raise _NoSequenceError("its samples are no sequences of tokens")
    if others:
        raise _NoSequenceError(f"its forward also takes {', '.join(sorted(others))}, which nothing says how to share")
    for name, module in blueprint.module.named_modules():
        if isinstance(module, _NOT_FOLLOWED):
            raise _NoSequenceError(f"{name} is an nn.{type(module).__name__}")
    if any(parameter.dim() > 2 for parameter in blueprint.module.parameters()):
        from weft.analysis._expert_calls import proven_stacks  # loaded where there may be any

        blueprint = replace(blueprint, stacks=proven_stacks(blueprint))
    # Several other lengths: a forward that branches on its length, or caches something of it, differs in one of them.
    lengths = {length - 1, max(2, length // 2), max(2, length // 4), *lengths} - {length}
    placed = blueprint
    if _POSITIONS in inspect.signature(blueprint.module.forward).parameters:
        placed = replace(blueprint, inputs={**blueprint.inputs, _POSITIONS: "positions"})
    look = _ForwardTrials(blueprint, placed)
    alone = look.alone("as it is")
    if placed is not blueprint and (padding_token := token_beside(alone)) is not None:
        look = look.beside(padding_token)
        alone = look.alone("as it is")
    # Ranks run the forward without masks: each mask would be made of the rank's own tokens.
    whole, evaluated = (look.without_masks(mode) for mode in BOTH)
    flow = look.in_mode(alone, whole, lengths, "as it is")
    where = first_difference(blueprint.module, whole, evaluated)
    alone_evaluated = look.alone("evaluation") if where is not None or look.leaves_out(alone) else None
    if where is None and alone_evaluated is not None:  # masks that are left out may say something else
        where = first_difference(blueprint.module, alone, alone_evaluated)
    if where is not None and alone_evaluated is not None:
        try:
            other = look.in_mode(alone_evaluated, evaluated, lengths, "evaluation")
        except _NoSequenceError as problem:
            raise _NoSequenceError(f"in evaluation, {problem}") from problem
        if other != flow:
            raise _NoSequenceError(f"its tokens meet otherwise in evaluation{f' ({where})' if where else ''}")
    kind, attending, modified = flow
    by_places = "" if placed is blueprint else _POSITIONS
    return SharedSequence(by_places, kind, attending, modified, look.placed.padding_token)


_Found = tuple[AttentionKind, tuple[str, ...], bool]


@dataclass(frozen=True, slots=True)
class _ForwardTrials:
    """Traced forwards of a model, with and without the places of its tokens given."""

    blueprint: Blueprint
    placed: Blueprint
    """The model that is given the places of its tokens, or the same."""

    def beside(self, padding_token: int) -> _ForwardTrials:
        """Look at forwards of samples with this token in them, whose places are counted beside it."""
        alone, placed = (replace(blueprint, padding_token=padding_token) for blueprint in (self.blueprint, self.placed))
        return _ForwardTrials(alone, placed)

    def alone(self, mode: Mode) -> Trace:
        """Return a forward as one process runs it."""
        assert self.blueprint.sequence_length is not None, "it was asked for"
        return self.trace(self.blueprint, self.blueprint.sequence_length, mode)

    def leaves_out(self, alone: Trace) -> bool:
        """Whether masks may have said who sees whom in a forward as one process runs it."""
        return any(event.keywords.get("window") for event in alone.events)

    def in_mode(self, alone: Trace, whole: Trace, shorter: Iterable[int], mode: Mode) -> _Found:
        """See how tokens meet in a mode; `alone` is the forward as one process runs it, and `whole` that of ranks."""
        _kind(_without_masks(follow_tokens(alone, ["tokens"]).calls))
        if self.placed is not self.blueprint and _computed(alone) != _computed(whole):
            said = "from 0 on" if self.placed.padding_token is None else "as its forward seems to count them"
            raise _NoSequenceError(f"it computes something else where it is given {_POSITIONS}, {said}")
        if self.placed.padding_token is not None and not counts_alone(alone, whole):
            raise _NoSequenceError(f"it does more with the padding token than counting its {_POSITIONS} beside it")
        return self._followed(whole, shorter, mode)

    def _followed(self, whole: Trace, shorter: Iterable[int], mode: Mode) -> _Found:
        """Follow a forward of whole samples beside some of fewer tokens, as ranks have: all must compute the same."""
        fields = list(dict.fromkeys(self.placed.inputs.values()))
        calls: tuple[AttentionCall, ...] = ()
        for tokens in sorted(shorter):
            part = self.trace(self.placed, tokens, mode, without_masks=True)
            # The same operators with the same numbers: only sizes may depend on the number of tokens.
            if [_step(event) for event in whole.events] != [_step(event) for event in part.events]:
                raise _NoSequenceError("what it computes depends on how many tokens it is given")
            calls, others = (_checked(follow_tokens(one, fields, two)) for one, two in ((whole, part), (part, whole)))
            if calls != others:
                raise _NoSequenceError("what its tokens see depends on how many there are")
        modified = any(call.modified for call in calls)
        return _kind(calls), tuple(dict.fromkeys(call.module for call in calls)), modified

    def without_masks(self, mode: Mode) -> Trace:
        """Return a forward of whole samples that are given the places of their tokens, as ranks run it."""
        assert self.placed.sequence_length is not None, "it was asked for"
        try:
            return self.trace(self.placed, self.placed.sequence_length, mode, without_masks=True)
        except RecipeError as problem:
            raise _NoSequenceError(
                "its forward does not run without a mask of who sees whom, which a rank would make of its own tokens"
                " alone"
            ) from problem

    def trace(self, blueprint: Blueprint, length: int, mode: Mode, *, without_masks: bool = False) -> Trace:
        """Return a forward of so many tokens."""
        blueprint = replace(blueprint, example=token_example(length, blueprint.inputs.values()))
        from weft.model.hf import count_places  # models of one's own may need nothing of transformers

        module = copy_on_meta(blueprint.module)
        count_places(module)
        _warn_of_nothing(module)
        if without_masks:
            _drop_masks(module)
        fused = WHOLE_ATTENTION
        if blueprint.stacks:
            from weft.analysis._expert_calls import as_event, mix_by_token, stand_in_for_experts  # where there are any

            stand_in_for_experts(module, blueprint.stacks)
            fused = {**fused, mix_by_token: as_event}
        replaced = _replaced_buffers(module)
        blueprint = replace(blueprint, module=module)
        forward = trace(blueprint, torch.float32, loss=False, fused=fused, reads=True, modes=(mode,))
        if replaced:  # what a forward writes into a buffer is followed
            raise _NoSequenceError(f"its forward puts something else in the place of its buffer {replaced[0]}")
        return forward


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


def _warn_of_nothing(module: nn.Module) -> None:
    """Switch off the padding warning of transformers' models: it reads tokens, and nothing else follows from it."""
    for inner in module.modules():
        if hasattr(inner, _WARNS):
            setattr(inner, _WARNS, _nothing)


def _nothing(*of: object) -> None:
    """Warn of nothing."""


def _checked(flow: TokenFlow) -> tuple[AttentionCall, ...]:
    if flow.problem:
        raise _NoSequenceError(f"its tokens meet outside of attention: {flow.problem}")
    attending = {call.module for call in flow.of_tokens}
    if len([call for call in flow.calls if call.module in attending]) > len(flow.of_tokens):
        raise _NoSequenceError("a module attends between its tokens and between something else")
    return _without_masks(flow.of_tokens)


def _without_masks(calls: tuple[AttentionCall, ...]) -> tuple[AttentionCall, ...]:
    for call in calls:
        if call.masked:
            raise _NoSequenceError(f"{call.module} gives attention a mask, or scores to add")
        if call.dropped:
            raise _NoSequenceError(f"{call.module} drops attention by a function")
    return calls


def _kind(calls: tuple[AttentionCall, ...]) -> AttentionKind:
    kinds = {call.causal for call in calls}
    if not kinds:
        raise _NoSequenceError(_WRITTEN_OUT)
    if len(kinds) > 1:
        raise _NoSequenceError("some of its attention is causal, and some sees every token")
    return "causal" if kinds.pop() else "full"


def _computed(forward: Trace) -> Counter[tuple[object, ...]]:
    """Operators on numbers that are no integers, with the numbers and places that they are given; layouts left out, and
    what nothing comes of."""
    live = live_events(forward)
    return Counter(
        (event.name, *_numbers(event), *event.reads)
        for event in forward.events
        if event.index in live
        and event.name not in LAYOUT
        and any(value.dtype.is_floating_point for value in event.outputs)
    )


def _step(event: Event) -> tuple[object, ...]:
    """Return an operator's description that does not depend on sizes: layouts appear by their names alone."""
    per_token = event.name not in LAYOUT and bool(event.inputs)
    return (event.name, event.module, *(_numbers(event) if per_token else ()))


def _numbers(event: Event) -> tuple[object, ...]:
    arguments = (*event.arguments, *(event.keywords[name] for name in sorted(event.keywords)))
    return tuple(number for number in arguments if isinstance(number, bool | int | float))
