"""Follows the features of which a rank of a grid has a part through a forward, to see whether operators may work on
parts.

Ranks of a grid have parts of what products, embeddings and norms make, along one dim: equal blocks of it, and of each
block a part.  Whatever else a forward does with that must be the same for each part: it may look at other dims as it
likes, and at this one entry by entry.  An operator that has no rule, that runs along the dim or cuts across its blocks,
or that combines it with something that every rank has whole, is a reason against it: nothing is guessed in favour.

Gradients need no rule of their own.  Of what is whole each rank gets the part that its own features give, which is
summed where the parameters lie; so what is whole may meet parts along the dim only where it is the same for them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from weft.analysis.tensor_split._dims import ALONG, argument, place_of
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import MATMULS
from weft.analysis.trace._pointwise import broadcast, is_elementwise
from weft.techniques.tensor.mesh_2d.narrowing import MEETING

STAND_IN = "of a role"
"""Name of events that stand for what ranks of a grid do together: `kind`, `module`, and of its result, `made` features
in `blocks`.  Around what every rank of a row computes whole stand two, of the kinds `gathered` and `cut`."""
_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
_MADE = ("new_empty", "new_zeros", "new_ones", "new_full")


class NoPartsError(Exception):
    """Why ranks cannot have parts of the features: a sentence without its end."""

    suspects: frozenset[str] = frozenset()
    """Modules that made the parts that stand in the way, where parts do."""
    module: str = ""
    """Innermost module that was running there."""
    is_of_border: bool = False
    """Whether it is one of a module's being computed whole, and not what stood in the way before."""
    done: int = 0
    """Operators of a forward on a part that were right until then."""
    place: str = ""
    """Module of the first operator that was not."""
    sizes: Collection[int] = ()
    """Sizes that ranks have parts of."""
    come: Callable[[Collection[str]], int] | None = None
    """How many operators are right if these numbers (`module:attribute`) are divided; None: nothing was compared."""


class MixedSamplesError(NoPartsError):
    """Why a module cannot be computed whole by rows that share out samples; no module around it can."""


class Parts(NamedTuple):
    """How a rank has a part of a value: the same part of each of equal `blocks` of a dim."""

    dim: int
    blocks: int = 1


@dataclass(slots=True)
class FeatureWalker:
    """What is known of each value; the operators' rules are its methods."""

    trace: Trace
    root: nn.Module
    own: Mapping[int, str]
    """Storage of parameters of which ranks have parts that nobody but their module may read → name."""
    parts: dict[Value, Parts]
    """What ranks have parts of; to begin with, tables."""
    heads: frozenset[str]
    """Dropouts that work on whole heads, along dim 1."""
    results: frozenset[str] = frozenset()
    """Products whose results every rank of a row is given whole."""
    reads: dict[str, bool] = field(default_factory=dict[str, bool])
    """Product, norm or dropout → whether each rank has all that it reads."""
    sources: dict[Value, frozenset[str]] = field(default_factory=dict[Value, frozenset[str]])
    """Parts → modules that made them."""
    narrowed: dict[int, dict[Value, int]] = field(default_factory=dict[int, dict[Value, int]])
    """Event → what it reads that every rank has whole, of which each takes its part; and along which dim."""
    sizes: dict[int, str] = field(default_factory=dict[int, str])
    """What the side of the grid must divide → where."""
    held: set[int] = field(default_factory=set[int])
    """Storages that parts lie in."""
    rules: Mapping[str, Callable[[Event], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.held.update(value.storage for value in self.parts)
        self.rules = {
            **dict.fromkeys(_VIEWS, self._view),
            **dict.fromkeys(("transpose", "t", "permute", "unsqueeze", "squeeze", "expand"), self._rearrange),
            **dict.fromkeys(("select", "unbind", "slice", "split", "split_with_sizes", "chunk", "glu"), self._take),
            **dict.fromkeys(("cat", "stack"), self._join),
            **dict.fromkeys(ALONG, self._along),
            **dict.fromkeys(("native_layer_norm", "rms_norm"), self._norm),
            **dict.fromkeys(("mean", "sum", "var", "var_mean", "amax", "amin", "std"), self._reduce),
            **dict.fromkeys(MATMULS, self._product),
            **dict.fromkeys(_MADE, self._make),
            "attention": self._attention,
            "constant_pad_nd": self._pad,
            "embedding": self._look_up,
        }

    def run(self) -> None:
        """Follow all events.

        Raises:
            NoPartsError: one that stands in the way.
        """
        for event in self.trace.events:
            self._step(event)
        for outputs in self.trace.outputs_of:
            if not outputs or self.parts.get(outputs[0]) != Parts(len(outputs[0].shape) - 1):
                raise NoPartsError("its result is no logits of which each rank has a part")

    def _step(self, event: Event) -> None:
        for value in event.inputs:
            if value.storage in self.own:
                raise NoPartsError(f"{place_of(event)} reads {self.own[value.storage]} by itself")
            if value.storage in self.held and value not in self.parts:
                raise self._against(event, "reads parts in another form than they were made in")
        try:
            self._check_draw(event)
            if event.name == STAND_IN:
                self._stand_in(event)
                return
            if not any(value in self.parts for value in event.inputs):
                return
            self.rules.get(event.name, self._pointwise)(event)
        except (IndexError, ValueError, TypeError, ArithmeticError, AttributeError):
            raise self._against(event, f"calls {event.name} in a form that the analysis does not understand") from None
        made_by = self.made_by(event)
        self.sources.update((value, made_by) for value in event.outputs if value in self.parts)
        if event.name not in _MADE:
            # What no rule has told of, statistics of a kernel, nobody may read.
            self.held.update(value.storage for value in event.outputs)

    def made_by(self, event: Event) -> frozenset[str]:
        """Modules that made what parts an event reads."""
        return frozenset[str]().union(*(self.sources.get(value, frozenset()) for value in event.inputs))

    def _check_draw(self, event: Event) -> None:
        """Dropout tells by its module, or by its shape, which part of the whole it drops; other draws are refused."""
        if event.name == "dropout":
            module, value = self.root.get_submodule(event.module), event.inputs[0]
            found = self.parts.get(value)
            if not isinstance(module, nn.Dropout):
                self._check_function(event, found)
                return
            self._note_read(event, is_whole=found is None)
            wanted = Parts(1) if event.module in self.heads else Parts(len(value.shape) - 1)
            if found not in (None, wanted) or value.shape[0] % self.trace.samples:
                raise self._against(event, "drops entries of something else than features or heads")
        elif _draws(event.name):
            raise self._against(event, "draws random numbers by functions")

    def _check_function(self, event: Event, found: Parts | None) -> None:
        """What a function drops is known by its number in a call of its module: a size that differs from the whole
        shows the part."""
        blocks = 1 if found is None or found.dim else self.trace.samples  # in front, samples lie behind one another
        if found is not None and found.blocks != blocks:
            raise self._against(event, "drops parts of something that do not lie behind one another")
        dropped = {
            each.inputs[0].shape
            for each in self.trace.events
            if each.module == event.module and (each.name == "dropout" or each.keywords.get("dropout"))
        }
        is_shared = self.trace.num_runs.get(event.module, 0) > len(self.trace.outputs_of)
        if is_shared and len(dropped) > 1:
            raise self._against(event, "drops several things by functions, each time that it is called")

    def _against(self, event: Event, reason: str) -> NoPartsError:
        problem = NoPartsError(f"{place_of(event)} {reason}")
        problem.suspects, problem.module = self.made_by(event), event.module
        problem.is_of_border = event.name == STAND_IN and event.keywords["kind"] in ("gathered", "cut")
        return problem

    def _put(self, event: Event, output: Value, parts: Parts) -> None:
        each = output.shape[parts.dim] // parts.blocks
        if output.shape[parts.dim] % parts.blocks or each < 2:
            raise self._against(event, "leaves nothing to divide")
        self.sizes.setdefault(each, place_of(event))
        self.parts[output] = parts
        self.held.add(output.storage)

    # ── what ranks do together ────────────────────────────────────────────────────────────────────────────────────────

    def _stand_in(self, event: Event) -> None:
        value, output, given = event.inputs[0], event.outputs[0], event.keywords
        found, kind, is_whole = self.parts.get(value), given["kind"], False
        if kind == "cut":
            if found is not None:
                raise self._against(event, "makes parts of what it was given whole")
        elif kind == "vocabulary":
            if found is not None:
                raise self._against(event, "looks up by features")
        elif kind == "gathered" and found is None:
            raise self._against(event, "is given first what every rank has whole")
        elif found is None:
            is_whole = kind == "norm"
            self._note_read(event, is_whole=True)
        elif found != Parts(len(value.shape) - 1):
            raise self._against(event, "reads something else than features of which each rank has a part")
        else:
            self._note_read(event, is_whole=False)
        if is_whole or kind == "gathered":
            return
        self._put(event, output, Parts(len(output.shape) - 1, given["blocks"]))
        self.sources[output] = frozenset({event.module})
        if event.module in self.results:
            del self.parts[output], self.sources[output]
            self.held.discard(output.storage)

    def _note_read(self, event: Event, *, is_whole: bool) -> None:
        """A module reads parts whenever it runs, or never."""
        value = event.inputs[0]
        if self.reads.setdefault(event.module, is_whole) != is_whole:
            raise self._against(event, "reads parts of features, and all of them, too")
        if is_whole and event.name == STAND_IN and event.keywords["kind"] == "product":
            self.sizes.setdefault(value.shape[-1], place_of(event))

    # ── layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _view(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        found = self.parts[value]
        before = math.prod(value.shape[: found.dim]) * found.blocks
        lead = 1
        for dim, size in enumerate(output.shape):
            blocks, rest = divmod(before, lead)
            if rest == 0 and blocks and size > blocks and size % blocks == 0 and value.numel == output.numel:
                self._put(event, output, Parts(dim, blocks))
                return
            lead *= size
        raise self._against(event, f"reshapes {value.shape} to {output.shape}, across borders of parts")

    def _rearrange(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        (dim, blocks), rank = self.parts[value], len(value.shape)
        match event.name:
            case "t":
                dim = rank - 1 - dim
            case "transpose":
                first, second = (int(each) % rank for each in event.arguments[1:3])
                dim = {first: second, second: first}.get(dim, dim)
            case "permute":
                dim = [int(each) % rank for each in event.arguments[1]].index(dim)
            case "unsqueeze":
                dim += int(event.arguments[1]) % (rank + 1) <= dim
            case "squeeze":
                chosen = event.arguments[1] if len(event.arguments) > 1 else range(rank)
                gone = {int(each) % rank for each in ([chosen] if isinstance(chosen, int) else chosen)}
                if dim in gone:  # of one entry, a part is squeezed where the whole is not
                    raise self._against(event, "squeezes what ranks have parts of")
                dim -= sum(at < dim and value.shape[at] == 1 for at in gone)
            case _:
                dim += len(output.shape) - rank
        self._put(event, output, Parts(dim, blocks))

    def _take(self, event: Event) -> None:
        value = event.inputs[0]
        found, rank = self.parts[value], len(value.shape)
        place, default = _DIM[event.name]
        at = int(argument(event, place, "dim", default)) % rank
        for output in event.outputs:
            if event.name in ("select", "unbind"):
                if at == found.dim:
                    self._pick_entries(event)
                    return
                self._put(event, output, Parts(found.dim - (at < found.dim), found.blocks))
            elif at != found.dim or output.shape[at] == value.shape[at]:
                self._put(event, output, found)
            else:
                self._put(event, output, Parts(at, self._blocks_of(event, output, at)))

    def _pick_entries(self, event: Event) -> None:
        """Each rank picks another entry: nobody may read it, but any module may ask for its shape."""

    def _blocks_of(self, event: Event, output: Value, at: int) -> int:
        """Blocks of a piece of a dim that ranks have parts of: it must be made of whole ones."""
        value = event.inputs[0]
        blocks, part = self.parts[value].blocks, output.shape[at]
        each = value.shape[at] // blocks
        start = int(argument(event, 2, "start", 0) or 0) if event.name == "slice" else 0
        step = int(argument(event, 4, "step", 1)) if event.name == "slice" else 1
        if part % each or start % each or step != 1 or len({each.shape for each in event.outputs}) > 1:
            raise self._against(event, "takes a piece of what ranks have parts of")
        return part // each

    def _join(self, event: Event) -> None:
        values, output = list(event.arguments[0]), event.outputs[0]
        at = int(argument(event, 1, "dim", 0)) % len(output.shape)
        found = {self.parts.get(value) for value in values}
        (parts,) = found if len(found) == 1 else (None,)
        if parts is None or len({len(value.shape) for value in values}) > 1:
            raise self._against(event, "joins parts with something that every rank has whole")
        if event.name == "stack":
            self._put(event, output, Parts(parts.dim + (at <= parts.dim), parts.blocks))
        elif at == parts.dim:
            raise self._against(event, "joins what ranks have parts of")
        else:
            self._put(event, output, parts)

    def _pad(self, event: Event) -> None:
        found, rank = self.parts[event.inputs[0]], len(event.inputs[0].shape)
        amounts = [int(each) for each in event.arguments[1]]
        at = 2 * (rank - 1 - found.dim)
        if any(amounts[at : at + 2]):
            raise self._against(event, "pads what ranks have parts of")
        self._put(event, event.outputs[0], found)

    def _make(self, event: Event) -> None:
        """A new tensor, the same on every rank: if its shape is not, the forward on a part shows it."""

    # ── what computes ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _pointwise(self, event: Event) -> None:
        output = event.outputs[0] if event.outputs else None
        if output is None and event.name.startswith("_assert"):
            return
        shape = broadcast([value.shape for value in event.inputs])
        if output is None or shape is None or tuple(output.shape) != shape or not is_elementwise(event.name):
            raise self._against(event, f"computes {event.name} of what ranks have parts of")
        parts = self._met(event, event.inputs, shape)
        for result in event.outputs:
            if tuple(result.shape) == shape:
                self._put(event, result, parts)

    def _met(self, event: Event, values: Sequence[Value], shape: tuple[int, ...]) -> Parts:
        """What operands of one shape, broadcast, are all parts of; others must be the same along that dim."""
        moved = {
            Parts(found.dim + len(shape) - len(value.shape), found.blocks)
            for value in values
            if (found := self.parts.get(value)) is not None
        }
        if len(moved) != 1:
            raise self._against(event, "combines parts of different dims")
        (parts,) = moved
        for value in values:
            at = parts.dim - (len(shape) - len(value.shape))
            if value not in self.parts and at >= 0 and value.shape[at] > 1:
                if event.name not in MEETING or parts.blocks > 1 or (event.mutates and value is event.inputs[0]):
                    raise self._against(event, "combines parts with something that every rank has whole")
                self.narrowed.setdefault(event.index, {})[value] = at
        return parts

    def _along(self, event: Event) -> None:
        value = event.inputs[0]
        found, rank = self.parts[value], len(value.shape)
        place, name = ALONG[event.name]
        chosen = argument(event, place, name, -1)
        listed = [chosen] if isinstance(chosen, int) else list(chosen)
        if len(event.inputs) > 1 or not listed or found.dim in {int(dim) % rank for dim in listed}:
            raise self._against(event, f"runs along what ranks have parts of ({event.name})")
        for output in event.outputs:
            self._put(event, output, found)

    def _reduce(self, event: Event) -> None:
        value = event.inputs[0]
        found, rank = self.parts[value], len(value.shape)
        chosen = argument(event, 1, "dim", None)
        listed = range(rank) if chosen is None or chosen == [] else [chosen] if isinstance(chosen, int) else chosen
        gone = {int(dim) % rank for dim in listed}
        if found.dim in gone:
            raise self._against(event, f"reduces over what ranks have parts of ({event.name})")
        for output in event.outputs:
            before = 0 if len(output.shape) == rank else sum(at < found.dim for at in gone)
            self._put(event, output, Parts(found.dim - before, found.blocks))

    def _norm(self, event: Event) -> None:
        value = event.inputs[0]
        found, rank = self.parts.get(value), len(value.shape)
        count = len(event.arguments[1]) if event.name == "native_layer_norm" else 1
        if found is None or found.dim >= rank - count or any(each in self.parts for each in event.inputs[1:]):
            raise self._against(event, "normalises over what ranks have parts of")
        for output in event.outputs:  # statistics of a layer norm among them
            if len(output.shape) == rank:
                self._put(event, output, found)

    def _product(self, event: Event) -> None:
        start = 1 if event.name in ("addmm", "baddbmm") else 0
        left, right = event.inputs[start : start + 2]
        a, b, last = self.parts.get(left), self.parts.get(right), len(left.shape) - 1
        if a is None or b is None:
            fits = a is not None and a.dim == last - 1 or b is not None and b.dim == last
        else:
            fits = a == b and a.dim == 0 < last - 1
        parts = a or b
        if event.name == "_grouped_mm" or len(right.shape) != last + 1 or not fits or parts is None:
            raise self._against(event, "multiplies over what ranks have parts of, or with what every rank has whole")
        if start:
            added = event.inputs[0]
            at = parts.dim - (last + 1 - len(added.shape))
            theirs = self.parts.get(added)
            is_same = theirs is None and (at < 0 or added.shape[at] == 1)
            if not is_same and theirs != Parts(at, parts.blocks):
                raise self._against(event, "adds to a product what every rank has whole")
        self._put(event, event.outputs[0], parts)

    def _attention(self, event: Event) -> None:
        operands = event.inputs[:3]
        if any(self.parts.get(value) != Parts(len(value.shape) - 3) for value in operands):
            raise self._against(event, "attends with something else than whole heads")
        if event.keywords.get("dropout"):
            self._check_function(event, Parts(len(operands[0].shape) - 3))
        for value in operands:
            self.sizes.setdefault(value.shape[-3], place_of(event))
        heads = operands[0].shape[-3]
        for mask in event.inputs[3:]:
            at = len(mask.shape) - 3
            is_shared = mask not in self.parts and (at < 0 or mask.shape[at] == 1)
            is_of_heads = at >= 0 and mask.shape[at] == heads and self.parts.get(mask) == Parts(at)
            if not is_shared and not is_of_heads:
                raise self._against(event, "gives attention a mask, or scores to add, of each head")
        self._put(event, event.outputs[0], Parts(len(event.outputs[0].shape) - 3))

    def _look_up(self, event: Event) -> None:
        table, indices = event.inputs[:2]
        if indices in self.parts or self.parts.get(table) != Parts(1):
            raise self._against(event, "looks up by features")
        self._put(event, event.outputs[0], Parts(len(event.outputs[0].shape) - 1))


@cache
def _draws(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())


_DIM: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("select", "unbind", "slice"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), (2, 0)),
    "glu": (1, -1),
}
"""Operator → where its dim stands among the arguments, and what it is by default."""
