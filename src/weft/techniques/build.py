"""The whole composition on one screen: a blueprint and a plan become this rank's model parts, runner and stores.

The order is fixed.  Stages first, because everything after works on a stage's own modules; cuts over the tensor axis
while the model has no storage; then storage and initial weights; then what wraps forwards (recomputation,
compilation); last what owns weights and gradients (ZeRO).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config.plan import BATCH_AXES, Plan
from weft.model.blueprint import Batch, Blueprint, Loss
from weft.techniques.buckets.bucket_state import BucketMember
from weft.techniques.core._context import StepContext
from weft.techniques.core._layout import ParameterLayout
from weft.techniques.core._part import ModelPart, fill_layout, first_names, whole_part
from weft.techniques.core._reducer import GradientReducer, ReducerSet
from weft.techniques.core._runner import Runner, SequentialRunner
from weft.techniques.core._sparse_tables import sparse_tables
from weft.techniques.core.materialise import materialise
from weft.techniques.core.precision import NARROW, Dtypes
from weft.techniques.data.gradient_reducer import BucketReducer
from weft.techniques.randomness.draws import Draws, apply_keyed_draws, draws_of, is_alone, keyed_loss
from weft.techniques.randomness.keyed_dropout import apply_keyed_dropout
from weft.techniques.registry import running
from weft.techniques.runtime import Build, TechniqueRuntime
from weft.techniques.zero.contract import reduction_rounds

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CodecSpec
    from weft.techniques.core.routing import RouterWatch
    from weft.techniques.data.find_whole_batch import WholeBatch

GroupParameters = Callable[[Mapping[str, torch.Size]], Mapping[str, int]]
"""Trainable parameters of this rank (name → whole shape) → index of each one's optimizer group."""


@dataclass(slots=True, kw_only=True)
class ParallelModel:
    """A model as one rank holds it under a plan."""

    blueprint: Blueprint
    plan: Plan
    mesh: Mesh
    dtypes: Dtypes
    parts: Sequence[ModelPart]
    """One, or one per chunk under a pipeline with several stages per rank."""
    runner: Runner
    stores: ReducerSet
    summing: Mesh
    """The mesh over whose data ranks the gradients of a step are summed."""
    techniques: Sequence[TechniqueRuntime]
    """The runtimes of the plan's techniques, in the order of the registry."""
    routing: RouterWatch | None = None
    """Counts the loads of a mixture's routers; None: there are none."""

    def held_fields(self, batch: Batch) -> Batch:
        """Return the fields of a batch for the tokens that this rank has, where ranks share a sequence."""
        sequence_shard = self.parts[0].context.sequence_shard
        return batch if sequence_shard is None else sequence_shard.cut_batch(batch)[0]

    def take_rows(self) -> tuple[tuple[str, int, int], ...]:
        """Return (name, number of the exchange, rows) of the sends since the last call whose size depends on data.

        The name is that of a sparse table or of a mixture of experts.
        """
        # Those of tables with sparse gradients know how many rows travelled.
        tables: list[Mapping[tuple[str, int], int]] = [getattr(store, "most_rows", {}) for store in self.stores.stores]
        brought = ((*key, most) for most_rows in tables for key, most in most_rows.items())
        return (*brought, *(row for technique in self.techniques for row in technique.take_rows()))

    @property
    def module(self) -> nn.Module:
        """The user's model; only without a pipeline is it the whole of it."""
        return self.parts[0].module


def parallelize(
    blueprint: Blueprint,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    group_parameters: GroupParameters,
    cuts: Literal["anywhere", "parameter"] = "anywhere",
    momentum_decay: float | None = None,
    gathers_ahead: bool = False,
    num_steps: int | None = None,
    folder: Path | None = None,
    draws: Draws | None = None,
) -> ParallelModel:
    """Build this rank's share of the model.  Call on every rank with equal arguments; the plan must have been checked.

    `cuts` says where the optimizer lets data parallelism cut its shards.  `momentum_decay` is the optimizer's, where
    it is an AdamW that can freeze its variance, which 1-bit Adam needs.  `gathers_ahead`: nobody but the runner reads
    weights between two steps, so that they may be gathered behind the next forward.  `num_steps` are those of the whole
    training, where it is known; `folder` is where the run keeps its files, if there is a run.  `draws` are what
    `draws_of` says of the same blueprint and plan, where it was asked before.

    Raises:
        PlanError: techniques that do not fit this model or optimizer.
    """
    dtypes = Dtypes.of(plan)
    draws = draws or draws_of(blueprint, plan)
    context = StepContext(is_alone=is_alone(plan), unseen=draws.unseen)
    loss, watch_weights = _without_weights(keyed_loss(blueprint.loss, draws, mesh, context), plan)
    blueprint = replace(blueprint, loss=loss)
    build = Build(
        whole_batch=_whole_batch_of(blueprint, mesh),
        blueprint=blueprint,
        plan=plan,
        mesh=mesh,
        dtypes=dtypes,
        context=context,
        draws=draws,
        seed=seed,
        momentum_decay=momentum_decay,
        num_steps=num_steps,
        folder=folder,
    )
    techniques = techniques_of(build)
    summing = mesh
    for technique in techniques:
        summing = technique.gradient_mesh(summing)
    parts = _create_parts(build, techniques)
    for part in parts:
        # Splits come before storage: a part is materialised in its local shapes, so no rank holds the full model.
        for technique in techniques:
            technique.split(part)
        _share_statistics(part, blueprint, summing, dtypes)
        _key_draws(part, build)
        materialise(
            part.module,
            blueprint,
            part.layout,
            seed,
            mesh.device,
            dtypes.master,
            frozen_dtype=dtypes.master if _shards_weights(plan, summing) else dtypes.compute,
            later=_filled_in_shards(part, blueprint, plan, summing),
        )
    _tie_and_wrap(parts, techniques, plan)
    codec = next((codec for one in techniques if (codec := one.codec()) is not None), None)
    stores = _create_reducers(build, techniques, summing, parts, group_parameters, cuts, codec)
    watch_weights(parts)
    if gathers_ahead:
        _gather_ahead(stores, blueprint, parts)
    for technique in techniques:
        technique.attach_shards(stores.shards)
    return ParallelModel(
        blueprint=blueprint,
        plan=plan,
        mesh=mesh,
        dtypes=dtypes,
        parts=parts,
        runner=_create_runner(build, techniques, parts, summing),
        stores=stores,
        summing=summing,
        techniques=techniques,
        routing=_watch_routers(parts, blueprint, mesh),
    )


def _without_weights(loss: Loss, plan: Plan) -> tuple[Loss, Callable[[Sequence[ModelPart]], None]]:
    """Return a loss that is refused where it reads a weight of which ranks hold parts, and what tells it these."""
    if plan.mesh.tensor == plan.mesh.expert == 1 and not plan.data_parallel.shards_weights:
        return loss, lambda parts: None
    from weft.techniques.tensor.weight_reads import LossWithoutWeights  # loaded where ranks hold parts of weights

    made = LossWithoutWeights(loss)
    return made, made.watch


def _run_encoders(parts: Sequence[ModelPart], plan: Plan) -> None:
    """Let torch's encoders run on what a rank holds of them."""
    if plan.mesh.tensor > 1 or plan.mesh.pipeline > 1:
        from weft.techniques.tensor.padded_encoders import (
            run_encoders_by_layers,  # loaded where ranks hold parts of a model
        )

        for part in parts:
            run_encoders_by_layers(part.module)


def _tie_and_wrap(parts: Sequence[ModelPart], techniques: Sequence[TechniqueRuntime], plan: Plan) -> None:
    for technique in techniques:
        technique.tie_parts(parts)
        for part in parts:
            technique.wrap(part)
    _run_encoders(parts, plan)


def _key_draws(part: ModelPart, build: Build) -> None:
    """Let everything that a part draws depend on samples and layers alone."""
    apply_keyed_dropout(
        part.module,
        build.blueprint,
        build.mesh,
        build.context,
        sequence=part.shares_sequence,
        keyed=build.draws.modules,
        grid=part.grid,
    )
    apply_keyed_draws(part.module, build.draws, build.mesh["tensor"], build.context)


def _watch_routers(parts: Sequence[ModelPart], blueprint: Blueprint, mesh: Mesh) -> RouterWatch | None:
    if blueprint.routers is None:
        return None
    from weft.techniques.core.routing import RouterWatch  # loaded where there are mixtures

    return RouterWatch(parts, blueprint, mesh)


def _share_statistics(part: ModelPart, blueprint: Blueprint, summing: Mesh, dtypes: Dtypes) -> None:
    """Let batch norms take the statistics of all data ranks."""
    if blueprint.has_batch_norm:
        from weft.techniques.data.batch_norm import apply_batch_norm  # loaded where there are such norms

        apply_batch_norm(part.module, summing, is_narrow=dtypes.compute != dtypes.master)


def _whole_batch_of(blueprint: Blueprint, mesh: Mesh) -> WholeBatch | None:
    if blueprint.per_sample_loss or mesh.group_over(BATCH_AXES).group is None:
        return None
    from weft.techniques.data.find_whole_batch import find_whole_batch  # loaded where a loss sees the whole batch

    return find_whole_batch(blueprint)


def _create_parts(build: Build, techniques: Sequence[TechniqueRuntime]) -> list[ModelPart]:
    """Return this rank's parts of the model, without storage, with layouts that nothing has split yet."""
    stages = next((stages for technique in techniques if (stages := technique.parts()) is not None), None)
    parts = stages if stages is not None else [whole_part(build.blueprint, build.context)]
    whole = first_names(build.blueprint.module)
    for part in parts:
        fill_layout(part.layout, part.module, first_names(part.module) | whole, {})
    return parts


def _create_runner(
    build: Build, techniques: Sequence[TechniqueRuntime], parts: Sequence[ModelPart], summing: Mesh
) -> Runner:
    runner = next((runner for technique in techniques if (runner := technique.runner(parts)) is not None), None)
    if build.whole_batch is not None:
        from weft.techniques.data.whole_batch import whole_batch_runner  # as above

        return whole_batch_runner(build, parts[0], build.whole_batch)
    if getattr(build.blueprint.loss, "auxiliary", None):
        from weft.techniques.data.auxiliary import auxiliary_runner  # loaded where a loss has such terms

        return auxiliary_runner(build, parts, summing, runner)
    return runner or SequentialRunner(parts[0], build.blueprint, build.mesh, dtype=build.dtypes.compute)


def _shards_weights(plan: Plan, mesh: Mesh) -> bool:
    return plan.data_parallel.shards_weights and mesh.size("shard") > 1


def _filled_in_shards(part: ModelPart, blueprint: Blueprint, plan: Plan, mesh: Mesh) -> set[str]:
    """Return the parameters that get storage only as ZeRO-3 shards, so that no rank ever holds them in full."""
    if blueprint.initialise is None or not _shards_weights(plan, mesh):
        return set()
    from weft.techniques.zero.sharded_weights import cut_of  # as below

    names = Counter(first_names(part.module).values())
    tables = sparse_tables(blueprint.module)
    return {
        name
        for name, parameter in part.module.named_parameters()
        if names[name] == 1 and parameter.is_floating_point() and part.layout[name].name not in tables
        if not part.layout[name].tied and cut_of(part.layout[name], mesh) is not None
    }


def techniques_of(build: Build) -> tuple[TechniqueRuntime, ...]:
    """Create what a plan's techniques do on this rank, in the order of the registry."""
    return tuple(import_module(name).create(build) for name in running(build.plan))


def _create_reducers(
    build: Build,
    techniques: Sequence[TechniqueRuntime],
    mesh: Mesh,
    parts: Sequence[ModelPart],
    group_parameters: GroupParameters,
    cuts: Literal["anywhere", "parameter"],
    compression: CodecSpec | None,
) -> ReducerSet:
    """Create the reducers of all that is trained.  `mesh` is the one over whose data ranks gradients are summed."""
    blueprint, plan, dtypes = build.blueprint, build.plan, build.dtypes
    every = _members(parts, mesh, group_parameters)
    sparse = sparse_tables(blueprint.module)
    tables = {key: member for key, member in every.items() if member.layout.name in sparse}
    members = {key: member for key, member in every.items() if key not in tables}
    shards_weights = _shards_weights(plan, mesh)
    stores: list[GradientReducer] = []
    if shards_weights:
        from weft.techniques.zero import sharded_weights as zero3  # loaded where weights are cut

        kept_out = tables.keys() | {
            key
            for key, parameter in members.items()
            if key[1] in parts[key[0]].ties
            or zero3.cut_of(parameter.layout, mesh) is None
            or parameter.parameter.dtype != dtypes.master
        }
        sharded = {key: member for key, member in members.items() if key not in kept_out}
        frozen = _cast_frozen(
            parts, dtypes, lambda layout, dtype: zero3.cut_of(layout, mesh) is None or dtype != dtypes.master
        )
        empty = {parameter for part in parts for parameter in part.module.parameters() if not parameter.numel()}
        blocks = [] if blueprint.cut is None else [b for b in blueprint.cut.blocks if b not in blueprint.sometimes]
        for part in parts:
            zero3.apply_zero3(
                part,
                mesh,
                blocks=blocks,
                ignored={member.parameter for key, member in every.items() if key in kept_out}.union(frozen, empty),
                compute_dtype=dtypes.compute,
                gradient_dtype=dtypes.gradient,
                hold=_holds_weights(plan),
                sum_replicas=compression is None,
                techniques=techniques,
            )
            zero3.fill_shards(part, blueprint, mesh, build.seed, techniques)
        stores.append(
            zero3.FullyShardedReducer(
                parts,
                sharded,
                mesh,
                hold=_holds_weights(plan),
                reduce_rounds=reduction_rounds(plan),
                compression=compression,
                storage_bytes=plan.data_parallel.bucket_limits[1],
                gradient_dtype=dtypes.gradient,
            )
        )
        members = {key: member for key, member in members.items() if key in kept_out}
    if tables:
        from weft.techniques.data.sparse import SparseReducer  # loaded where there are such tables

        stores.append(
            SparseReducer(list(tables.values()), compute_dtype=dtypes.compute, gradient_dtype=dtypes.gradient)
        )
    if members or not stores:
        stores.append(_bucket_store(list(members.values()), plan, mesh, dtypes, cuts, compression))
    if not shards_weights:
        _cast_frozen(parts, dtypes)
    return ReducerSet(stores)


def _gather_ahead(stores: ReducerSet, blueprint: Blueprint, parts: Sequence[ModelPart]) -> None:
    """Let buckets gather behind forwards, where a table says what the blocks are.  Not where anything is compiled:
    hooks would be compiled with it."""
    modules = [part.module for part in parts]
    compiled = any(
        getattr(inner, "_compiled_call_impl", None) is not None for module in modules for inner in module.modules()
    )
    if blueprint.cut is None or compiled:
        return
    for store in stores.stores:
        if isinstance(store, BucketReducer):
            store.gather_ahead(modules, blueprint.cut.blocks)


def _holds_weights(plan: Plan) -> bool:
    """Whether ZeRO-3 gathers weights once per step, because data ranks would not gather equally often otherwise
    (unequal shares), or because a pipeline's stages would gather them anew for every microbatch."""
    return plan.mesh.pipeline > 1 or len(set(plan.microbatch.shares(plan.mesh.data))) > 1


def _bucket_store(
    members: list[BucketMember],
    plan: Plan,
    mesh: Mesh,
    dtypes: Dtypes,
    cuts: Literal["anywhere", "parameter"],
    compression: CodecSpec | None,
) -> BucketReducer:
    """Buckets for everything, or for what ZeRO-3 leaves out; ZeRO-3 over one shard is ZeRO-1 over the replicas."""
    data = plan.data_parallel
    return BucketReducer(
        members,
        mesh,
        stage=data.bucket_stage,
        compute_dtype=dtypes.compute,
        gradient_dtype=dtypes.gradient,
        cuts=cuts,
        bucket_limits=data.bucket_limits,
        reduce_rounds=reduction_rounds(plan) if data.shards_gradients_alone else 1,
        compression=compression,
        algorithm=data.algorithm,
    )


def _members(
    parts: Sequence[ModelPart], mesh: Mesh, group_parameters: GroupParameters
) -> dict[tuple[int, str], BucketMember]:
    """Every trainable parameter of this rank once, by the first part and name under which it is found.  One without
    elements has nothing to train."""
    trained: dict[tuple[int, str], nn.Parameter] = {}
    seen: set[int] = set()
    for index, part in enumerate(parts):
        for name, parameter in part.module.named_parameters():
            if parameter.requires_grad and parameter.numel() and id(parameter) not in seen:
                seen.add(id(parameter))
                trained[index, name] = parameter
    layouts = {key: parts[key[0]].layout[key[1]] for key in trained}
    groups = group_parameters({layout.name: layout.shape for layout in layouts.values()})
    members: dict[tuple[int, str], BucketMember] = {}
    for (index, name), parameter in trained.items():
        tie = parts[index].ties.get(name)
        members[index, name] = BucketMember(
            mesh=mesh,
            parameter=parameter,
            layout=layouts[index, name],
            part=index,
            group=groups[layouts[index, name].name],
            tie=tie if tie is not None and tie.group is not None else None,
        )
    return members


def _cast_frozen(
    parts: Sequence[ModelPart],
    dtypes: Dtypes,
    chosen: Callable[[ParameterLayout, torch.dtype], bool] = lambda layout, dtype: True,
) -> list[nn.Parameter]:
    """Frozen parameters need no master: in bf16 and fp16 they are held in the compute dtype.  Returns those that were
    chosen by layout and dtype."""
    parameters = [(part.layout[name], weight) for part in parts for name, weight in part.module.named_parameters()]
    frozen = [weight for layout, weight in parameters if not weight.requires_grad and chosen(layout, weight.dtype)]
    for parameter in frozen:
        if parameter.is_floating_point() and dtypes.compute in NARROW:
            parameter.data = parameter.data.to(dtypes.compute)
    return frozen
