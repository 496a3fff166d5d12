"""Traces a model's sends: one forward on the meta device, with hooks at its modules, gives all that programs need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import CutTable
from weft.model.meta_forward import copy_on_meta
from weft.techniques.core import first_names, sparse_tables
from weft.techniques.core.region import SequenceRegion, sequence_region
from weft.techniques.send_trace import (
    BlockEntry,
    CallKind,
    ModuleCall,
    Outline,
    Parameter,
    SampleGather,
    TensorCut,
)
from weft.techniques.tensor.cuts import is_magnitude, split_parameters
from weft.techniques.tensor.magnitudes import column_magnitudes, row_magnitudes
from weft.techniques.tensor.mesh_2d.roles import cut_of, grid_kind, role_of
from weft.techniques.tensor.mesh_2d.shape import GridCut, OnGrid
from weft.verify.dry_run._forward_flow import AttentionObserver, CallFlow, crossing_elements, first_tensor, has_parts

if TYPE_CHECKING:
    from weft.model.stacked import ExpertStack

_SAMPLES = 2
"""Samples of the forward: a batch norm in training wants more than one."""
_NOTED = ("column", "row", "channel_out", "channel_in", "vocab", "gathered_input", "replicate", "gather", "expert")


def trace_sends(blueprint: Blueprint) -> Outline:
    """Trace the sends of a full model; any plan can be applied to the result.  Not collective, and takes no memory.

    Raises:
        PlanError: the model brings no example batch.
    """
    if blueprint.example is None:
        raise PlanError(
            f"{type(blueprint.module).__name__} brings no example batch, so what its ranks would send cannot be"
            " predicted. Give its Blueprint an `example`."
        )
    # A copy on the meta device: shapes cost no memory, and hooks and replaced forwards do not touch the user's model.
    notes = _SendTracer(blueprint, copy_on_meta(blueprint.module).to("meta").train())
    batch = blueprint.example(_SAMPLES)
    auxiliary = notes.run({name: field.to("meta") for name, field in batch.items()})
    calls, widths = [call for call in notes.calls if call is not None], _widths_of_weights(blueprint, batch)
    cut, region, routers = blueprint.cut, notes.region, blueprint.routers
    labels = batch.get("labels")
    return Outline(
        samples=_SAMPLES,
        parameters=tuple(_parameters(blueprint, region)),
        calls=tuple(replace(call, widths=widths.get(call.module, ())) for call in calls),
        stem=cut.stem if cut is not None else (),
        entries=tuple(notes.entries[name] for name in cut.blocks) if cut is not None else (),
        between=cut.between if cut is not None else {},
        tail=cut.tail if cut is not None else (),
        block_costs=tuple(blueprint.block_costs),
        vocabulary_head=blueprint.vocabulary_head,
        joins_after=region.last if region is not None else None,
        joined=notes.joined,
        tokens=batch["tokens"].shape[1] if "tokens" in batch and batch["tokens"].dim() > 1 else 0,
        labels=0 if labels is None else labels.numel(),
        gathers=_gathers(blueprint),
        auxiliary=auxiliary,
        routers=None if routers is None else (len(routers.names), routers.num_experts),
        is_balanced=routers is not None and routers.balance_rate > 0,
    )


def _widths_of_weights(blueprint: Blueprint, batch: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return how wide the weights of choices are that stacked experts of transformers get, by the name under which they
    are noted: routers of the library compute in a precision of their own.  One forward each in 2, 4 and 8 bytes."""
    by_module: dict[str, tuple[tuple[int, int], ...]] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64) if blueprint.stacks else ():
        copy = copy_on_meta(blueprint.module, dtype).to("meta").train()

        def noted(name: str, stack: ExpertStack, *args: Any, **kwargs: Any) -> Tensor:
            tokens, _, weights = stack.operands(args, kwargs)
            width = (dtype.itemsize, weights.element_size())  # noqa: B023
            by_module[f"{name}.weights"] = (*by_module.get(f"{name}.weights", ()), width)
            return torch.empty_like(tokens)

        for name, stack in blueprint.stacks.items():
            copy.get_submodule(name).forward = partial(noted, name, stack)
        try:
            copy(**{keyword: batch[field].to("meta") for keyword, field in blueprint.inputs.items() if field in batch})
        except RuntimeError:
            continue  # a forward that does not know this precision cannot train in it
    return by_module


def trace_sends_or_reason(blueprint: Blueprint) -> Outline | str:
    """Return the outline, or why there is none: a forward may ask for what only its rank has."""
    try:
        return trace_sends(blueprint)
    except Exception as problem:
        reason = (str(problem).strip().splitlines() or [""])[0]
        return f"what the model sends: its forward on the meta device fails ({type(problem).__name__}: {reason})"


def _gathers(blueprint: Blueprint) -> tuple[SampleGather, ...]:
    if blueprint.per_sample_loss:
        return ()
    from weft.techniques.data.find_whole_batch import find_whole_batch  # loaded for such losses

    return tuple(
        SampleGather(
            what=one.what,
            elements_per_sample=one.elements_per_sample,
            element_bytes=one.element_bytes,
            needs_gradient=one.needs_gradient,
        )
        for one in find_whole_batch(blueprint).gathers
    )


# ── parameters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parameters(blueprint: Blueprint, region: SequenceRegion | None) -> Iterator[Parameter]:
    module, forms_grid = blueprint.module, not blueprint.why_not("mesh_2d")
    splits = split_parameters(blueprint, GroupView((0,), 0, None)) if blueprint.splits else {}
    names, sparse, experts = first_names(module), sparse_tables(module), blueprint.experts
    for name, tensor in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        split = splits.get(name)
        yield Parameter(
            name=name,
            first=names[name],
            shape=tuple(tensor.shape),
            is_trained=tensor.requires_grad,
            split=None if split is None else TensorCut(split.dim, split.blocks),
            grid=_grid_cut(blueprint, name) if forms_grid else None,
            partial=_partial(_kind_for(blueprint, name, owner), leaf, region is not None and region.contains(owner)),
            is_expert=owner in experts,
            is_sparse=names[name] in sparse,
        )


def _grid_cut(blueprint: Blueprint, name: str) -> GridCut | None:
    owner, _, leaf = name.rpartition(".")
    module = blueprint.module.get_submodule(owner)
    try:
        return cut_of(blueprint, role_of(blueprint, owner, module), owner, leaf)
    except PlanError:
        return None  # ranks of such a model form no grid


def _kind_for(blueprint: Blueprint, name: str, owner: str) -> str | None:
    """Return the split kind of a parameter: that of its own rule, else of its module's."""
    own = blueprint.rule_of_parameter(name)
    return blueprint.kind_of(owner) if own is None else own.kind


def _partial(kind: str | None, leaf: str, in_region: bool) -> Any:
    """Return when tensor ranks compute partial gradients of a parameter: `always`, `never`, or `sequence`: only under
    sequence parallelism."""
    if kind in ("heads", "features", "gather"):
        return "always"
    if in_region and (kind == "sequence" or (kind == "row" and leaf == "bias")):
        return "sequence"
    return "never"


# ── activations ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _OpenCall:
    """A call that has not ended."""

    index: int
    call: ModuleCall
    num_kept: int
    """Tensors that were kept for the backward when it began."""


@dataclass(slots=True)
class _SendTracer:
    """Hooks in a copy of the model, and what they saw."""

    blueprint: Blueprint
    module: nn.Module
    calls: list[ModuleCall | None] = field(default_factory=list[ModuleCall | None])
    entries: dict[str, BlockEntry] = field(default_factory=dict[str, BlockEntry])
    joined: tuple[int, ...] | None = None
    region: SequenceRegion | None = field(init=False)
    _experts: Mapping[str, int] = field(init=False)
    """Module of stacked experts → how many they are."""
    _forms_grid: bool = field(init=False)
    """Whether tensor ranks may form a grid for the model."""
    _top_k: Mapping[str, int] = field(init=False)
    """Mixture of Weft's → how many experts a token chooses."""
    _flow: CallFlow = field(default_factory=CallFlow)
    _num_kept: int = 0
    _tokens: int = 0
    """Tokens of a sample; 0: samples are no sequences."""
    _block: int | None = None
    """Index of the open block."""
    _needed: set[int] = field(default_factory=set[int])
    """Calls of the open block with whose results something was computed that is kept."""
    _seen: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _alive: list[Tensor] = field(default_factory=list[Tensor])
    """Tensors kept so that no two of the forward have one identity."""
    _open: list[_OpenCall] = field(default_factory=list[_OpenCall])
    _in_block: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Index, tensors kept at the entry and at the exit of each call that stands in the open block."""

    def __post_init__(self) -> None:
        self._experts, self._forms_grid = self.blueprint.experts, not self.blueprint.why_not("mesh_2d")
        self._top_k = {name: mixture.router.top_k for name, mixture in self.blueprint.mixtures.items()}
        self.region = sequence_region(self.blueprint) if isinstance(self.blueprint.cut, CutTable) else None

    def run(self, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Run the forward once.  Returns elements of the sums of the loss's auxiliary terms."""
        self._install()
        self._tokens = batch["tokens"].shape[1] if "tokens" in batch and batch["tokens"].dim() > 1 else 0
        inputs = {keyword: batch[name] for keyword, name in self.blueprint.inputs.items() if name in batch}
        terms: Mapping[str, Any] = getattr(self.blueprint.loss, "auxiliary", {})
        with (
            AttentionObserver(self._note_attention),
            self._flow,
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor),
        ):
            outputs = self.module(**inputs)
            return tuple(term.sums(outputs, batch)[0].numel() for term in terms.values())

    def _keep(self, tensor: Tensor) -> Tensor:
        # Autograd saves this tensor for the backward.  The count says where a recomputation may stop, and the calls
        # that it depends on must be repeated by it.
        self._num_kept += 1
        self._needed |= self._flow.places(tensor)
        return tensor

    def _install(self) -> None:
        # The first name of a shared module counts; under its other names it would be noted twice.
        done: set[int] = set()
        wholes: list[str] = []
        for name, module in self.module.named_modules(remove_duplicate=False):
            if id(module) in done:
                continue
            if stack := self.blueprint.stacks.get(name):
                self._note_stack(name, module, stack)
            if name in self._top_k:
                self._note(name, module, "mixture", is_inside_whole=False)
            kind = self._kind(name, module)
            if kind in ("column", "row") and is_magnitude(module):
                self._note_magnitudes(name, module, kind)
                continue
            if kind == "gathered_input" and self._is_in_region(name):
                wholes.append(name + ".")
            if kind == "expert":
                self._note_weights(name, module)
            if kind is not None:
                done.add(id(module))
                whole = kind == "column" and name.startswith(tuple(wholes))
                whole |= kind == "expert" and self.blueprint.kind_of(name.rpartition(".")[0]) == "replicate"
                self._note(name, module, kind, is_inside_whole=whole)
        for index, name in enumerate(self._blocks):
            self._note_block(index, name)
        if self.region is not None:
            self.module.get_submodule(self.region.last).register_forward_hook(self._join)

    def _kind(self, name: str, module: nn.Module) -> CallKind | None:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            return "batch_norm"
        if name in self._experts and name not in self.blueprint.stacks:
            return "experts"
        kind = self.blueprint.kind_of(name)
        if kind in ("replicate", "expert") and self.blueprint.kind_of(name.rpartition(".")[0]) == kind:
            return None
        if kind in _NOTED:
            return kind  # pyright: ignore[reportReturnType]
        return self._on_grid(name, module)

    def _on_grid(self, name: str, module: nn.Module) -> OnGrid | None:
        return grid_kind(self.blueprint, name, module) if self._forms_grid else None

    def _is_in_region(self, name: str) -> bool:
        return self.region is not None and self.region.contains(name)

    def _block_of(self, name: str) -> int | None:
        return next((i for i, b in enumerate(self._blocks) if name == b or name.startswith(f"{b}.")), None)

    def _note_magnitudes(self, name: str, module: nn.Module, kind: CallKind) -> None:
        """Let the module compute as it does on tensor ranks, and note what it does with their parts."""

        def through(kind: CallKind, x: Tensor) -> Tensor:
            number, shape, wants = self._number(x), tuple(x.shape), x.requires_grad
            call = ModuleCall(
                module=name,
                kind=kind,
                block=self._block_of(name),
                source=number,
                shape=shape,
                output=shape,
                needs_gradient=wants,
                gives_gradient=wants,
            )
            self._in_block.append((len(self.calls), self._num_kept, self._num_kept))
            self.calls.append(call)
            return x

        noted = {kind: partial(through, kind) for kind in ("enter", "sum", "norms")}
        is_column = kind == "column"
        module.forward = (
            column_magnitudes(module, noted["enter"])
            if is_column
            else row_magnitudes(module, noted["norms"], noted["sum"])
        )

    def _note_weights(self, name: str, module: nn.Module) -> None:
        """Note the weights of a mixture's choices, of whose gradients each rank has a part."""
        router = next((child for leaf, child in module.named_children() if leaf == "router"), None)

        def leave(router: nn.Module, args: Any, routing: Any) -> None:
            note(routing.weights)

        def enter(experts: nn.Module, args: Any, kwargs: Any) -> None:
            _, weights = (value for value in (*args, *kwargs.values()) if value.is_floating_point())
            note(weights)

        def note(weights: Tensor) -> None:
            call = ModuleCall(
                module=f"{name}.weights",
                kind="enter",
                block=self._block_of(name),
                source=self._number(weights),
                shape=self._by_sample(weights),
                output=self._by_sample(weights),
                needs_gradient=weights.requires_grad,
                gives_gradient=weights.requires_grad,
            )
            self._in_block.append((len(self.calls), self._num_kept, self._num_kept))
            self.calls.append(call)

        if router is not None:
            router.register_forward_hook(leave)
            return
        module.register_forward_pre_hook(enter, with_kwargs=True)  # stacked experts of transformers are given them

    def _note_stack(self, name: str, module: nn.Module, stack: ExpertStack) -> None:
        """Note what goes around stacked experts of transformers, which their module itself copies, sorts and sums."""
        opened: list[tuple[int, int]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens, choices, weights = stack.operands(args, kwargs)
            opened.append((len(self.calls), self._num_kept))
            call = ModuleCall(
                module=name,
                kind="experts",
                block=self._block_of(name),
                experts=stack.num_experts,
                source=self._number(tokens),
                shape=(choices.numel(), tokens.shape[1]),
                output=(choices.numel(), tokens.shape[1]),
                needs_gradient=tokens.requires_grad,
                gives_gradient=False,
            )
            whole = {"shape": tuple(tokens.shape), "output": tuple(tokens.shape), "copies": choices.shape[1]}
            self.calls += [call, replace(call, kind="mixture", weighs=weights.requires_grad, **whole)]

        def leave(module: nn.Module, args: Any, output: Tensor) -> None:
            index, num_kept = opened.pop()
            for place in (index, index + 1):
                call = self.calls[place]
                assert call is not None, "noted when it was entered"
                self.calls[place] = replace(call, gives_gradient=output.requires_grad)
            # Rows that came back are kept for the weights of the choices, so whoever computes again gets them again.
            self._in_block += [(index, num_kept, num_kept), (index + 1, num_kept, self._num_kept)]

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def _note_attention(self, query: Tensor, key: Tensor, value: Tensor, made: Tensor, window: int | None) -> None:
        block, before = self._block, self._flow.places(query)
        call = ModuleCall(
            module="the stem" if block is None else self._blocks[block],
            kind="attention",
            block=block,
            source=self._number(key),
            shape=tuple(key.shape),
            output=tuple(value.shape),
            heads=query.shape[1],
            is_divided=not self.blueprint.attending or has_parts(self.calls[i] for i in sorted(before)),
            window=window,
            needs_gradient=made.requires_grad,
            gives_gradient=made.requires_grad,
        )
        self._in_block.append((len(self.calls), self._num_kept, self._num_kept))
        self._flow.begin(len(self.calls), made)
        self.calls.append(call)

    def _note(self, name: str, module: nn.Module, kind: CallKind, *, is_inside_whole: bool) -> None:
        rule, on_grid, block = self.blueprint.rule_of(name), self._on_grid(name, module), self._block_of(name)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            read = first_tensor(args, kwargs)
            call = ModuleCall(
                module=name,
                kind=kind,
                on_grid=on_grid,
                block=block,
                in_region=self._is_in_region(name),
                is_inside_whole=is_inside_whole,
                gathers_output=rule is not None and rule.gather_output,
                is_divided=rule is not None and rule.kind == "channels",
                experts=self._experts.get(name, 0),
                copies=self._top_k.get(name, 0),
                weighs=kind == "mixture"
                and any(tensor.requires_grad for tensor in (read, *module.get_submodule("router").parameters())),
                source=self._number(read),
                shape=self._by_sample(read),
                output=(),
                needs_gradient=read.requires_grad,
                gives_gradient=False,
            )
            self._open.append(_OpenCall(len(self.calls), call, self._num_kept))
            self.calls.append(None)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            opened, made = self._open.pop(), first_tensor(output if isinstance(output, tuple | list) else (output,), {})
            assert opened.call.module == name, "calls of modules nest"
            shape = self._by_sample(made)
            self.calls[opened.index] = replace(opened.call, output=shape, gives_gradient=made.requires_grad)
            self._in_block.append((opened.index, opened.num_kept, self._num_kept))
            self._flow.begin(opened.index, made)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    @property
    def _blocks(self) -> tuple[str, ...]:
        cut = self.blueprint.cut
        return tuple(cut.blocks) if cut is not None else ()

    def _note_block(self, index: int, name: str) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            read = first_tensor(args, kwargs)
            shape, crossing = tuple(read.shape), crossing_elements(self.blueprint.cut, index)
            self.entries[name] = BlockEntry(
                name=name, shape=shape, needs_gradient=read.requires_grad, crossing=crossing
            )
            self._in_block.clear()
            self._needed.clear()
            self._block = index

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._block = None
            # Torch's recomputation stops at the last tensor that the forward had kept: what a block does after it is
            # not repeated, nor are the sends of that part.
            for place, at_entry, at_exit in self._in_block:
                call = self.calls[place]
                assert call is not None, "what began in a block has ended with it"
                self.calls[place] = replace(
                    call,
                    is_entry_repeated=at_entry < self._num_kept,
                    is_exit_repeated=at_exit < self._num_kept,
                    is_exit_needed=place in self._needed,
                )

        block = self.module.get_submodule(name)
        block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        block.register_forward_hook(leave)

    def _join(self, module: nn.Module, args: Any, output: Any) -> None:
        made = first_tensor(output if isinstance(output, tuple | list) else (output,), {})
        self.joined = tuple(made.shape)

    def _by_sample(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of an activation, samples first: also where they lie in a row with tokens, or behind them."""
        shape = tuple(tensor.shape)
        if shape and shape[0] % _SAMPLES and shape[1:2] == (_SAMPLES,):
            return (_SAMPLES, shape[0], *shape[2:])
        is_row = self._tokens > 1 and shape[:1] == (_SAMPLES * self._tokens,)
        return (_SAMPLES, self._tokens, *shape[1:]) if is_row else shape

    def _number(self, tensor: Tensor) -> int:
        # A version is part of the number: after a change in place a tensor is another value, which must be gathered
        # again.
        self._alive.append(tensor)
        return self._seen.setdefault((id(tensor), tensor._version), len(self._seen))
