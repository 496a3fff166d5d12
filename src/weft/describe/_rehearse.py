"""Runs a model on one rank's share of its weights, still without memory, and compares every shape with what it must be.

So it shows where a forward counts heads or widths by numbers of its own: by attributes, which a plan can divide
(`Localise`), or by the size of its input, which it cannot.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from weft.describe._events import Event, Trace, Value
from weft.describe._flow import ForwardFlow
from weft.describe._fused import FUSED_NAMES
from weft.describe._groups import LayerGroup
from weft.describe._trace import Unfinished, trace
from weft.models import Blueprint
from weft.stand_ins import glob_of

_SIZES_OF_WEIGHTS = frozenset({"in_features", "out_features", "nf", "nx", "num_embeddings", "embedding_dim"})
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number of a module that counts something divided."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOutcome:
    """Attributes to divide, or where and why it does not work."""

    attributes: tuple[Attribute, ...] = ()
    module: str = ""
    problem: str | None = None
    atoms: frozenset[int] = frozenset()
    """Divided atoms that are at hand where it fails."""


@dataclass(slots=True)
class Rehearsal:
    blueprint: Blueprint
    reference: Trace
    flow: ForwardFlow
    groups: Sequence[LayerGroup]
    parts: int

    def run(self) -> SplitOutcome:
        """Divide attributes one after another, as long as each lets the forward come further."""
        attributes: list[Attribute] = []
        done, problem = self._attempt(attributes)
        for _ in range(_ATTEMPTS):
            if problem is None:
                return SplitOutcome(attributes=tuple(attributes))
            better = self._better(attributes, done)
            if better is None:
                break
            attribute, done, problem = better
            attributes.append(attribute)
        event = self.reference.events[min(done, len(self.reference.events) - 1)]
        return SplitOutcome(module=event.module, problem=problem, atoms=self._at_hand(event))

    def _better(self, attributes: Sequence[Attribute], done: int) -> tuple[Attribute, int, str | None] | None:
        best: tuple[Attribute, int, str | None] | None = None
        for attribute in self._candidates(done):
            if attribute in attributes:
                continue
            reached, problem = self._attempt([*attributes, attribute])
            if reached > (done if best is None else best[1]):
                best = attribute, reached, problem
            if problem is None:
                break
        return best

    def _attempt(self, attributes: Sequence[Attribute]) -> tuple[int, str | None]:
        """Run with these attributes divided; how many events were right, and what went wrong then."""
        problem: str | None = None
        with _divided(self.blueprint.module, attributes, self._transposed(), self.parts):
            try:
                events: Sequence[Event] = trace(self.blueprint, torch.bfloat16, self._share(), loss=False).events
            except Unfinished as stopped:
                cause = stopped.__cause__
                events = stopped.events
                problem = next(iter(str(cause if cause is not None else stopped).splitlines()), "it stops")
        for at, (wanted, found) in enumerate(zip(self.reference.events, events, strict=False)):
            wrong = self._difference(wanted, found)
            if wrong is not None:
                return at, wrong
        return len(events), problem

    def _difference(self, wanted: Event, found: Event) -> str | None:
        if wanted.name != found.name or len(wanted.outputs) != len(found.outputs):
            return f"it computes {found.name} where the whole model computes {wanted.name}"
        count = 1 if wanted.name in FUSED_NAMES else len(wanted.outputs)
        for mine, theirs in list(zip(wanted.outputs, found.outputs, strict=True))[:count]:
            if mine.storage not in self.reference.per_sample:
                continue
            shape = self._local_shape(mine)
            if shape != theirs.shape:
                return f"{wanted.name} makes {theirs.shape} instead of {shape}"
        return None

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
            found = self._chosen().intersection(atom for dim in dims for atom in self.flow.atoms.leaves(dim))
            if found:
                return found
        return self._chosen()

    def _candidates(self, done: int) -> list[Attribute]:
        """Whole numbers of the module that fails, or of those around it, that equal a divided size there."""
        event = self.reference.events[min(done, len(self.reference.events) - 1)]
        found: list[Attribute] = []
        name, root = event.module, self.blueprint.module
        while True:
            sizes = self._sizes_inside(name)
            for attribute, value in vars(root.get_submodule(name)).items():
                is_number = isinstance(value, int) and not isinstance(value, bool)
                if is_number and value in sizes and attribute not in _SIZES_OF_WEIGHTS and value % self.parts == 0:
                    found.append(Attribute(name, attribute))
            if not name:
                return found
            name = name.rpartition(".")[0]

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
        return share

    def _share_of(self, name: str, column: bool) -> dict[str, Tensor]:
        module = self.blueprint.module.get_submodule(name)
        share: dict[str, Tensor] = {}
        for leaf, parameter in module.named_parameters(recurse=False):
            dim = cut_dim(module, leaf, column=column)
            if dim is not None:
                shape = list(parameter.shape)
                shape[dim] //= self.parts
                share[f"{name}.{leaf}"] = nn.Parameter(torch.empty(shape, device="meta"))
        return share

    def _transposed(self) -> list[Attribute]:
        """Widths that Hugging Face's `Conv1D` reads."""
        names = [member.layer.name for group in self.groups for member in group.columns]
        return [Attribute(name, "nf") for name in names if hasattr(self.blueprint.module.get_submodule(name), "nf")]


def cut_dim(module: nn.Module, leaf: str, *, column: bool) -> int | None:
    """The dim of a linear layer's parameter that is cut; None where it stays whole."""
    if leaf == "bias":
        return 0 if column else None
    return int(column != isinstance(module, nn.Linear))


@contextmanager
def _divided(
    root: nn.Module, attributes: Iterable[Attribute], more: Iterable[Attribute], parts: int
) -> Generator[None]:
    """Divide attributes of a model for a while: those given by example in every module of the same place."""
    changed: list[tuple[nn.Module, str, int]] = []
    try:
        for attribute in attributes:
            glob = glob_of(attribute.module)
            value = getattr(root.get_submodule(attribute.module), attribute.name)
            for name, module in root.named_modules():
                if fnmatchcase(name, glob) and getattr(module, attribute.name, None) == value:
                    changed.append((module, attribute.name, value))
        for item in more:
            module = root.get_submodule(item.module)
            changed.append((module, item.name, getattr(module, item.name)))
        for module, name, value in changed:
            object.__setattr__(module, name, value // parts)
        yield
    finally:
        for module, name, value in changed:
            object.__setattr__(module, name, value)
