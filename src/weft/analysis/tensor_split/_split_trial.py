"""Runs a model on one rank's share of its weights, still without memory, and compares what it computes, operator by
operator, with what it must be.

So it shows where a forward counts heads or widths by numbers of its own: by attributes, of its modules or of the
configurations that they hold, which a plan can divide (`Localise`), or by the size of its input, which it cannot.
Shapes must be those of a part, and numbers that are multiplied, added or compared must be those of the whole model: a
scale that follows from a divided count would compute something else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.analysis.tensor_split._flow import ForwardFlow
from weft.analysis.tensor_split._groups import LayerGroup
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._fused import FUSED_NAMES
from weft.analysis.trace._pointwise import LAYOUT, is_elementwise
from weft.analysis.trace._trace import FailedForward, Mode, trace
from weft.model.blueprint import Blueprint
from weft.model.channels import channel_tensors, groups_of, is_convolution
from weft.model.localising import localised, numbers_of
from weft.model.meta_forward import glob_of

_SIZES_OF_WEIGHTS = frozenset(
    {
        *("in_features", "out_features", "nf", "nx", "num_embeddings", "embedding_dim"),
        *("in_channels", "out_channels", "num_channels", "num_features", "groups", "num_groups"),
    }
)
_ATTEMPTS = 8
RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
Shape = tuple[int, ...]
DTYPE = torch.float32
"""Precision of the forwards that are looked at: every operator has a form in it."""


@dataclass(frozen=True, slots=True)
class CountAttribute:
    """A number of a module that counts something divided; `config.num_heads` is one of an object that it holds."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTrialResult:
    """Attributes to divide, or where and why it does not work."""

    attributes: tuple[CountAttribute, ...] = ()
    module: str = ""
    problem: str | None = None
    atoms: frozenset[int] = frozenset()
    """Divided atoms that are at hand where it fails."""


Progress = tuple[int, int]
"""How many operators that compute something were right, and the last one of any kind."""


class _Mismatch(Exception):
    """The first difference of a forward on a part, and how many operators were right until then."""


@dataclass(slots=True)
class SplitTrial:
    """Runs the model's own forward on meta with one rank's weights, and compares it with the whole model's operator by
    operator: modules that count heads or groups must then count the rank's, or the trial says why it fails."""

    blueprint: Blueprint
    reference: Trace
    flow: ForwardFlow
    groups: Sequence[LayerGroup]
    parts: int
    gathering: Mapping[str, Value] = field(default_factory=dict[str, Value])
    useless: set[tuple[str | None, CountAttribute, tuple[CountAttribute, ...]]] = field(default_factory=lambda: set())
    """Problems, attributes that did not help there, and those that were divided before: trials share it."""
    modes: Sequence[Mode] = ("as it is",)
    """How the forward ran for `reference`."""
    wanted: list[Event] = field(init=False)
    """Operators of the whole model that compute something."""
    reshaped: list[list[tuple[Shape, Shape]]] = field(init=False)
    """Shapes before and after, of all that a rank must reshape before each of the `wanted` operators."""

    def __post_init__(self) -> None:
        self.wanted, self.reshaped, waiting = [], [], list[tuple[Shape, Shape]]()
        for event in self.reference.events:
            if self._counts(event):
                self.wanted.append(event)
                self.reshaped.append(waiting)
                waiting = []
            elif event.name in RESHAPES and self._is_outside(event) and self._is_divided(event.inputs[0]):
                waiting.append((self._local_shape(event.inputs[0]), self._local_shape(event.outputs[0])))

    def run(self) -> SplitTrialResult:
        """Divide attributes one after another, as long as each lets the forward come further."""
        attributes: list[CountAttribute] = []
        done, problem = self._attempt(attributes)
        # Ends: every round divides one attribute more and must come further; there are at most `_ATTEMPTS` rounds.
        for _ in range(_ATTEMPTS):
            if problem is None:
                return SplitTrialResult(attributes=tuple(attributes))
            better = self._better(attributes, done, problem)
            if better is None:
                break
            attribute, done, problem = better
            attributes.append(attribute)
        event = self._event(done)
        return SplitTrialResult(module=event.module, problem=problem, atoms=self._at_hand(event))

    def _event(self, done: Progress) -> Event:
        return self.wanted[min(done[0], len(self.wanted) - 1)]

    def _counts(self, event: Event) -> bool:
        """Whether an event is compared: it computes something, outside of what gets all of its input."""
        return event.name not in LAYOUT and self._is_outside(event)

    def _is_outside(self, event: Event) -> bool:
        return not any(f"{event.module}.".startswith(f"{name}.") for name in self.gathering)

    def _better(
        self, attributes: Sequence[CountAttribute], done: Progress, before: str | None
    ) -> tuple[CountAttribute, Progress, str | None] | None:
        best: tuple[CountAttribute, Progress, str | None] | None = None
        # Greedy: the attribute with which the forward comes furthest. Candidates are those near the failing operator,
        # so that few forwards are run.
        for attribute in self._candidates(done):
            # An attribute that did not help with this problem once need not run again in the next trial.
            known = (before, attribute, tuple(attributes))
            if attribute in attributes or known in self.useless:
                continue
            # Progress is (right operators, last operator): an attribute may repair a reshape without a further right
            # operator.
            reached, problem = self._attempt([*attributes, attribute])
            if reached <= done and problem is not None:
                self.useless.add(known)
            if reached > (done if best is None else best[1]) or problem is None:
                best = attribute, reached, problem
            if problem is None:
                break
        return best

    def _attempt(self, attributes: Sequence[CountAttribute]) -> tuple[Progress, str | None]:
        """Run with these attributes divided; how far it came, and what went wrong then."""
        done = at = 0
        reshaped: list[tuple[Shape, Shape]] = []

        def compare(divided: Event) -> None:
            nonlocal done, at
            at = divided.index
            if not self._counts(divided):
                if divided.name in RESHAPES:
                    reshaped.append((divided.inputs[0].shape, divided.outputs[0].shape))
                return
            # Operators are compared in order: a rank must compute the same things on smaller shapes.
            if done >= len(self.wanted):
                raise _Mismatch("it goes on where the whole model ends")
            wrong = self._difference(self.wanted[done], divided) or misshaped(self.reshaped[done], reshaped)
            reshaped.clear()
            if wrong is not None:
                raise _Mismatch(wrong)
            done += 1

        with ExitStack() as stack:
            stack.enter_context(_divided(self.blueprint.module, attributes, self._counted(), self.parts))
            stack.enter_context(_gathered(self.blueprint.module, self.gathering, self.parts))
            try:
                trace(self.blueprint, DTYPE, self._share(), loss=False, watch=compare, modes=self.modes)
            except FailedForward as stopped:
                cause = stopped.__cause__
                return (done, at), next(iter(str(cause if cause is not None else stopped).splitlines()), "it stops")
        return (done, at), None if done == len(self.wanted) else "it ends before the whole model does"

    def _difference(self, full: Event, divided: Event) -> str | None:
        if full.name != divided.name or len(full.outputs) != len(divided.outputs):
            return f"it computes {divided.name} where the whole model computes {full.name}"
        if is_elementwise(full.name) or full.name in FUSED_NAMES:
            mine, theirs = list(_numbers(full)), list(_numbers(divided))
            # A factor such as 1 / num_heads or sqrt(width) must be the whole model's, for no shape would show it.
            if mine != theirs:
                return f"its {full.name} takes the number {theirs or 'none'} instead of {mine or 'none'}"
        count = 1 if full.name in FUSED_NAMES else len(full.outputs)
        pairs = [("takes", *pair) for pair in zip(full.inputs, divided.inputs, strict=False)]
        pairs += [("makes", *pair) for pair in zip(full.outputs[:count], divided.outputs, strict=False)]
        for what, mine, theirs in pairs:
            # Only activations have the shapes that are divided; constants may be as the forward makes them.
            if mine.storage not in self.reference.per_sample:
                continue
            shape = self._local_shape(mine)
            if shape != theirs.shape:
                return f"{full.name} {what} {theirs.shape} instead of {shape}"
        return None

    def _is_divided(self, value: Value) -> bool:
        chosen, leaves = self._chosen(), self.flow.atoms.leaves
        return any(chosen.intersection(leaves(dim)) for dim in self.flow.dims.get(value, ()))

    def _chosen(self) -> frozenset[int]:
        return frozenset(group.atom for group in self.groups)

    def _local_shape(self, value: Value) -> tuple[int, ...]:
        dims = self.flow.dims.get(value)
        if dims is None:
            return value.shape
        chosen, leaves = self._chosen(), self.flow.atoms.leaves
        sizes = zip(value.shape, dims, strict=True)
        return tuple(size // self.parts if chosen.intersection(leaves(dim)) else size for size, dim in sizes)

    def _at_hand(self, event: Event) -> frozenset[int]:
        """Divided atoms in what the event's module works on."""
        near = [e for e in self.reference.events if e.module == event.module]
        for events in ([event], near):
            values = [value for e in events for value in (*e.inputs, *e.outputs)]
            dims = [dim for value in values for dim in self.flow.dims.get(value, ())]
            atoms = self._chosen().intersection(atom for dim in dims for atom in self.flow.atoms.leaves(dim))
            if atoms:
                return atoms
        return self._chosen()

    def _candidates(self, done: Progress) -> list[CountAttribute]:
        """Whole numbers of the module that fails, or of those around it, that equal a divided size there."""
        candidates: list[CountAttribute] = []
        name, root, levels = self._event(done).module, self.blueprint.module, 0
        while True:
            sizes = self._sizes_inside(name)
            for attribute, value in numbers_of(root.get_submodule(name)):
                # A number in the model's config may be read by modules elsewhere; token ids only look like sizes.
                of_model = "." in attribute and (levels > 1 or attribute.endswith("_id"))
                if value in sizes and attribute not in _SIZES_OF_WEIGHTS and value % self.parts == 0 and not of_model:
                    candidates.append(CountAttribute(name, attribute))
            if not name:
                return candidates
            name, levels = name.rpartition(".")[0], levels + 1

    def _sizes_inside(self, module: str) -> set[int]:
        chosen, leaves, sizes = self._chosen(), self.flow.atoms.leaves, set[int]()
        for event in self.reference.events:
            if f"{event.module}.".startswith(f"{module}." if module else ""):
                for value in (*event.inputs, *event.outputs):
                    dims = self.flow.dims.get(value, ())
                    sizes |= {n for n, dim in zip(value.shape, dims, strict=False) if chosen.intersection(leaves(dim))}
        return sizes

    def _share(self) -> dict[str, Tensor]:
        """Weights of one rank, on meta."""
        share: dict[str, Tensor] = {}
        for group in self.groups:
            for members, column in ((group.columns, True), (group.rows, False)):
                for member in members:
                    share |= self._share_of(member.layer.name, column)
            for part in group.parts:
                share[part.name] = self._part(part.name, part.dim)
            for module in group.channelwise:
                for leaf in channel_tensors(self.blueprint.module.get_submodule(module.name)):
                    share[f"{module.name}.{leaf}"] = self._part(f"{module.name}.{leaf}", 0)
        return share

    def _share_of(self, name: str, column: bool) -> dict[str, Tensor]:
        module = self.blueprint.module.get_submodule(name)
        share: dict[str, Tensor] = {}
        for leaf, _ in module.named_parameters(recurse=False):
            dim = cut_dim(module, leaf, column=column)
            if dim is not None:
                share[f"{name}.{leaf}"] = self._part(f"{name}.{leaf}", dim)
        return share

    def _part(self, name: str, dim: int) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        whole = getattr(self.blueprint.module.get_submodule(owner), leaf)
        shape = list(whole.shape)
        shape[dim] //= self.parts
        # On meta: shapes decide, and no memory is taken.
        made = torch.empty(shape, dtype=DTYPE, device="meta")
        return nn.Parameter(made, requires_grad=whole.requires_grad) if isinstance(whole, nn.Parameter) else made

    def _counted(self) -> list[CountAttribute]:
        """Numbers that go with weights: the width of Hugging Face's `Conv1D`, groups of convolutions and norms."""
        columns = [member.layer.name for group in self.groups for member in group.columns]
        module_of = self.blueprint.module.get_submodule
        counts = [CountAttribute(name, "nf") for name in columns if hasattr(module_of(name), "nf")]
        for group in self.groups:
            counted = ((module.name, groups_of(module_of(module.name))) for module in group.channelwise)
            counts += [CountAttribute(name, leaf) for name, leaf in counted if leaf is not None]
        return counts


def misshaped(expected: Iterable[tuple[Shape, Shape]], shapes: Iterable[tuple[Shape, Shape]]) -> str | None:
    """Return a reshape that differs from the expected one. A shape at the end does not tell: a rank that has one of two
    groups of channels, and takes its channels for two groups, changes their places and has as many as before."""
    rest = iter(shapes)
    for before, after in expected:
        if before != after and (before, after) not in rest:
            return f"it does not reshape {before} to {after}"
    return None


def _numbers(event: Event) -> Iterator[float]:
    """Numbers that an operator computes with."""
    arguments: Any = (event.arguments, {key: value for key, value in event.keywords.items() if key != "dtype"})
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, int | float):
            yield float(leaf)


def cut_dim(module: nn.Module, leaf: str, *, column: bool) -> int | None:
    """The dim of a layer's parameter that is cut; None where it stays whole.  A convolution's lies as a linear's."""
    if leaf == "bias":
        return 0 if column else None
    return int(column != (isinstance(module, nn.Linear) or is_convolution(module)))


@contextmanager
def _divided(
    root: nn.Module, attributes: Iterable[CountAttribute], more: Iterable[CountAttribute], parts: int
) -> Generator[None]:
    """Divide attributes of a model for a while: those given by example in every module of the same place."""
    with ExitStack() as stack:
        for attribute in attributes:
            glob = glob_of(attribute.module)
            value = dict(numbers_of(root.get_submodule(attribute.module))).get(attribute.name)
            for name, module in root.named_modules():
                if fnmatchcase(name, glob) and (attribute.name, value) in list(numbers_of(module)):
                    stack.enter_context(localised(module, attribute.name, parts))
        for item in more:
            stack.enter_context(localised(root.get_submodule(item.module), item.name, parts))
        yield


@contextmanager
def _gathered(root: nn.Module, names: Iterable[str], parts: int) -> Generator[None]:
    """Give these modules the whole of a divided input within, and cut their results as the input was."""

    def gather(module: nn.Module, args: Any) -> Any:
        return (torch.cat([args[0]] * parts, -1), *args[1:])

    def part(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.chunk(parts, -1)[0]

    with ExitStack() as stack:
        for name in names:
            module = root.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(gather).remove)
            stack.callback(module.register_forward_hook(part).remove)
        yield
