"""Which modules ranks of a square compute whole, where no rule says how they work on parts, and whether they may.

A module that every rank of a row computes whole gives what it gave, if rows may share out samples: what it makes of one
must not depend on others of the microbatch.  Its operators are followed with the samples as parts along a dim, by the
same rules by which features are: one that is not known to leave samples apart is a reason against it, and so is what
it would remember of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from weft.analysis._expert_calls import as_event, mix_by_token, proven_stacks, stand_in_for_experts
from weft.analysis.features._feature_flow import STAND_IN, FeatureWalker, MixedSamplesError, NoPartsError, Parts
from weft.analysis.features._own_backward import own_backward
from weft.analysis.tensor_split._dims import argument
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._fused import FusedCall
from weft.model.blueprint import Blueprint
from weft.model.meta_forward import glob_of
from weft.techniques.tensor.mesh_2d.computed_whole import computed_whole, cut_first, first_of

_PICKING = ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_")
"""Operators that pick entries, or put them, along one dim."""
_MADE = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full")
_MOST = 0.5
"""Share of the parameters that a module may have which is computed whole, where nothing says what the blocks are."""


def to_compute_whole(
    blueprint: Blueprint, problem: NoPartsError, cause: NoPartsError, wholes: Collection[str]
) -> frozenset[str]:
    """Return what to compute whole: besides `wholes` the innermost module in which features met, or, where that is
    computed whole already, in place of it the one around it; and its like in other layers.

    Raises:
        NoPartsError: there is none: `cause`, what stood in the way last that is no consequence of computing them whole.
    """
    if isinstance(problem, MixedSamplesError):
        raise problem
    places = (_beyond(place, wholes) for place in (problem.module, *sorted(problem.suspects.intersection(wholes))))
    name = next((place for place in places if place and _may_be_whole(blueprint, place)), None)
    if name is None:
        raise cause
    root = blueprint.module
    kind, glob = type(root.get_submodule(name)), glob_of(name)
    alike = {other for other, each in root.named_modules() if glob_of(other) == glob and type(each) is kind}
    kept = {whole for whole in wholes if not any(whole.startswith(f"{each}.") for each in alike)}
    return frozenset(alike | kept)


def _beyond(name: str, wholes: Collection[str]) -> str:
    """The innermost module that is not computed whole already."""
    while any(name == whole or name.startswith(f"{whole}.") for whole in wholes):
        name = name.rpartition(".")[0]
    return name


def _may_be_whole(blueprint: Blueprint, name: str) -> bool:
    """Whether it is less than a block, and its backward of a sum is the sum of its backwards, as far as kinds and hooks
    tell: ranks of a row have parts of the sum that a gradient is, and what clamps or scales each of them is wrong."""
    cut, module = blueprint.cut, blueprint.module.get_submodule(name)
    if own_backward(module):
        return False
    held = {id(each) for each in module.modules()}
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or any(id(each) in held for each in _ends(blueprint)):
        return False
    if cut is not None:
        return not any(id(blueprint.module.get_submodule(block)) in held for block in cut.blocks)
    total = sum(each.numel() for each in blueprint.module.parameters())
    return sum(each.numel() for each in module.parameters()) <= _MOST * total


def _ends(blueprint: Blueprint) -> Iterator[nn.Module]:
    """Where activations begin and end."""
    yield from (each for each in blueprint.module.modules() if isinstance(each, nn.Embedding))
    if blueprint.vocabulary_head is not None:
        yield blueprint.module.get_submodule(blueprint.vocabulary_head)


def _border(x: Tensor, kind: str, module: str, parts: int) -> Tensor:
    """What enters a module that every rank of a row computes whole (`gathered`), or leaves it (`cut`)."""
    return handle_torch_function(_border, (x,), x, kind, module, parts)


def _as_border(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    x, kind, module, parts = args

    def run() -> Tensor:
        width = x.shape[-1] * parts if kind == "gathered" else x.shape[-1] // parts
        return torch.empty((*x.shape[:-1], width), dtype=x.dtype, device="meta")

    return FusedCall(run=run, name=STAND_IN, operands=(x,), settings={"kind": kind, "module": module, "blocks": 1})


class Wholes:
    """Modules of `copy`, a copy of the model on one of `parts` of the features, that see all of these.

    Experts among them are one event each where it is shown what they do.
    """

    fused: Mapping[Any, Any] = MappingProxyType({_border: _as_border, mix_by_token: as_event})
    """How a trace runs what stands for them."""
    samples = 13
    """Samples of the trace that `check_samples` follows: a prime that divides few widths and lengths, for what puts
    samples into rows that they do not fill shows where they do not divide."""

    def __init__(self, blueprint: Blueprint, copy: nn.Module, parts: int) -> None:
        self._module, self._parts, self._names = copy, parts, blueprint.features["wholes"]
        self._shares: dict[str, bool] = dict.fromkeys(blueprint.features.get("shares", ()), True)
        stacks = proven_stacks(replace(blueprint, stacks={}))  # whatever was asked for before: ranks find the same
        stand_in_for_experts(copy, {n: each for n, each in stacks.items() if blueprint.is_computed_whole(n)})
        for name in self._names:
            each = copy.get_submodule(name)
            each.forward = partial(self._run, name, each.forward)

    def shared_out(self) -> tuple[str, ...]:
        """Return those which make as many features as they read, of which ranks go on with parts; once they ran."""
        return tuple(sorted(name for name, is_shared in self._shares.items() if is_shared))

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given: list[Tensor] = []

        def gather(x: Tensor) -> Tensor:
            given.append(_border(x, "gathered", name, self._parts))
            return given[0]

        made = computed_whole(forward, gather, None)(*args, **kwargs)
        first = first_of(made)
        if first is None:
            raise NoPartsError(f"{name} returns no tensor, nor a tuple that begins with one")
        is_shared = first.shape == given[0].shape and first.is_floating_point()
        if self._parts == 1 and self._shares.setdefault(name, is_shared) != is_shared:
            raise NoPartsError(f"{name} makes sometimes as many features as it reads")
        if not self._shares.get(name):
            return made
        return cut_first(made, lambda x: _border(x, "cut", name, self._parts))

    def check_samples(self, trace: Trace) -> None:
        """Follow the samples through them.

        Raises:
            MixedSamplesError: they may meet there, or something is remembered of them.
        """
        walker = _Samples(trace, self._module, {}, {}, frozenset(), wholes=frozenset(self._names))
        try:
            for event in trace.events:
                walker.follow(event)
        except NoPartsError as problem:
            said = str(problem).replace("what ranks have parts of", "samples").replace("parts", "samples")
            found = MixedSamplesError(f"{said}, in a module that ranks would compute whole for samples of their own")
            raise found from problem


def _written_by(event: Event) -> frozenset[int]:
    """Storages that it writes into: its first operand's, or that of `out`."""
    return frozenset(each.storage for each in (*event.inputs[:1], *event.outputs)) if event.mutates else frozenset()


@dataclass(slots=True)
class _Samples(FeatureWalker):
    """Samples as parts, from the batch on: what is not understood is a problem in modules that are computed whole."""

    wholes: frozenset[str] = frozenset()
    entered: set[int] = field(default_factory=set[int])
    """Storages of what was gathered."""
    made: set[Value] = field(default_factory=set[Value])
    """What such modules have computed."""
    uncut: dict[int, int] = field(default_factory=dict[int, int])
    """Storage of what was cut → that of what it is cut from."""
    read: set[int] = field(default_factory=set[int])
    """Storages of what such modules have made and others read, not cut."""
    written: set[int] = field(default_factory=set[int])
    """Storages of what was cut that others write into."""

    def __post_init__(self) -> None:
        FeatureWalker.__post_init__(self)
        more: Mapping[str, Callable[[Event], None]] = {
            **dict.fromkeys(_PICKING, self._pick),
            "convolution": self._convolve,
            "linalg_solve_triangular": self._solve,
            **dict.fromkeys(("im2col", "col2im"), self._rearrange_images),
            **dict.fromkeys(("max", "min", "any", "all"), self._reduce),
            "experts": self._mix,
            "embedding": self._look_up,
        }
        self.rules = {**self.rules, **more}
        self.parts |= {value: Parts(0) for value in self.trace.inputs.values() if value.shape}

    def follow(self, event: Event) -> None:
        """Follow an event.

        Raises:
            NoPartsError: it stands in one of these modules, and samples may meet there.
        """
        self._spread(event)
        is_border = event.name == STAND_IN and event.keywords["kind"] in ("gathered", "cut")
        if is_border or not self._is_inside(event.module):
            self._check_left(event)
            self._check_aliases(event, is_border=is_border)
            with suppress(NoPartsError):
                self._step(event)
            if is_border:
                self._check_border(event)
            return
        self._check_written(event)
        for value in event.inputs:
            if value.storage in self.trace.per_sample and value not in self.parts:
                reason = f"reads {value.shape} entries, of which no dim is known to be that of samples"
                raise self._against(event, reason)
        self._step(event)
        self.made.update(event.outputs)

    def _spread(self, event: Event) -> None:
        """What is the same for all samples is a part for each, where it is spread out over them or made so (masks)."""
        if event.name == "expand":
            is_known = event.inputs[0] in self.parts or event.inputs[0].storage in self.trace.per_sample
            is_alike = not is_known and event.outputs[0].stride[:1] == (0,)
        else:
            is_alike = event.name in _MADE
        for output in event.outputs if is_alike else ():
            if len(output.shape) > 1 and output.shape[0] == self.trace.samples:
                self.parts[output] = Parts(0)

    def _is_inside(self, module: str) -> bool:
        return any(module == whole or module.startswith(f"{whole}.") for whole in self.wholes)

    def _stand_in(self, event: Event) -> None:
        """All that ranks do together they do row by row."""
        if (found := self.parts.get(event.inputs[0])) is not None:
            self._put(event, event.outputs[0], found)

    def _check_border(self, event: Event) -> None:
        if event.keywords["kind"] == "cut" and event.inputs[0].storage in self.entered:
            raise self._against(event, "returns what it was given")
        if self.parts.get(event.outputs[0]) != Parts(0):
            raise self._against(event, "is not known to have its samples one behind the other")
        if event.keywords["kind"] == "gathered":
            self.entered.add(event.outputs[0].storage)

    def _check_left(self, event: Event) -> None:
        """What others read of such modules has its samples where they were."""
        if any(value in self.made and value in self.parts and self.parts[value] != Parts(0) for value in event.inputs):
            raise self._against(event, "reads samples in another order than they were given in")

    def _check_aliases(self, event: Event, *, is_border: bool) -> None:
        """What was gathered and what is cut are copies on ranks: nobody may look for the one in the other."""
        if any(value.storage in self.entered for value in event.inputs):
            raise self._against(event, "reads what a module that would be computed whole was given, from its result")
        made = {value.storage for value in self.made}
        if is_border:
            if event.keywords["kind"] == "cut":
                self.uncut[event.outputs[0].storage] = event.inputs[0].storage
            return
        self.read |= made.intersection(value.storage for value in event.inputs)
        written = _written_by(event)
        self.written |= written.intersection(self.uncut)
        if written & made or any(self.uncut[storage] in self.read for storage in self.written):
            raise self._against(event, "writes into what a module that would be computed whole has made")

    def _check_written(self, event: Event) -> None:
        for storage in _written_by(event):
            kept = self.trace.buffers.get(storage) or next(iter(self.trace.parameters.get(storage, ())), "")
            if kept:
                raise self._against(event, f"writes into {kept}")
            if storage in self.entered:
                raise self._against(event, "writes into what it was given")

    # ── rules of samples, where those of features are others ──────────────────────────────────────────────────────────

    def _put(self, event: Event, output: Value, parts: Parts) -> None:
        if output.shape[parts.dim] % (self.trace.samples * parts.blocks):
            raise self._against(event, "makes something that no samples divide")
        self.parts[output] = parts

    def _check_draw(self, event: Event) -> None:
        """Draws are keyed by sample, or refused, wherever they are (`weft.techniques.randomness.draws`)."""

    def _met(self, event: Event, values: Any, shape: tuple[int, ...]) -> Parts:
        parts = FeatureWalker._met(self, event, values, shape)
        if event.index in self.narrowed:
            raise self._against(event, "combines samples with something that is the same for all of them")
        return parts

    def _attention(self, event: Event) -> None:
        for at, value in enumerate(event.inputs):
            is_shared = at > 2 and value not in self.parts and (len(value.shape) < 4 or value.shape[0] == 1)
            if self.parts.get(value) != Parts(0) and not is_shared:
                raise self._against(event, "attends across samples")
        self._put(event, event.outputs[0], Parts(0))

    def _pick_entries(self, event: Event) -> None:
        """What others read of one sample is not followed."""
        raise self._against(event, "picks single entries of what ranks have parts of")

    def _pick(self, event: Event) -> None:
        """Along another dim, with indices of the same samples."""
        value, dim = event.inputs[0], int(argument(event, 1, "dim", 0)) % len(event.inputs[0].shape)
        found = {self.parts.get(each) for each in event.inputs}
        (parts,) = found if len(found) == 1 else (None,)
        if parts is None or parts.dim == dim or value.shape[parts.dim] != event.outputs[0].shape[parts.dim]:
            raise self._against(event, f"calls {event.name} across samples")
        self._put(event, event.outputs[0], parts)

    def _look_up(self, event: Event) -> None:
        table, indices = event.inputs[:2]
        if table in self.parts or (found := self.parts.get(indices)) is None:
            raise self._against(event, "looks up in a table of samples")
        self._put(event, event.outputs[0], found)

    def _convolve(self, event: Event) -> None:
        value = event.inputs[0]
        if self.parts.get(value) != Parts(0) or any(each in self.parts for each in event.inputs[1:]):
            raise self._against(event, "convolves something else than samples with weights")
        self._put(event, event.outputs[0], Parts(0))

    def _solve(self, event: Event) -> None:
        """Systems of equations, of which each sample has its own."""
        matrices, sides = event.inputs
        found = self.parts.get(matrices)
        if found is None or found != self.parts.get(sides) or found.dim >= len(matrices.shape) - 2:
            raise self._against(event, "solves equations of several samples")
        self._put(event, event.outputs[0], found)

    def _rearrange_images(self, event: Event) -> None:
        """Windows of each image side by side, or back: one image alone has no dim of samples."""
        images = event.inputs[0] if event.name == "im2col" else event.outputs[0]
        if self.parts.get(event.inputs[0]) != Parts(0) or len(images.shape) != 4:
            raise self._against(event, "rearranges something else than images of samples")
        self._put(event, event.outputs[0], Parts(0))

    def _mix(self, event: Event) -> None:
        """Experts, of which it was shown that they see each token by itself."""
        if any(self.parts.get(value) != Parts(0) for value in event.inputs):
            raise self._against(event, "gives experts something else than tokens")
        self._put(event, event.outputs[0], Parts(0))
