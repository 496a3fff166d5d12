"""Follows the tokens of a sample through a forward, to see whether they meet in its attention alone.

Ranks may share the sequence of a model whose every other operator works token by token: then what a rank computes of
its own tokens is what one process computes of them, given their positions, and attention is all that needs those of
other ranks.  The analysis follows the dim of the tokens from the batch to the result, through every operator that the
result depends on.  One that it has no rule for, that runs along that dim, or that combines it with something the model
makes for all tokens by itself, is a reason against it: it never guesses in favour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from weft.analysis.tensor_split._atoms import Dim
from weft.analysis.tensor_split._dims import ALONG, Dims, DimsWalker, argument, place_of
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import MATMULS
from weft.analysis.trace._pointwise import LAYOUT, broadcast, is_elementwise

AttentionKind = Literal["causal", "full"]
_CONSTANTS = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided")
_OF_SOME_SIZE = ("nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive")
_ZEROS = "token_type_ids"
"""Name that models of transformers give a buffer of zeros: every token is of the first kind."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of attention."""

    module: str
    causal: bool
    masked: bool
    dropped: bool
    modified: bool
    """Whether its scores are capped, share their softmax with sinks, or get slopes."""


@dataclass(frozen=True, slots=True)
class TokenFlow:
    """The way of tokens through one forward."""

    of_tokens: tuple[AttentionCall, ...]
    """Attention calls in which the tokens of a sample see one another."""
    calls: tuple[AttentionCall, ...]
    """All calls of attention, whatever they are about."""
    problem: str
    """The first thing that lets tokens meet otherwise: a sentence without its end; empty: nothing."""


def follow_tokens(trace: Trace, fields: Sequence[str], shorter: Trace | None = None) -> TokenFlow:
    """Follow dim 1 of the batch's `fields`, of (samples, tokens), through a forward traced without its loss.

    `shorter`: the same forward, operator by operator, of fewer tokens.  What differs there although it is of no token
    depends on how many there are.
    """
    walker = _TokenWalker(trace, live_events(trace), frozenset() if shorter is None else _counting(trace, shorter))
    walker.constant |= {storage for storage, name in trace.buffers.items() if name.endswith(_ZEROS)}
    tokens = walker.atoms.new(trace.inputs[fields[0]].shape[1])
    for name in fields:
        walker.dims[trace.inputs[name]] = [(), (tokens,)]
    for event in trace.events:
        walker.step(event)
    leaves = walker.atoms.leaves((tokens,))
    problem = next((reason for leaf in leaves if (reason := walker.atoms.reason(leaf))), None)
    if problem is None and not any(walker.is_by_token(value, tokens) for value in trace.outputs):
        problem = "its result has no place for each token"
    return TokenFlow(tuple(walker.of_tokens), tuple(walker.calls), problem or "")


def _counting(whole: Trace, shorter: Trace) -> frozenset[int]:
    """Storages, of the first of two traces, of what may depend on how many tokens a sample has."""
    storages: set[int] = set()
    for event, other in zip(whole.events, shorter.events, strict=True):
        shapes = [value.shape for value in event.outputs] != [value.shape for value in other.outputs]
        numbers = [n for n in event.arguments if _is_number(n)] != [n for n in other.arguments if _is_number(n)]
        single = [read for read in event.reads if read[0]] != [read for read in other.reads if read[0]]
        if event.name == "expand" and event.inputs[0].shape == other.inputs[0].shape:
            shapes = numbers = False  # the same for however many
        if shapes or numbers or single or any(value.storage in storages for value in event.inputs):
            storages.update(value.storage for value in event.outputs)
            if event.mutates:
                storages.add(event.inputs[0].storage)
    return frozenset(storages)


def _is_number(argument: object) -> bool:
    return isinstance(argument, bool | int | float)


def live_events(trace: Trace) -> frozenset[int]:
    """Return events that the result depends on, or the way that the forward takes: what is asked of values."""
    # What it leaves in buffers may be read by the forward after it.
    wanted = {value.storage for value in trace.outputs} | set(trace.buffers)
    views = set(trace.outputs)
    changed = {value.storage for event in trace.events if event.mutates for value in event.inputs}
    live: set[int] = set()
    # Backwards: an event is live if its result is read by a live event, by the output, or by a buffer that stays. What
    # nobody reads may do anything with tokens.
    for event in reversed(trace.events):
        asks = not event.outputs and not event.name.startswith("_assert") or _counts(event)
        read = any(value.storage in wanted for value in event.outputs)
        if _is_view(event) and not any(value.storage in changed for value in event.outputs):
            read = any(value in views for value in event.outputs)  # others may read what it is a view of
        if asks or read:
            live.add(event.index)
            wanted.update(value.storage for value in event.inputs)
            views.update(event.inputs)
    return frozenset(live)


def _is_view(event: Event) -> bool:
    """Whether it only looks at what is there, as one of its operands lies."""
    inputs = {value.storage for value in event.inputs}
    return not event.mutates and bool(event.outputs) and all(value.storage in inputs for value in event.outputs)


def _counts(event: Event) -> bool:
    """Whether the shape of its result depends on values."""
    by_mask = event.name == "index" and any(value.dtype == torch.bool for value in event.inputs[1:])
    return by_mask or event.name in _OF_SOME_SIZE


@dataclass(slots=True)
class _TokenWalker(DimsWalker):
    trace: Trace
    live: frozenset[int]
    counting: frozenset[int]
    """Storages of what may depend on how many tokens there are."""
    held: set[int] = field(default_factory=set[int])
    """Storages that tokens have been followed into."""
    of_tokens: list[AttentionCall] = field(default_factory=list[AttentionCall])
    calls: list[AttentionCall] = field(default_factory=list[AttentionCall])
    constant: set[int] = field(default_factory=set[int])
    """Storages that hold one number throughout: as good for some tokens as for all."""
    repeated: dict[Value, int] = field(default_factory=dict[Value, int])
    """Values that are the same along so many leading dims, as one row of a table for every token is."""
    bases: dict[int, Value] = field(default_factory=dict[int, Value])
    """Storage → a new tensor in it, of which nothing is known until something is written into it."""
    rules: Mapping[str, Callable[[Event], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.rules = {
            **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), self.view),
            **dict.fromkeys(("transpose", "t", "permute", "unsqueeze", "squeeze", "expand"), self.rearrange),
            **dict.fromkeys(("select", "unbind", "slice", "split", "split_with_sizes", "chunk", "glu"), self.take),
            **dict.fromkeys(("cat", "stack"), self.join),
            **dict.fromkeys(ALONG, self.along),
            **dict.fromkeys(("native_layer_norm", "rms_norm"), self._norm),
            **dict.fromkeys(("mean", "sum", "var", "var_mean", "amax", "amin", "std"), self.reduce),
            **dict.fromkeys(MATMULS, self._product),
            **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), self.make),
            "attention": self._attention,
            "experts": self._experts,
            "constant_pad_nd": self.pad,
            "embedding": self.look_up,
            "index": self._index,
            "gather": self._gather,
            "index_select": self._index_select,
            **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), self._scatter),
        }

    def step(self, event: Event) -> None:
        self._note_constants(event)
        if event.name == "attention":
            self.calls.append(self._attention_call(event))
        for value in event.inputs:
            if value.storage in self.held and not self.is_tracked(value):
                self.keep_unsplit(event, (0,), "reads in another form what they were written into")
        # Without tokens among its operands an operator cannot let them meet.
        if not any(self.is_tracked(value) for value in event.inputs):
            if event.mutates:  # something else lies in it from now on
                self.bases.pop(event.inputs[0].storage, None)
            return
        self._follow(event)
        self.held.update(value.storage for value in event.outputs if self.is_tracked(value))

    def _follow(self, event: Event) -> None:
        if event.mutates and not self.is_tracked(event.inputs[0]):
            self._write(event)
            return
        if event.name.startswith("set_"):
            self.give_up(event, "lets another tensor lie where it lies")
            return
        for value in event.inputs if event.name != "attention" else ():
            known = self.is_tracked(value) or value.storage in self.constant or value in self.repeated
            # A value computed from the number of tokens would differ on a rank that has a part of them.
            if value.storage in self.counting and not known:
                self.keep_unsplit(
                    event,
                    (0,),
                    _COUNTED,
                )
        try:
            self.rules.get(event.name, self._pointwise)(event)
        except (IndexError, ValueError, TypeError, ArithmeticError, AttributeError):
            # Arguments in a form that no rule foresaw.
            self.give_up(event, f"calls {event.name} in a form that the analysis does not understand")

    def is_by_token(self, value: Value, tokens: int) -> bool:
        """Whether a result is of (samples, tokens, …)."""
        dims = self.dims_of(value)
        return len(dims) > 1 and self.atoms.leaves(dims[1]) == self.atoms.leaves((tokens,))

    def keep_unsplit(self, event: Event, dim: Dim, reason: str) -> None:
        """Tokens meet in this event, if anything comes of it."""
        # Otherwise the result is thrown away.
        if event.index in self.live:
            self.atoms.keep_unsplit(dim, f"{place_of(event)} {reason}")

    def meet(self, event: Event, a: Dim, b: Dim) -> Dim:
        """Two dims of one size in one operator: both of the same tokens."""
        # Two token dims of one size are the same tokens, or the shapes could not match for other lengths.
        if a and b and self.atoms.unify_dims(a, b):
            return a
        if a or b:
            self.keep_unsplit(event, (*a, *b), _MADE)
        return ()

    def join(self, event: Event) -> None:
        """Join dims of parts, some of which may be the same for every token."""
        values, output = list(event.arguments[0]), event.outputs[0]
        at = int(argument(event, 1, "dim", 0)) % len(output.shape)
        if event.name == "stack" or not any(self._is_repeated(value, 0) for value in values):
            DimsWalker.join(self, event)  # super() is another class under slots
            return
        for value in values:
            self.keep_unsplit(event, self.dims_of(value)[at], "joins it with others")
        others = range(len(output.shape))
        self.dims[output] = [() if place == at else self._alike(event, values, place) for place in others]

    def look_up(self, event: Event) -> None:
        """A row of the table for each index."""
        table, indices = event.inputs[:2]
        for dim in self.dims_of(table):
            self.keep_unsplit(event, dim, "looks up rows of it")
        self.dims[event.outputs[0]] = [*self.dims_of(indices), ()]

    def _write(self, event: Event) -> None:
        """Into a part of a new tensor, along other dims than that of the tokens, which are then that tensor's."""
        target, source = event.inputs[0], event.inputs[-1]
        base = self.bases.get(target.storage)
        dims = [dim for dim in self.dims_of(source) if dim] if event.name == "copy_" else []
        fits = base is not None and len(base.shape) == len(target.shape) == len(source.shape)
        if base is None or not fits or not dims or base.stride != target.stride:
            self.give_up(event, "writes it into something else")
            return
        written: Dims = []
        for dim, size, size_of_target in zip(self.dims_of(source), base.shape, target.shape, strict=True):
            if dim and size != size_of_target:
                self.keep_unsplit(event, dim, "writes it beside others")
            written.append(dim if size == size_of_target else ())
        known = self.dims.get(base)
        if known is not None:
            written = [
                self.meet(event, mine, theirs) if mine or theirs else ()
                for mine, theirs in zip(known, written, strict=True)
            ]
        self.dims[base] = self.dims[event.outputs[0]] = written

    def _note_constants(self, event: Event) -> None:
        """Follow values that are filled with one number through operators that work entry by entry."""
        # A view shares its storage, and with it whatever is known of it.
        fresh = {value.storage for value in event.outputs} - {value.storage for value in event.inputs}
        if event.mutates:
            changed = event.inputs[0].storage if event.inputs else None
            # Written to: the storage may hold several numbers now.
            self.constant.discard(changed or 0)
            self.repeated = {value: dims for value, dims in self.repeated.items() if value.storage != changed}
        if event.name in (*_CONSTANTS, *_EMPTY):
            self.bases |= {value.storage: value for value in event.outputs}
        if event.name in _CONSTANTS:
            self.constant |= fresh
        elif event.name == "embedding" and event.inputs[1].storage in self.constant:
            self.repeated[event.outputs[0]] = len(event.inputs[1].shape)
        elif event.inputs and all(value.storage in self.constant for value in event.inputs):
            self.constant |= fresh if event.name in LAYOUT or is_elementwise(event.name) else set()

    def _norm(self, event: Event) -> None:
        dims = list(self.dims_of(event.inputs[0]))
        count = len(event.arguments[1]) if event.name == "native_layer_norm" else 1
        for dim in dims[-count:]:
            self.keep_unsplit(event, dim, "normalises over it")
        for value in event.inputs[1:]:
            for dim in self.dims_of(value):
                self.keep_unsplit(event, dim, "normalises with all of it")
        self.dims[event.outputs[0]] = dims
        for statistic in event.outputs[1:]:
            if len(statistic.shape) == len(dims):
                self.dims[statistic] = [*dims[:-count], *[()] * count]

    def _product(self, event: Event) -> None:
        if event.name == "_grouped_mm":
            self.give_up(event, "shares rows out among products")
            return
        start = 1 if event.name in ("addmm", "baddbmm") else 0
        left, right = event.inputs[start : start + 2]
        a, b = self.dims_of(left), self.dims_of(right)
        for dim in (a[-1], b[-2]):
            self.keep_unsplit(event, dim, "sums over it")
        batch = [self._alike(event, (left, right), 0)] if len(a) == 3 else []
        dims: Dims = [*batch, a[-2], b[-1]]
        if start:
            dims = self._added(event, event.inputs[0], dims)
        self.dims[event.outputs[0]] = dims

    def _added(self, event: Event, value: Value, dims: Dims) -> Dims:
        """A bias, or a matrix of the product's own shape."""
        shape, own = event.outputs[0].shape, self.dims_of(value)
        lead = len(shape) - len(value.shape)
        wide = [at for at, size in enumerate(shape) if at >= lead and value.shape[at - lead] == size > 1]
        wide = [at for at in wide if not self._is_repeated(value, at - lead)]
        return [self.meet(event, dim, own[at - lead]) if at in wide else dim for at, dim in enumerate(dims)]

    def _alike(self, event: Event, values: Sequence[Value], at: int) -> Dim:
        """Dim `at` of values that have one size there."""
        dims = [self.dims_of(value)[at] for value in values if not self._is_repeated(value, at)]
        dim = dims[0] if dims else ()
        for other in dims[1:]:
            dim = self.meet(event, dim, other)
        return dim

    def _is_repeated(self, value: Value, at: int) -> bool:
        """Whether it is the same along dim `at`."""
        # `expand` repeats a value without copying: stride 0.
        if value.shape[at] > 1 and value.stride[at] == 0:
            return True
        return value.storage in self.constant or at % len(value.shape) < self.repeated.get(value, 0)

    def _attention(self, event: Event) -> None:
        query, key, value = (list(self.dims_of(input_)) for input_ in event.inputs[:3])
        # Attention over all of a sample's tokens is the one place where they may meet: context ranks exchange keys
        # there.
        tokens = self.atoms.leaves(query[-2])
        if tokens and tokens == self.atoms.leaves(key[-2]) == self.atoms.leaves(value[-2]) == self._every_token():
            self.of_tokens.append(self.calls[-1])
        else:
            for dim in (query[-2], key[-2], value[-2]):
                self.keep_unsplit(event, dim, "attends between some of them and something else")
        for other in event.inputs[3:]:
            for dim in self.dims_of(other):
                self.keep_unsplit(event, dim, "adds to its scores what it has computed of them")
        for by_head in (event.keywords.get(name) for name in ("sinks", "slopes")):
            if by_head is not None and by_head.storage in self.counting and by_head.storage not in self.constant:
                self.keep_unsplit(event, (0,), _COUNTED)
        for dims in (query, key, value):
            for dim in (*dims[:-2], dims[-1]):
                self.keep_unsplit(event, dim, "attends with them as heads or features")
        self.dims[event.outputs[0]] = [*[()] * (len(query) - 2), query[-2], ()]

    def _experts(self, event: Event) -> None:
        """Rows, what each has chosen, and what that counts: each row's own result (`_expert_calls.py`)."""
        for value in event.inputs:
            self.keep_unsplit(event, self.dims_of(value)[1], "mixes them as features or choices")
        self.dims[event.outputs[0]] = [self._alike(event, event.inputs, 0), ()]

    def _attention_call(self, event: Event) -> AttentionCall:
        """Return the call's settings. A mask, or scores to add, of one number throughout do not count: a softmax does
        not see them."""
        causal, dropped = (bool(event.keywords.get(name)) for name in ("causal", "dropout"))
        masks = [value for value in event.arguments[3:] if value is not None]
        masked = any(mask.storage not in self.constant or not mask.dtype.is_floating_point for mask in masks)
        modified = any(event.keywords.get(name) for name in ("softcap", "sinks", "slopes"))
        return AttentionCall(event.module, causal, masked, dropped, modified)

    def _every_token(self) -> list[int]:
        """Return the atoms of all tokens of a sample: the first that were made."""
        return self.atoms.leaves((0,))

    def _index(self, event: Event) -> None:
        """A table's rows by one tensor of indices, as tables of rotations are read."""
        table, indices = event.inputs[0], event.arguments[1]
        indexed = [index for index in indices if index is not None]
        if self.is_tracked(table) or len(indexed) != 1 or indices[0] is None or indexed[0].dtype.itemsize == 1:
            self.give_up(event, "picks entries of it by number")
            return
        self.dims[event.outputs[0]] = [*self.dims_of(indexed[0]), *[()] * (len(table.shape) - 1)]

    def _index_select(self, event: Event) -> None:
        """Entries along a dim by one list of indices, as tables of places are read."""
        value, indices = event.inputs[:2]
        dims, at = list(self.dims_of(value)), int(event.arguments[1]) % len(value.shape)
        self.keep_unsplit(event, dims[at], "picks entries of it by number")
        dims[at] = self.dims_of(indices)[0]
        self.dims[event.outputs[0]] = dims

    def _gather(self, event: Event) -> None:
        """Entries along a dim, chosen for each entry of the others."""
        value, indices = event.inputs[:2]
        if value.storage in self.constant:
            self.constant.add(event.outputs[0].storage)
            return
        at = int(argument(event, 1, "dim", 0)) % len(value.shape)
        dims: Dims = []
        for place, (mine, theirs) in enumerate(zip(self.dims_of(value), self.dims_of(indices), strict=True)):
            if place == at:
                self.keep_unsplit(event, (*mine, *theirs), "picks entries of it by number")
                dims.append(())
            elif value.shape[place] != indices.shape[place]:
                self.keep_unsplit(event, (*mine, *theirs), "picks entries of some of it")
                dims.append(())
            else:
                dims.append(self._alike(event, (value, indices), place))
        self.dims[event.outputs[0]] = dims

    def _scatter(self, event: Event) -> None:
        """Entries written along a dim, chosen for each entry of the others."""
        values = event.inputs
        at = int(argument(event, 1, "dim", 0)) % len(values[0].shape)
        dims: Dims = []
        for place in range(len(values[0].shape)):
            # Along the indexed dim, or where operands differ in size, entries move to other places.
            whole = place == at or len({value.shape[place] for value in values}) > 1
            for value in values if whole else ():
                self.keep_unsplit(event, self.dims_of(value)[place], "writes entries of it by number")
            dims.append(() if whole else self._alike(event, values, place))
        self.dims[event.outputs[0]] = dims

    def _pointwise(self, event: Event) -> None:
        """Operators whose result is the broadcast of what enters; of any other nothing is known."""
        output = event.outputs[0] if event.outputs else None
        if output is None and event.name.startswith("_assert"):
            return
        shape = broadcast([value.shape for value in event.inputs])
        if output is None or shape is None or tuple(output.shape) != shape or not is_elementwise(event.name):
            self.give_up(event, f"computes {event.name} of it")
            return
        dims: Dims = [()] * len(shape)
        for at in range(-1, -len(shape) - 1, -1):
            wide = [v for v in event.inputs if len(v.shape) >= -at and v.shape[at] == shape[at] and shape[at] > 1]
            if any(self.dims_of(value)[at] for value in wide):
                dims[at] = self._alike(event, wide, at)
        for result in event.outputs:
            if result.shape == output.shape:
                self.dims[result] = dims


_COUNTED = "combines it with something that depends on how many tokens there are (places that it counts, a mask)"
_MADE = (
    "combines it with something of one entry for each token that it makes by itself (positions or a mask, it may be)"
)
