"""Follows what linear layers and convolutions make through a traced forward, to see what may be divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.describe._atoms import Atoms, Dim, Factor
from weft.describe._events import Event, Trace, Value
from weft.describe._graph import MATMULS, Graph

Dims = list[Dim]


@dataclass(slots=True, kw_only=True)
class Layer:
    """A linear layer or convolution that ran as a module, with plain weights."""

    name: str
    kind: str
    """`linear` or `convolution`."""
    made: int
    """Atom of its output features."""
    entering: Dim
    """Atoms of its input features."""
    index: int
    """Position of its first event."""
    parameters: int


@dataclass(slots=True)
class ForwardFlow:
    """Everything found about one forward."""

    atoms: Atoms
    layers: dict[str, Layer]
    dims: Mapping[Value, Dims]
    odd: dict[str, str]
    """Parameter → why its product is no layer that could be split."""
    shared: list[tuple[str, Dim]]
    """Parameters that are the same along a dim that may be divided: each rank then has a part of their gradient."""


def follow(trace: Trace, root: nn.Module) -> ForwardFlow:
    """Follow a forward traced without its loss."""
    walker = _Walker(trace, root)
    for event in trace.events:
        walker.step(event)
    for value in trace.outputs:
        for dim in walker.dims.get(value, ()):
            walker.atoms.keep_whole(dim, "it reaches the model's output")
    return ForwardFlow(walker.atoms, walker.layers, walker.dims, walker.odd, walker.shared)


@dataclass(slots=True)
class _Walker:
    trace: Trace
    root: nn.Module
    atoms: Atoms = field(default_factory=Atoms)
    layers: dict[str, Layer] = field(default_factory=dict[str, Layer])
    dims: dict[Value, Dims] = field(default_factory=dict[Value, Dims])
    odd: dict[str, str] = field(default_factory=dict[str, str])
    shared: list[tuple[str, Dim]] = field(default_factory=list[tuple[str, Dim]])
    trained: set[int] = field(default_factory=set[int])
    """Storages that gradients flow back to."""
    graph: Graph = field(init=False)
    rules: Mapping[str, Callable[[Event], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.graph = Graph.of(self.trace)
        for storage, names in self.trace.parameters.items():
            if self.root.get_parameter(names[0]).requires_grad:
                self.trained.add(storage)
        self.rules = {
            **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), self._view),
            **dict.fromkeys(("transpose", "t", "permute", "unsqueeze", "squeeze", "expand"), self._rearrange),
            **dict.fromkeys(("select", "unbind", "slice", "split", "split_with_sizes", "chunk", "glu"), self._take),
            **dict.fromkeys(("cat", "stack"), self._join),
            **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "flip", "roll"), self._along),
            **dict.fromkeys(("native_layer_norm", "rms_norm"), self._norm),
            **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "native_group_norm"), self._channel_norm),
            **dict.fromkeys(("mean", "sum", "var", "var_mean", "amax", "amin", "std"), self._reduce),
            **dict.fromkeys(MATMULS, self._product),
            **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), self._pool),
            "attention": self._attention,
            "convolution": self._convolution,
            "dropout": self._pointwise,
        }

    def step(self, event: Event) -> None:
        if any(value.storage in self.trained for value in event.inputs):
            self.trained.update(value.storage for value in event.outputs if value.dtype.is_floating_point)
        rule = self.rules.get(event.name, self._pointwise)
        if rule in (self._product, self._convolution) or any(self._tracked(value) for value in event.inputs):
            rule(event)

    def _tracked(self, value: Value) -> bool:
        return any(self.dims.get(value, ()))

    def _of(self, value: Value) -> Dims:
        return self.dims.get(value) or [()] * len(value.shape)

    def _factors(self, value: Value) -> list[Factor]:
        factors: list[Factor] = []
        for size, dim in zip(value.shape, self._of(value), strict=True):
            leaves = self.atoms.leaves(dim)
            factors += [(self.atoms.size(leaf), leaf) for leaf in leaves] if leaves else [(size, None)]
        return factors

    def _whole(self, event: Event, dim: Dim, reason: str) -> None:
        """Every rank must have all of it, because of this event."""
        self.atoms.keep_whole(dim, f"{_place(event)} {reason}")

    def _give_up(self, event: Event, reason: str) -> None:
        """All that enters must be whole."""
        for value in event.inputs:
            for dim in self.dims.get(value, ()):
                self._whole(event, dim, f"{reason}")

    def _view(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        groups = self.atoms.regrouped(self._factors(value), output.shape)
        if groups is None:
            self._give_up(event, f"reshapes {value.shape} to {output.shape}, across its borders")
            return
        self.dims[output] = [self._dim(group) for group in groups]

    def _dim(self, group: Sequence[Factor]) -> Dim:
        """Factors that nobody follows become atoms of their own where they share a dim with others."""
        if all(atom is None for _, atom in group):
            return ()
        dim: list[int] = []
        for size, atom in group:
            if atom is None:
                atom = self.atoms.new(size)
                self.atoms.keep_whole((atom,), "every rank has it whole")
            dim.append(atom)
        return tuple(dim)

    def _rearrange(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        dims, rank = self._of(value), len(value.shape)
        match event.name:
            case "t":
                dims = dims[::-1]
            case "transpose":
                first, second = (int(dim) % rank for dim in event.arguments[1:3])
                dims = list(dims)
                dims[first], dims[second] = dims[second], dims[first]
            case "permute":
                dims = [dims[int(dim) % rank] for dim in event.arguments[1]]
            case "unsqueeze":
                dims = list(dims)
                dims.insert(int(event.arguments[1]) % (rank + 1), ())
            case "squeeze":
                chosen = event.arguments[1] if len(event.arguments) > 1 else range(rank)
                gone = {int(dim) % rank for dim in ([chosen] if isinstance(chosen, int) else chosen)}
                dims = [dim for at, dim in enumerate(dims) if at not in gone or value.shape[at] != 1]
            case _:  # expand: new dims in front, and ones made larger, are the same everywhere
                dims = [()] * (len(output.shape) - rank) + dims
        self.dims[output] = list(dims)

    def _take(self, event: Event) -> None:
        """Parts of a dim: equal pieces leave the inside of each piece free to be divided."""
        value = event.inputs[0]
        dims, rank = self._of(value), len(value.shape)
        place, default = _DIM[event.name]
        at = int(_argument(event, place, "dim", default)) % rank
        for output in event.outputs:
            piece = [*dims]
            if event.name in ("select", "unbind"):
                self._whole(event, dims[at], "picks single entries of it")
                del piece[at]
            elif output.shape[at] != value.shape[at]:
                piece[at] = self._piece(event, dims[at], value.shape[at], output.shape[at])
            self.dims[output] = piece

    def _piece(self, event: Event, dim: Dim, size: int, part: int) -> Dim:
        equal = part > 0 and size % part == 0 and self._is_equal(event, part)
        groups = self.atoms.aligned(dim, (size // part, part)) if dim and equal else None
        if groups is None:
            self._whole(event, dim, "cuts it into unequal pieces")
            return ()
        self._whole(event, groups[0], f"takes one of {size // part} pieces of it")
        return groups[1]

    def _is_equal(self, event: Event, part: int) -> bool:
        if event.name == "slice":
            start, step = int(_argument(event, 2, "start", 0) or 0), int(_argument(event, 4, "step", 1))
            return step == 1 and start % part == 0
        return len({output.shape for output in event.outputs}) == 1

    def _join(self, event: Event) -> None:
        """Along the joined dim everything is whole; the others are divided alike."""
        values, output = list(event.arguments[0]), event.outputs[0]
        stacked = event.name == "stack"
        at = int(_argument(event, 1, "dim", 0)) % len(output.shape)
        joined: Dims | None = None
        for value in values:
            dims = list(self._of(value))
            if stacked:
                dims.insert(at, ())
            else:
                self._whole(event, dims[at], "joins it with others")
                dims[at] = ()
            joined = dims if joined is None else [self._meet(event, a, b) for a, b in zip(joined, dims, strict=True)]
        self.dims[output] = joined or []

    def _meet(self, event: Event, a: Dim, b: Dim) -> Dim:
        """Two dims of one size in one operator: both divided alike, or both whole."""
        if not a and not b:
            return ()
        if a and b and self.atoms.unify_dims(a, b):
            return a
        self._whole(event, (*a, *b), "combines it with what every rank has whole")
        return ()

    def _along(self, event: Event) -> None:
        chosen = event.arguments[2 if event.name == "roll" and len(event.arguments) > 2 else 1]
        dims = self._of(event.inputs[0])
        for dim in [chosen] if isinstance(chosen, int) else chosen:
            self._whole(event, dims[dim], f"runs along it ({event.name})")
        self.dims[event.outputs[0]] = dims

    def _norm(self, event: Event) -> None:
        dims = self._of(event.inputs[0])
        count = len(event.arguments[1]) if event.name == "native_layer_norm" else 1
        for dim in dims[-count:]:
            self._whole(event, dim, "normalises over it")
        self.shared += [(name, dim) for dim in dims[:-count] if dim for name in self.graph.weights(event)]
        self.dims[event.outputs[0]] = dims
        for statistic in event.outputs[1:]:
            if len(statistic.shape) == len(dims):
                self.dims[statistic] = [*dims[:-count], *[()] * count]

    def _channel_norm(self, event: Event) -> None:
        """Statistics of channels: a convolution's may be divided with the norm's own parameters."""
        value = event.inputs[0]
        dims = list(self._of(value))
        if event.name == "native_group_norm" or not self._from_convolution(dims[1]):
            self._whole(event, dims[1], "has a parameter for each of its entries")
        self.dims[event.outputs[0]] = dims

    def _from_convolution(self, dim: Dim) -> bool:
        layers = [layer for layer in self.layers.values() if layer.kind == "convolution"]
        made = self.atoms.leaves([layer.made for layer in layers])
        return bool(dim) and set(self.atoms.leaves(dim)) <= set(made)

    def _reduce(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        rank = len(value.shape)
        chosen = _argument(event, 1, "dim", None)
        listed = range(rank) if chosen is None or chosen == [] else [chosen] if isinstance(chosen, int) else chosen
        gone = {int(dim) % rank for dim in listed}
        dims = self._of(value)
        for dim in gone:
            self._whole(event, dims[dim], f"reduces over it ({event.name})")
        keeps = len(output.shape) == rank
        left = [() if at in gone else dim for at, dim in enumerate(dims) if keeps or at not in gone]
        for result in event.outputs:
            self.dims[result] = left

    def _pool(self, event: Event) -> None:
        dims = self._of(event.inputs[0])
        for dim in dims[-2:]:
            self._whole(event, dim, "pools over it")
        for output in event.outputs:
            self.dims[output] = [*dims[:-2], (), ()]

    def _attention(self, event: Event) -> None:
        query, key, value = (list(self._of(v)) for v in event.inputs[:3])
        sizes = [v.shape for v in event.inputs[:3]]
        heads = query[-3]
        for other, size in ((key, sizes[1]), (value, sizes[2])):
            if size[-3] == sizes[0][-3]:
                heads = self._meet(event, heads, other[-3])
            else:  # grouped: a key head serves consecutive query heads
                groups = self.atoms.aligned(heads, (size[-3], sizes[0][-3] // size[-3])) if heads else None
                if groups is None or not other[-3] or not self.atoms.unify_dims(groups[0], other[-3]):
                    self._whole(event, (*heads, *other[-3]), "shares out key heads unevenly")
            self._whole(event, other[-2], "attends over it")
        for dim in (query[-1], key[-1]):
            self._whole(event, dim, "multiplies over it")
        if len(event.inputs) > 3 and len(event.inputs[3].shape) > 2 and event.inputs[3].shape[-3] > 1:
            self._whole(event, heads, "has a mask of its own for each head")
        if len(event.inputs) > 3 and event.inputs[3].storage in self.trained:
            self._whole(event, heads, "adds learned scores")
        self.dims[event.outputs[0]] = [*query[:-3], heads, query[-2], value[-1]]

    def _product(self, event: Event) -> None:
        start = 1 if event.name in ("addmm", "baddbmm") else 0
        left, right = event.inputs[start], event.inputs[start + 1]
        if right.storage in self.graph.derived or left.storage in self.graph.derived:
            self._weighted(event, left, right)
            return
        a, b = self._of(left), self._of(right)
        batch = [self._meet(event, a[0], b[0])] if len(a) == 3 else []
        for dim in (a[-1], b[-2]):
            self._whole(event, dim, "multiplies over it")
        if start and len(event.inputs[0].shape) > 1:
            self._give_up(event, "adds a matrix to its product")
        self.dims[event.outputs[0]] = [*batch, a[-2], b[-1]]

    def _weighted(self, event: Event, left: Value, right: Value) -> None:
        storage = right.storage if right.storage in self.graph.derived else left.storage
        name = self.graph.name_of(storage, event)
        owner = name.rpartition(".")[0]
        problem = _problem(self.root, name, event) if storage == right.storage else "it stands left in its product"
        if problem is not None:
            self.odd[name] = problem
            self._give_up(event, f"multiplies it with {name}, which cannot be split: {problem}")
            return
        entering = self._of(left)[-1]
        known = self.layers.get(owner)
        if known is None:
            known = self._layer(owner, "linear", event.outputs[0].shape[-1], entering, event)
        else:
            known.entering = self._meet(event, known.entering, entering)
        self.dims[event.outputs[0]] = [*self._of(left)[:-1], (known.made,)]

    def _layer(self, name: str, kind: str, features: int, entering: Dim, event: Event) -> Layer:
        size = sum(p.numel() for p in self.root.get_submodule(name).parameters(recurse=False))
        made = self.atoms.new(features)
        self.layers[name] = Layer(
            name=name, kind=kind, made=made, entering=entering, index=event.index, parameters=size
        )
        return self.layers[name]

    def _convolution(self, event: Event) -> None:
        value, weight, output = event.inputs[0], event.inputs[1], event.outputs[0]
        dims = self._of(value)
        for dim in dims[2:]:
            self._whole(event, dim, "slides over it")
        empty: Dims = [()] * (len(output.shape) - 2)
        groups = int(event.arguments[8])
        names = self.graph.derived.get(weight.storage)
        owner = "" if names is None else self.graph.name_of(weight.storage, event).rpartition(".")[0]
        if names is None or owner in self.layers or groups > 1 or event.arguments[6]:
            self._whole(event, dims[1], "is a grouped, transposed or repeated convolution")
            self.dims[output] = [dims[0], (), *empty]
            return
        made = self._layer(owner, "convolution", output.shape[1], dims[1], event).made
        self.dims[output] = [dims[0], (made,), *empty]

    def _pointwise(self, event: Event) -> None:
        """Operators whose result is the broadcast of what enters; any other needs all of it in one place."""
        output = event.outputs[0] if event.outputs else None
        shape = _broadcast([value.shape for value in event.inputs])
        if output is None or shape is None or tuple(output.shape) != shape or event.name in _ORDERED:
            self._give_up(event, f"computes {event.name} of it")
            return
        dims: Dims = [()] * len(shape)
        for at in range(-1, -len(shape) - 1, -1):
            wide = [v for v in event.inputs if len(v.shape) >= -at and v.shape[at] == shape[at] and shape[at] > 1]
            found = [self._of(value)[at] for value in wide]
            if any(found):
                dim = found[0]
                for other in found[1:]:
                    dim = self._meet(event, dim, other)
                dims[at] = self._unless_shared(event, dim, at)
        for result in event.outputs:
            if result.shape == output.shape:
                self.dims[result] = dims

    def _unless_shared(self, event: Event, dim: Dim, at: int) -> Dim:
        """What is the same along a divided dim and has a gradient gets only a part of it on each rank."""
        for value in event.inputs:
            if value.storage not in self.trained or (len(value.shape) >= -at and value.shape[at] > 1):
                continue
            if value.storage in self.graph.derived:
                self.shared.append((self.graph.name_of(value.storage, event), dim))
            else:
                self._whole(event, dim, "combines it with an activation that is shared along it")
                return ()
        return dim


_DIM: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("select", "unbind", "slice"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), (2, 0)),
    "glu": (1, -1),
}
"""Operator → where its dim stands among the arguments, and what it is by default."""
_ORDERED = ("sort", "argsort", "topk", "index", "gather", "scatter", "cummax", "native_dropout_backward", "embedding")


def _argument(event: Event, at: int, name: str, default: Any) -> Any:
    """An argument given by place or by name."""
    return event.arguments[at] if len(event.arguments) > at else event.keywords.get(name, default)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[int] = []
    for at in range(-rank, 0):
        sizes = {shape[at] for shape in shapes if len(shape) >= -at} - {1}
        if len(sizes) > 1:
            return None
        result.append(math.prod(sizes))
    return tuple(result)


def _problem(root: nn.Module, parameter: str, event: Event) -> str | None:
    """Why a matrix is not the weight of a plain linear layer that ran as a module."""
    owner, _, leaf = parameter.rpartition(".")
    module = root.get_submodule(owner)
    if owner != event.module:
        return f"it is used inside {event.module or 'the forward'} and not by calling {owner or 'the model'}"
    is_conv1d = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if leaf != "weight" or not (plain or is_conv1d):
        return f"{owner or 'the model'} is a {type(module).__name__} and no plain nn.Linear"
    return None


def _place(event: Event) -> str:
    return event.module or "the model's forward"
