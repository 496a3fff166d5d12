"""ZeRO-3 and hybrid sharding, on torch's `fully_shard`.

Every block is a unit of its own, gathered just before it computes; what is outside the blocks forms the root unit, and
so do blocks that only some samples run (`Blueprint.sometimes`), for all ranks gather and reduce together.
Weights are cut over the shard axis and copied over the replicate axis (hybrid sharding).  Experts that ranks share out
are units, too, cut over those of the shard axis that have the same ones.  Masters are the
sharded fp32 weights; a lower compute precision is a cast at gather time, gradients are reduced in `gradient_dtype`.

Native traps closed here (torch 2.11–2.13):
- the default averaging raises or misbehaves on Gloo once a divide factor is set: sums are forced and the engine
  divides;
- a weight tied between stages is kept out of `fully_shard`: both together under the V-shaped schedules give silently
  wrong gradients; it goes to the buckets instead;
- weights that were left gathered (after an evaluation, say) go stale when the masters change: they are dropped then;
- a parameter that only some data ranks used (a layer for some samples) makes their reduce-scatters differ in size,
  which kills the process: the others send zeros, and who used what is counted here, because gradients no longer tell;
- gathers are collectives, so data ranks with unequal numbers of microbatches hang: there, and under a pipeline,
  weights are gathered once and held until the step's last backward;
- so are reductions: they are made in the step's last microbatches, as many as the data rank with the fewest has.
  Copies of hybrid sharding are summed in the last one only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as CutDim
from torch.utils._pytree import tree_map

from weft.comm.mesh import GroupView, Mesh
from weft.comm.reduce import start_all_reduce
from weft.comm.untraced import untraced
from weft.model.blueprint import Blueprint
from weft.model.derivatives import is_differentiated
from weft.model.stored import StoredTensor, stored_tensors
from weft.techniques.buckets.bucket_state import BucketMember
from weft.techniques.buckets.settings import BucketSettings
from weft.techniques.core._layout import NestedSplit, ParameterLayout, Split
from weft.techniques.core._part import ModelPart
from weft.techniques.core._shard import CheckpointShard, Segment, Shard, first_element
from weft.techniques.core.block_paths import note_gathers
from weft.techniques.core.materialise import by_owner, draw
from weft.techniques.core.stored import InMemory, read_local
from weft.techniques.core.views import no_view
from weft.techniques.zero.shard_dims import dim_of_shards
from weft.techniques.zero.shared_buffers import share_buffers

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CodecSpec
    from weft.techniques.compression.replicas import ReplicaSums
    from weft.techniques.runtime import TechniqueRuntime

_ShardAxis = Literal["shard", "expert_shard"]


def apply_zero3(
    part: ModelPart,
    mesh: Mesh,
    *,
    blocks: Sequence[str],
    ignored: set[nn.Parameter],
    compute_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    hold: bool,
    sum_replicas: bool = True,
    techniques: Sequence[TechniqueRuntime] = (),
) -> None:
    """Shard the part's module in place.  Call on every rank; the module must be materialised in its master dtype.

    With `hold` a block's weights, once gathered, stay until the part's last backward.  Without `sum_replicas` gradients
    are summed over the shard axis only, and `ReplicaSums` sums them over the replicate axis.  A technique may keep
    shards and their gradients in the host's memory (`offload_policy`).
    """
    copies = ("replicate",) if mesh.size("replicate") > 1 and sum_replicas else ()
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=gradient_dtype, cast_forward_inputs=False)
    cuts = {weight: cut for name, weight in part.module.named_parameters() if (cut := cut_of(part.layout[name], mesh))}
    returned = _Returned(weakref.ref(part.module))
    # Inner units first: `fully_shard` takes the parameters that no inner unit has taken, so the root, which comes last,
    # gets those outside of the blocks.
    for unit, over in _units(part, blocks, cuts):
        unit.register_forward_hook(returned)
        fully_shard(
            unit,
            mesh=mesh.device_mesh(*copies, over),
            mp_policy=policy,
            # The root's weights (embedding, head) are needed again as soon as backward begins: dropping them between
            # would gather them twice for nothing.
            reshard_after_forward=not hold and unit is not part.module,
            shard_placement_fn=lambda parameter: CutDim(cuts[parameter].dim) if parameter in cuts else None,
            ignored_params=ignored,
            offload_policy=_offload_policy(techniques) or OffloadPolicy(),
        )
        assert isinstance(unit, FSDPModule)
        # Sums, not means: the engine divides by the global count, which no rank knows during backward.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # not in the oldest torch that Weft takes
            unit.set_reduce_scatter_unused_params(True)
        share_buffers(unit, mesh[over])
        # Experts are units inside of a block's unit.  Gathering them together with the block lets them travel while the
        # attention before them computes.  In backward `fully_shard` prefetches units by itself, last forward first.
        if unit is not part.module:
            inside: list[FSDPModule] = [weight for child in unit.children() for weight in _sharded_within(child)]
            unit.set_modules_to_forward_prefetch(inside)
    note_gathers(part.context, part.module, blocks, mesh, hold=hold)


@dataclass(frozen=True, slots=True)
class ShardCut:
    """How ZeRO-3 cuts a rank's part of a parameter."""

    over: _ShardAxis
    """Name of the mesh's group whose ranks each keep a shard."""
    view: GroupView
    """The group's ranks, and this rank's index among them."""
    dim: int
    """Dimension of the local parameter along which shards lie."""

    def place(self, layout: ParameterLayout, shape: torch.Size) -> tuple[ParameterLayout, int]:
        """Return where a rank's shard lies in the full parameter, whose local part has this shape.

        The result is a layout, and the first element of the run that the shard is in it.  Rows are a run of the local
        part as it is; columns are so only after one more split of the layout.
        """
        if self.dim == 0:
            return layout, first_element(shape, self.view)
        return replace(layout, inner=Split(dim=self.dim, parts=self.view.size, index=self.view.index)), 0


def cut_of(layout: ParameterLayout, mesh: Mesh) -> ShardCut | None:
    """Return how ZeRO-3 shards a parameter; None: it stays unsharded, as one without rows (a learned scale) does."""
    view, is_expert = layout.sharding(mesh), "expert" in layout.split_axes
    over = "expert_shard" if is_expert else "shard"
    if view.group is None or view != mesh[over]:
        return None
    dim = dim_of_shards(layout.split.local_shape(layout.shape), view.size, is_expert=is_expert)
    return None if dim is None else ShardCut(over, view, dim)


def _units(
    part: ModelPart, blocks: Sequence[str], cuts: Mapping[nn.Parameter, ShardCut]
) -> Iterator[tuple[nn.Module, _ShardAxis]]:
    """Yield the modules whose own weights are gathered at once, inner ones first, with the group of each."""
    for module in part.module.modules():
        own = [cuts[parameter] for parameter in module.parameters(recurse=False) if parameter in cuts]
        if any(cut.over == "expert_shard" for cut in own):
            yield module, "expert_shard"
    present = dict(part.module.named_modules())
    for name in blocks:
        if name in present and any(True for _ in present[name].parameters()):
            yield present[name], "shard"
    yield part.module, "shard"


def _sharded_within(module: nn.Module) -> Iterator[FSDPModule]:
    return (inner for inner in module.modules() if isinstance(inner, FSDPModule))


def fill_shards(
    part: ModelPart,
    blueprint: Blueprint,
    mesh: Mesh,
    seed: int,
    techniques: Sequence[TechniqueRuntime] = (),
) -> None:
    """Give the shards of parameters that were cut without storage (`materialise`, `later`) their initial values.

    A technique's `on_sharded` may give the shards storage first, or other storage.  It may return a function, which is
    called after each module whose shards were filled.
    """
    waiting = {name for name, parameter in part.module.named_parameters() if parameter.is_meta}
    filled = [called for technique in techniques if (called := technique.on_sharded(part)) is not None]
    if not waiting:
        return

    device = mesh.device if _offload_policy(techniques) is None else torch.device("cpu")

    # What `to_empty` does, for shards without storage alone: torch's own way to allocate them, padding included.
    def stored(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    # Module by module, so that parameters with storage are left alone.  Units come last: their `_apply` looks at all
    # shards of the unit, and these must have storage then.
    for module in sorted(part.module.modules(), key=lambda module: isinstance(module, FSDPModule)):
        if isinstance(module, FSDPModule) or any(own.is_meta for own in module.parameters(recurse=False)):
            module._apply(stored, recurse=False)  # pyright: ignore[reportPrivateUsage]
    rows: dict[str, _Rows] = {}
    for name, parameter in part.module.named_parameters():
        if name not in waiting:
            continue
        assert isinstance(parameter, DTensor), f"{name} has no storage and was not sharded"
        cut, local = cut_of(part.layout[name], mesh), parameter.to_local().detach()
        assert cut is not None, f"{name} was not to be sharded"
        layout, start = cut.place(part.layout[name], parameter.shape)
        rows[layout.name] = _Rows(local, layout.split, start // max(parameter.shape[1:].numel(), 1))
    _fill_rows(rows, blueprint, seed, filled)


def _offload_policy(techniques: Sequence[TechniqueRuntime]) -> OffloadPolicy | None:
    return next((policy for technique in techniques if (policy := technique.offload_policy()) is not None), None)


def _fill_rows(
    rows: Mapping[str, _Rows], blueprint: Blueprint, seed: int, filled: Sequence[Callable[[], None]]
) -> None:
    """Fill shards by their parameter's name in the full model, with the values that `materialise` would draw.

    At most one module's own tensors exist unsharded at a time.
    """
    stored = stored_tensors(blueprint.initialise)
    for name in rows.keys() & stored.keys():
        rows[name].fill(stored[name])
    # Values are drawn for the full parameter on every rank and then sliced: initial weights do not depend on the plan.
    for owner, names in by_owner({name: name for name in rows if name not in stored}).items():
        drawn = draw(blueprint, owner, seed)
        for name, leaf in names:
            rows[name].fill(InMemory(drawn[leaf]))
        for called in filled:
            called()


@dataclass(frozen=True, slots=True)
class _Rows:
    """A shard of this rank's part of a parameter, with storage to fill."""

    target: Tensor
    """The shard, (rows, …)."""
    split: NestedSplit
    """The cuts that lead from the full parameter to the local part."""
    first: int
    """First row of the shard in the local part."""

    def fill(self, source: StoredTensor) -> None:
        read_local(self.target, source, self.split, self.first)


@untraced
@dataclass(frozen=True, slots=True)
class _Returned:
    """A hook behind the forward of a unit: makes its outputs tensors that are no views.

    `fully_shard` hooks the gradients of a unit's outputs.  Of a view it warns, because a change in place would lose
    these hooks.  Models return slices, and hand on their own inputs.
    """

    whole: weakref.ref[nn.Module]

    def __call__(self, unit: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(self._convert, output)

    def _convert(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        returned = no_view(leaf)
        if returned.requires_grad:
            returned.register_hook(self._hold_for_another)
        return returned

    def _hold_for_another(self, gradient: Tensor) -> None:
        """Keep the weights after a backward that will be differentiated (a penalty on gradients).

        The next backward starts behind the forwards whose hooks would gather the weights again.
        """
        whole = self.whole()
        if is_differentiated() and isinstance(whole, FSDPModule):
            whole.set_reshard_after_backward(False)  # until `on_backward` says again what the step's own one does


@dataclass(frozen=True, slots=True)
class _Used:
    """Tells the reducer that backward reached a parameter.  Weak, as `GradientHook` is."""

    store: weakref.ref[FullyShardedReducer]
    name: str

    def __call__(self, gathered: Tensor) -> None:
        store = self.store()
        if store is not None:
            store.used.add(self.name)


class FullyShardedReducer:
    """The gradients that `fully_shard` reduces, as shards.

    `members` are the parameters before sharding, by (index of the part, name in the part).  With `compression` the sum
    over the replicate axis is made here, in storages of `storage_bytes`, and `apply_zero3` must leave it out.
    Gradients are reduced in the last `reduce_rounds` microbatches of a step (`reduction_rounds`); those of earlier
    microbatches stay unsharded until then.
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        members: Mapping[tuple[int, str], BucketMember],
        mesh: Mesh,
        *,
        hold: bool,
        reduce_rounds: int = 1,
        compression: CodecSpec | None = None,
        storage_bytes: int = BucketSettings().bucket_limits[1],
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._parts = tuple(parts)
        self._hold = hold
        self._reduce_rounds = reduce_rounds
        self._mesh = mesh
        self.used: set[str] = set()
        """Names of the parameters that this rank's step has reached."""
        self._watching = False
        # Layouts, not members: a member's parameter is the whole one from before the cut, and would keep it alive.
        self._entries: list[tuple[DTensor, ParameterLayout, Shard]] = []
        self._incomplete: list[tuple[Shard, tuple[GroupView, ...]]] = []
        """Shards whose gradients `fully_shard` sums in part, and the groups over which they are summed on."""
        for index, part in enumerate(parts):
            for name, parameter in part.module.named_parameters():
                member = members.get((index, name))
                if member is not None:
                    assert isinstance(parameter, DTensor), f"{name} was not sharded"
                    shard = self._create_shard(parameter, member)
                    self._entries.append((parameter, member.layout, shard))
                    self._incomplete += [(shard, member.completing)] if member.completing else []
        self._replicas: ReplicaSums | None = None
        if compression is not None:
            from weft.techniques.compression.replicas import ReplicaSums  # codecs are loaded where one is used

            shards = self.shards
            self._replicas = ReplicaSums(
                shards, [m for _, m, _ in self._entries], mesh, compression, storage_bytes, gradient_dtype
            )

    def _watch_parameters(self) -> None:
        """Hook the gathered parameters, once: the first gather of a unit creates them, and they stay.  Collective."""
        self.release()  # an evaluation before the first step leaves the root's gathered, which have other names
        names = {id(parameter): layout.name for parameter, layout, _ in self._entries}
        for module in (part.module for part in self._parts):
            for prefix, unit in module.named_modules():
                if not isinstance(unit, FSDPModule):
                    continue
                inside = module.get_submodule(prefix)
                sharded = dict(inside.named_parameters())
                unit.unshard()
                for local, parameter in inside.named_parameters():
                    name = names.get(id(sharded[local]))
                    if name is not None and not isinstance(parameter, DTensor):  # not another unit's
                        required = parameter.requires_grad
                        parameter.requires_grad_()  # a frozen one takes no hook, and may be thawed later
                        parameter.register_post_accumulate_grad_hook(_Used(weakref.ref(self), name))
                        parameter.requires_grad_(required)
                unit.reshard()
                for shard in self.shards:
                    if shard.rest is not None:
                        shard.rest()
        self._watching = True

    def _create_shard(self, parameter: DTensor, member: BucketMember) -> Shard:
        local, cut = _local(parameter), cut_of(member.layout, self._mesh)
        assert cut is not None, f"{member.layout.name} was not to be sharded"
        layout, start = cut.place(member.layout, parameter.shape)
        shape = local.shape if layout.inner else parameter.shape
        segment = Segment(layout=layout, local_shape=shape, offset=0, start=start, length=local.numel())
        return Shard(
            master=local.view(-1),
            segments=[segment] if local.numel() else [],
            group=member.group,
            counts=member.counts and member.layout.replicating(self._mesh).index == 0,
            cut_group=cut.view,
            cut_matrices={member.layout.name: parameter.shape[1]} if parameter.ndim == 2 and len(parameter) > 1 else {},
        )

    @property
    def shards(self) -> Sequence[Shard]:
        return [shard for _, _, shard in self._entries]

    def begin_step(self) -> None:
        if not self._watching:
            self._watch_parameters()
        for parameter, _, shard in self._entries:
            parameter.grad = None
            shard.gradient = None
        self.used.clear()
        if self._replicas is not None:
            self._replicas.begin_step()
        for part in range(len(self._parts)):
            self._set_sync(part, reduces=False, is_last=False)

    def _set_sync(self, part: int, *, reduces: bool, is_last: bool) -> None:
        """Say what the next backward of a part does.

        With `reduces` it reduces gradients over the shard axis.  With `is_last` it also sums them over the replicate
        axis, and drops weights that were held.
        """
        module = self._parts[part].module
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(reduces)
            module.set_requires_all_reduce(is_last)
            module.set_is_last_backward(reduces)
            module.set_reshard_after_backward(is_last or not self._hold)

    def on_backward(self, part: int, remaining: int) -> None:
        self._set_sync(part, reduces=remaining < self._reduce_rounds, is_last=remaining == 0)

    def on_last_forward(self, part: int) -> None:
        """Nothing to do: `on_backward` has said so."""

    def on_microbatch(self, remaining: int) -> None:
        """Nothing to do: `on_backward` says it, with and without a pipeline."""

    def on_last_backward(self, part: int) -> None:
        """Nothing to do: `fully_shard` reduces from its own backward hooks."""

    @property
    def takes_back(self) -> bool:
        return True

    def take_back(self) -> None:
        """Nothing to do: every backward's gradients are summed by themselves."""

    def finish(self) -> None:
        for parameter, _, shard in self._entries:
            gradient = parameter.grad
            if gradient is None:
                shard.gradient = torch.zeros_like(shard.master)
                continue
            assert isinstance(gradient, DTensor)
            shard.gradient = _local(gradient).reshape(-1)
        if self._replicas is not None:
            self._replicas.reduce()
        # Partial gradients (sequence-parallel norms, experts) and tied weights: one more sum, of the shards alone.
        for shard, views in self._incomplete:
            assert shard.gradient is not None
            summed = shard.gradient.to(self._mesh.device)  # offloaded shards: NCCL cannot read the host's memory
            for view in views:
                start_all_reduce(summed, view)()
            if summed is not shard.gradient:
                shard.gradient.copy_(summed)

    def on_applied(self, skipped: Collection[str]) -> None:
        if self._replicas is not None:
            self._replicas.on_applied(skipped)

    def checkpoint_shards(self) -> list[CheckpointShard]:
        return self._replicas.checkpoint_shards() if self._replicas is not None else []

    def start_weight_gather(self) -> None:
        """Nothing to gather: the masters are the sharded parameters, which the next gather reads."""
        self.release()

    def wait_weights(self) -> None:
        """Nothing to wait for: gathers belong to forwards."""

    def release(self) -> None:
        for part in self._parts:
            for module in part.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def names(self) -> frozenset[str]:
        return frozenset(layout.name for _, layout, _ in self._entries)

    def unused(self) -> frozenset[str]:
        return self.names() - self.used

    def model_state_bytes(self) -> dict[str, int]:
        size = sum(shard.master.numel() * shard.master.element_size() for shard in self.shards)
        gradients = sum(
            0 if shard.gradient is None else shard.gradient.numel() * shard.gradient.element_size()
            for shard in self.shards
        )
        residuals = self._replicas.state_bytes() if self._replicas is not None else 0
        return {"parameters": size, "gradients": gradients, "masters": 0, "residuals": residuals}

    def close(self) -> None:
        """End the watch over forward paths.  Torch's own hooks are part of the sharded modules, and stay."""
        for part in self._parts:
            if part.context.block_path is not None:
                part.context.block_path.close()


def _local(tensor: DTensor) -> Tensor:
    """Return this rank's shard, contiguous and detached: autograd forbids in-place updates of views."""
    local = tensor.to_local().detach()
    return local.contiguous() if not local.is_contiguous() else local
