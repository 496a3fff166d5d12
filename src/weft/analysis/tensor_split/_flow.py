"""Follows what linear layers and convolutions make through a traced forward, to see what may be divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from weft.analysis.tensor_split._atoms import Atoms, Dim
from weft.analysis.tensor_split._channels import SHARED_WEIGHT, ChannelWalker, LinearLayer
from weft.analysis.tensor_split._dims import ALONG, POOLS, Dims, place_of
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import BATCH_NORMS, MATMULS, Graph
from weft.analysis.trace._pointwise import broadcast, is_elementwise
from weft.model.plain_layers import is_conv1d, runs


@dataclass(slots=True)
class ForwardFlow:
    """Everything found about one forward."""

    atoms: Atoms
    layers: dict[str, LinearLayer]
    channelwise: dict[str, Dim]
    """Modules that work channel by channel (batch norms) or group by group, and the channels that they give."""
    dims: Mapping[Value, Dims]
    unsupported: dict[str, str]
    """Parameter → why its product is no layer that could be split."""
    shared: list[tuple[str, Dim, int]]
    """Parameters that are the same along a dim that may be divided, and the event: each rank then has a part of their
    gradient."""
    parameters: dict[str, Dims]
    """Parameter that an operator met as it is, by its first name → its dims."""
    uses: dict[str, set[int]]
    """Parameter, by its first name → events that combine it with something."""
    notes: list[str]
    """Operators that the analysis did not understand."""


OUTPUT = "it reaches the model's output"


def follow(trace: Trace, root: nn.Module, gathering: Mapping[str, Value] | None = None) -> ForwardFlow:
    """Follow the dims of activations through a forward that was traced without its loss.

    `gathering`: module → its result.  Such a module gets its whole input, however that is divided, and its result is
    divided as the input was.
    """
    # One pass in the order of execution. Dims are joined by union-find, so a constraint from a late operator holds for
    # all earlier values of the same dim: no second pass is needed.
    walker = _Walker(trace, root, gathering or {})
    for event in trace.events:
        walker.step(event)
    for value in trace.outputs:
        for dim in walker.dims.get(value, ()):
            # The loss, and the user, get whole outputs.
            walker.atoms.keep_unsplit(dim, OUTPUT)
    return ForwardFlow(
        walker.atoms,
        walker.layers,
        walker.channelwise,
        walker.dims,
        walker.unsupported,
        walker.shared,
        walker.parameters,
        walker.uses,
        list(walker.notes),
    )


@dataclass(slots=True)
class _Walker(ChannelWalker):
    gathering: Mapping[str, Value]
    unsupported: dict[str, str] = field(default_factory=dict[str, str])
    shared: list[tuple[str, Dim, int]] = field(default_factory=list[tuple[str, Dim, int]])
    uses: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    notes: dict[str, None] = field(default_factory=dict[str, None])
    trained: set[int] = field(default_factory=set[int])
    """Storages that gradients flow back to."""
    rules: Mapping[str, Callable[[Event], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.graph = Graph.of(self.trace)
        for storage, names in self.trace.parameters.items():
            if self.root.get_parameter(names[0]).requires_grad:
                self.trained.add(storage)
        self.rules = {
            **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), self.view),
            **dict.fromkeys(("transpose", "t", "permute", "unsqueeze", "squeeze", "expand"), self.rearrange),
            **dict.fromkeys(("select", "unbind", "slice", "split", "split_with_sizes", "chunk", "glu"), self.take),
            **dict.fromkeys(("cat", "stack"), self.join),
            **dict.fromkeys(ALONG, self.along),
            **dict.fromkeys(("native_layer_norm", "rms_norm"), self._norm),
            **dict.fromkeys(BATCH_NORMS, self.batch_norm),
            "native_group_norm": self.group_norm,
            **dict.fromkeys(("mean", "sum", "var", "var_mean", "amax", "amin", "std"), self.reduce),
            **dict.fromkeys(MATMULS, self._product),
            **dict.fromkeys(POOLS, self.pool),
            "attention": self._attention,
            "convolution": self.convolution,
            "constant_pad_nd": self.pad,
            **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), self.make),
            "embedding": self.look_up,
        }

    def step(self, event: Event) -> None:
        if any(value.storage in self.trained for value in event.inputs):
            # Gradients flow back wherever a floating-point result depends on a trained value.
            self.trained.update(value.storage for value in event.outputs if value.dtype.is_floating_point)
        if any(_is_inside(event.module, name) for name in self.gathering):
            self._gather(event)
            return
        for value in event.inputs:
            if value.storage in self.graph.derived:
                self._meet_parameter(event, value)
        rule = self.rules.get(event.name, self._pointwise)
        # Products with weights start a divided dim; all other operators only pass dims on.
        if rule in (self._product, self.convolution) or any(self.is_tracked(value) for value in event.inputs):
            try:
                rule(event)
            except (IndexError, ValueError, TypeError, ArithmeticError, AttributeError):
                # Arguments in a form that no rule foresaw: nothing is known of the result, so what enters stays whole.
                problem = f"calls {event.name} in a form that the analysis does not understand"
                self.notes[f"{place_of(event)} {problem}"] = None
                self.give_up(event, problem)

    def _gather(self, event: Event) -> None:
        """Inside a module that gets all of what enters: its result is divided as its input was."""
        name = next(name for name in self.gathering if _is_inside(event.module, name))
        result = self.gathering[name]
        if result in event.outputs:
            dims = self.dims.get(self.trace.entries[name][1], [()] * len(result.shape))
            self.dims[result] = list(dims)

    def _meet_parameter(self, event: Event, value: Value) -> None:
        """Follow the dims of a parameter that operators meet as it is, and note who combines it with something."""
        names = self.trace.parameters.get(value.storage)
        name = self.graph.derived[value.storage][0]
        # Views of a parameter alone are no use of it.
        if len({other.storage for other in event.inputs}) > 1:
            self.uses.setdefault(name, set()).add(event.index)
        if names is None or value in self.dims or value.shape != tuple(self.root.get_parameter(names[0]).shape):
            return
        if value.offset == 0 and names[0] not in self.parameters:
            dims: Dims = [(self.atoms.new(size),) if size > 1 else () for size in value.shape]
            self.dims[value] = self.parameters[names[0]] = dims

    def _norm(self, event: Event) -> None:
        dims = self.dims_of(event.inputs[0])
        count = len(event.arguments[1]) if event.name == "native_layer_norm" else 1
        for dim in dims[-count:]:
            self.keep_unsplit(event, dim, "normalises over it")
        names = [self.graph.derived[v.storage][0] for v in event.inputs[1:] if v.storage in self.graph.derived]
        # Weights of a norm are the same along all leading dims: where one is divided, their gradient comes in parts.
        self.shared += [(name, dim, event.index) for dim in dims[:-count] if dim for name in names]
        for value in event.inputs[1:]:
            for dim in self.dims_of(value):
                self.keep_unsplit(event, dim, "normalises with all of it")
        self.dims[event.outputs[0]] = dims
        for statistic in event.outputs[1:]:
            if len(statistic.shape) == len(dims):
                self.dims[statistic] = [*dims[:-count], *[()] * count]

    def _attention(self, event: Event) -> None:
        query, key, value = (list(self.dims_of(v)) for v in event.inputs[:3])
        sizes = [v.shape for v in event.inputs[:3]]
        heads = query[-3]
        for other, size in ((key, sizes[1]), (value, sizes[2])):
            if size[-3] == sizes[0][-3]:
                heads = self.meet(event, heads, other[-3])
            else:  # grouped: a key head serves consecutive query heads
                groups = self.atoms.aligned(heads, (size[-3], sizes[0][-3] // size[-3])) if heads else None
                if groups is None or not other[-3] or not self.atoms.unify_dims(groups[0], other[-3]):
                    self.keep_unsplit(event, (*heads, *other[-3]), "shares out key heads unevenly")
                else:  # every rank would need the gradient of a key head from all who read it
                    self.keep_unsplit(event, groups[1], "shares a key head among them")
            self.keep_unsplit(event, other[-2], "attends over it")
        # The head size is summed over in query · keyᵀ, (samples, heads, queries, size) · (samples, heads, size, keys).
        for dim in (query[-1], key[-1]):
            self.keep_unsplit(event, dim, "multiplies over it")
        if any(v.storage in self.trained for v in event.inputs[:2]):  # gradients of the scores sum over it
            self.keep_unsplit(event, value[-1], "weighs all of it with the same scores")
        if len(event.inputs) > 3:
            heads = self._masked(event, heads, event.inputs[3])
        self.dims[event.outputs[0]] = [*query[:-3], heads, query[-2], value[-1]]

    def _masked(self, event: Event, heads: Dim, mask: Value) -> Dim:
        """A mask, or scores that are added: one for all heads, or one for each."""
        dims = self.dims_of(mask)
        for dim in dims[-2:]:
            self.keep_unsplit(event, dim, "attends over it")
        if len(mask.shape) > 2 and mask.shape[-3] > 1:
            return self.meet(event, heads, dims[-3])
        if mask.storage in self.trained:
            self.keep_unsplit(event, heads, "adds learned scores that are the same for all heads")
            return ()
        return heads

    def _product(self, event: Event) -> None:
        start = 1 if event.name in ("addmm", "baddbmm") else 0
        left, right = event.inputs[start], event.inputs[start + 1]
        if right.storage in self.graph.derived or left.storage in self.graph.derived:
            self._weighted(event, left, right)
            return
        a, b = self.dims_of(left), self.dims_of(right)
        # (batch, m, k) · (batch, k, n): batch dims meet, k is summed over, m and n pass through.
        batch = [self.meet(event, a[0], b[0])] if len(a) == 3 else []
        for dim in (a[-1], b[-2]):
            self.keep_unsplit(event, dim, "multiplies over it")
        for other, dim in ((left, b[-1]), (right, a[-2])):
            # The other factor's gradient is a sum over this dim, of which each rank would have a part.
            if other.storage in self.trained:
                self.keep_unsplit(event, dim, "multiplies it with what is not divided and has a gradient")
        dims: Dims = [*batch, a[-2], b[-1]]
        if start:
            dims = self._added(event, event.inputs[0], dims)
        self.dims[event.outputs[0]] = dims

    def _added(self, event: Event, value: Value, dims: Dims) -> Dims:
        """A matrix that is added to a product must be divided as that is."""
        shape, own = event.outputs[0].shape, self.dims_of(value)
        if value.storage in self.trained and value.shape != shape:
            for dim in dims:
                self.keep_unsplit(event, dim, "adds a matrix to its product")
            return [()] * len(dims)
        lead = len(shape) - len(value.shape)
        return [
            self.meet(event, dim, own[at - lead]) if at >= lead and value.shape[at - lead] == shape[at] > 1 else dim
            for at, dim in enumerate(dims)
        ]

    def _weighted(self, event: Event, left: Value, right: Value) -> None:
        storage = right.storage if right.storage in self.graph.derived else left.storage
        name = self.graph.name_of(storage, event)
        owner = name.rpartition(".")[0]
        problem = _problem(self.root, name, event) if storage == right.storage else "it stands left in its product"
        if problem is not None:
            self.unsupported[name] = problem
            self.give_up(event, f"multiplies it with {name}, which cannot be split: {problem}")
            return
        # x (…, in) · Wᵀ (in, out): the last dim enters the layer, `made` leaves it.
        *others, entering = self.dims_of(left)
        # The weight's gradient is a sum over all rows of x; with rows divided each rank would have a part of it.
        if self.trained.intersection(value.storage for value in event.inputs if value != left):
            for dim in others:
                self.keep_unsplit(event, dim, SHARED_WEIGHT)
        known = self.layers.get(owner)
        if known is None:
            known = self.layer(owner, "linear", event.outputs[0].shape[-1], entering, event)
        else:
            known.entering = self.meet(event, known.entering, entering)
        self.dims[event.outputs[0]] = [*others, (known.made,)]

    def _pointwise(self, event: Event) -> None:
        """Operators whose result is the broadcast of what enters; any other needs all of it in one place."""
        output = event.outputs[0] if event.outputs else None
        shape = broadcast([value.shape for value in event.inputs])
        if output is None or shape is None or tuple(output.shape) != shape or not is_elementwise(event.name):
            self.give_up(event, f"computes {event.name} of it")
            return
        dims: Dims = [()] * len(shape)
        for at in range(-1, -len(shape) - 1, -1):
            # Broadcasting aligns dims from the last; operands of size 1 there say nothing about how it is divided.
            wide = [v for v in event.inputs if len(v.shape) >= -at and v.shape[at] == shape[at] and shape[at] > 1]
            aligned = [self.dims_of(value)[at] for value in wide]
            if any(aligned):
                dim = aligned[0]
                for other in aligned[1:]:
                    dim = self.meet(event, dim, other)
                dims[at] = self._unless_shared(event, dim, at)
        for result in event.outputs:
            if result.shape == output.shape:
                self.dims[result] = dims

    def _unless_shared(self, event: Event, dim: Dim, at: int) -> Dim:
        """Return `dim`, or nothing where an activation is shared along it and trained: each rank would have a part of
        its gradient.  A parameter that is shared along it is noted in `shared`: its parts are summed over ranks."""
        for value in event.inputs:
            if value.storage not in self.trained or (len(value.shape) >= -at and value.shape[at] > 1):
                continue
            if value.storage in self.graph.derived:
                self.shared.append((self.graph.derived[value.storage][0], dim, event.index))
            else:
                self.keep_unsplit(event, dim, "combines it with an activation that is shared along it")
                return ()
        return dim


def _problem(root: nn.Module, parameter: str, event: Event) -> str | None:
    """Why a matrix is not the weight of a plain linear layer that ran as a module."""
    owner, _, leaf = parameter.rpartition(".")
    module = root.get_submodule(owner)
    if owner != event.module:
        return f"it is used inside {event.module or 'the forward'} and not by calling {owner or 'the model'}"
    if "forward" in vars(module):
        return f"{owner or 'the model'} was given a forward of its own, which may do more than its class"
    if leaf != "weight" or not (runs(module, nn.Linear.forward) or is_conv1d(module)):
        return f"{owner or 'the model'} is a {type(module).__name__} and no plain nn.Linear"
    return None


def _is_inside(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")
