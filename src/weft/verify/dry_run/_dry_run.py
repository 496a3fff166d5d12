"""Build one rank of any world on fake tensors and let it take one step: what it holds, and what it would send."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # pyright: ignore[reportPrivateImportUsage]

from weft.comm.fake import fake_world
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Axis, Plan, axis_coordinates
from weft.config.recipe import Recipe
from weft.model.blueprint import Batch, Blueprint
from weft.model.samples import place_prompt
from weft.run.engine import TrainingState, create_training
from weft.techniques.pipeline.runner import PipelineRunner
from weft.techniques.randomness.draws import Draws, draws_of
from weft.techniques.zero.contract import reduction_rounds
from weft.verify.dry_run._collective_recorder import CollectiveRecorder, Copies, IssuedCollective
from weft.verify.dry_run.trace_sends import trace_sends_or_reason
from weft.verify.program import differences, occasions_of, program_of

_FEW = 4
"""Largest number of schedule patterns that one dry run covers whole: beyond it two short dry runs are faster."""
ActivationShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that a rank holds between steps, exactly, padding included."""

    weights: int
    """Parameters in the compute precision; under fp32 they are the masters as well."""
    gradients: int
    masters: int
    """fp32 copies under bf16 and fp16."""
    optimizer: int
    buffers: int
    residuals: int = 0
    """Residuals and bases of compressed gradients."""
    techniques: int = 0
    """Other state of the plan's techniques, such as the anchor and outer momentum of local steps."""

    @property
    def total(self) -> int:
        exact = self.weights + self.gradients + self.masters + self.optimizer + self.buffers
        return exact + self.residuals + self.techniques


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The dry run of one rank."""

    rank: int
    coordinates: Mapping[Axis, int]
    state: StateBytes
    issued: tuple[IssuedCollective, ...]
    """Collectives in order, of one step with `num_microbatches_run` microbatches."""
    num_microbatches_run: int
    step_traffic: Mapping[tuple[str, str], tuple[float, float]]
    """(axis, operation) → (count, bytes) of a whole step of the plan."""
    activation: ActivationShape | None
    """Shape and dtype of the activation between stages; None without a pipeline."""
    notes: tuple[str, ...]

    unlike_predicted: tuple[str, ...] = ()
    """Differences between the sends of this step and the rank's predicted program; empty: they are equal."""
    unpredicted: tuple[str, ...] = ()
    """Reasons why no program of this model can be predicted; then `unlike_predicted` stays empty."""


def dry_run_rank(
    recipe: Recipe,
    plan: Plan,
    build: Callable[[], Blueprint],
    rank: int = 0,
    *,
    activation: ActivationShape | None = None,
    draws: Draws | None = None,
) -> RankReport:
    """Let `rank` of the plan's world build its share and take a step.  Not collective; needs no devices.

    The process must have joined no group.  Collectives are those of a backend with reduce-scatter and all-gather
    (NCCL); on Gloo Weft sends direct messages of the same bytes instead.  A long step is run twice with few
    microbatches, and what each further one adds is added up: every action of a schedule issues the same collectives
    wherever it stands.

    Args:
        build: the blueprint; called in here, outside of fake tensors.
        activation: shape and dtype of what earlier stages send, from the report of a rank of the first stage.  Ranks of
            later stages need it, because nothing arrives that would tell.
        draws: of `find_draws`, which are the same of all ranks.

    Raises:
        PlanError: what building the plan's rank refuses.
    """
    whole, few, counts = microbatch_counts(plan, rank)
    # Two short runs give a line through (count, bytes), on which the whole step lies: they cost 3 × `few` microbatches
    # instead of `whole`, so they pay only where the step is clearly longer than that.
    counts = counts if whole > _FEW * few else (whole,)
    # All ranks of a plan draw alike, so a caller that looks at several finds the draws once.
    draws = draws or find_draws(plan, build)
    runs = [_run(recipe, plan, build, rank, count, activation, draws) for count in counts]
    totals = [_totals(run.issued) for run in runs]
    step_traffic = totals[0]
    if len(runs) > 1:
        further = whole / few - 1
        step_traffic = {key: _extend(totals[0].get(key, (0.0, 0.0)), totals[1][key], further) for key in totals[1]}
    return _compared(replace(runs[-1], step_traffic=step_traffic), recipe, plan, build())


def find_draws(plan: Plan, build: Callable[[], Blueprint]) -> Draws:
    """Return what ranks of the plan draw by functions.  Fake tensors would make its forwards many times slower.

    Raises:
        PlanError: draws that cannot be keyed.
    """
    with fake_world(0, plan.mesh.world_size):
        return draws_of(build(), _on_cpu(plan))


def _on_cpu(plan: Plan) -> Plan:
    return replace(plan, compute=replace(plan.compute, compile=False, device="cpu"))


def _compared(report: RankReport, recipe: Recipe, plan: Plan, blueprint: Blueprint) -> RankReport:
    """Hold a report against the predicted program of the step that it is of: a training's first, in which some
    parameter takes no part."""
    if blueprint.example is None:
        return report
    shares, index = plan.microbatch.shares(plan.mesh.data), _data_index(plan, report.rank)
    if report.num_microbatches_run != shares[index]:
        count = report.num_microbatches_run
        unequal = (*shares[:index], count, *shares[index + 1 :])  # the others still say how often all reduce
        per_step = unequal if plan.microbatch.has_unequal_shares else count
        plan = replace(plan, microbatch=replace(plan.microbatch, per_step=per_step))
    outline = trace_sends_or_reason(blueprint)
    if isinstance(outline, str):
        return replace(report, unpredicted=(outline,))
    occasions = occasions_of(recipe, plan, 0, is_first=True, some_unused=True)

    def predicted(plan: Plan) -> Counter[tuple[str, str, int]]:
        return program_of(recipe, plan, outline, report.rank, cuts_anywhere=False).traffic(*occasions)

    # The step ran without compilation, so it is held against the program of the uncompiled plan; what compiling saves
    # is the difference of two predictions.
    ran = predicted(_uncompiled(plan))
    fewer = sum((ran - predicted(plan)).values())
    notes = report.notes
    if fewer:
        notes += (f"compiled, the rank sends {fewer:,} collectives fewer, which its recomputation does not need",)
    seen = Counter((one.axis, one.op, one.size_bytes) for one in report.issued)
    return replace(report, unlike_predicted=tuple(differences(ran, seen)), notes=notes)


def _uncompiled(plan: Plan) -> Plan:
    """Return the plan as the dry run takes it."""
    return replace(plan, compute=replace(plan.compute, compile=False))


def microbatch_counts(plan: Plan, rank: int) -> tuple[int, int, tuple[int, ...]]:
    """Return a rank's microbatches per step, the fewest that show a schedule's pattern, and those of each dry run.

    The last number is also the most microbatches that are ever in flight.
    """
    shares = plan.microbatch.shares(plan.mesh.data)
    whole = max(shares[_data_index(plan, rank)], 1)
    few = plan.pipeline_parallel.pattern_microbatches(plan.mesh.pipeline)
    # With unequal shares only the last microbatches of some ranks reduce, so no two short steps would show the pattern.
    repeats = reduction_rounds(plan) == 1 or len(set(shares)) == 1
    return whole, few, (few, 2 * few) if repeats and whole > 2 * few and whole % few == 0 else (whole,)


def _extend(first: tuple[float, float], second: tuple[float, float], by: float) -> tuple[float, float]:
    """Continue the line through two steps' (count, bytes)."""
    return first[0] + (second[0] - first[0]) * by, first[1] + (second[1] - first[1]) * by


def _data_index(plan: Plan, rank: int) -> int:
    place = axis_coordinates(plan.mesh, rank)
    return place["replicate"] * plan.mesh.shard + place["shard"]


def _run(
    recipe: Recipe,
    plan: Plan,
    build: Callable[[], Blueprint],
    rank: int,
    microbatches: int,
    activation: ActivationShape | None,
    draws: Draws,
) -> RankReport:
    notes = ["compile was left out"] if plan.compute.compile else []
    plan = _on_cpu(plan)
    with fake_world(rank, plan.mesh.world_size), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        # Outside of fake tensors: meshes look at their ranks, and building a model may look at its weights.
        mesh = Mesh(plan.mesh, torch.device("cpu"), alone=True)
        prepare_device_mesh(plan, mesh)
        blueprint = build()
        if blueprint.initialise is not None:
            blueprint = replace(blueprint, initialise=_draw_nothing)
        with FakeTensorMode(allow_non_fake_inputs=True), CollectiveRecorder(mesh) as recorder:
            with Copies():
                training = create_training(recipe, plan, blueprint, mesh, Recorder(), draws=draws)
            runner = training.model.runner
            if isinstance(runner, PipelineRunner):
                runner.assume(activation)
            recorder.issued.clear()  # only those of the step count
            if blueprint.example is None:
                notes.append("the model brings no example batch, so no step was taken: no gradients, no collectives")
            else:
                training.stepper([example_batch(blueprint, plan)] * microbatches, step=0, learning_rate=1e-3)
            for technique in training.model.techniques:
                notes += technique.notes()
            state = _state_bytes(training)
        notes += [str(warning.message) for warning in heard if not issubclass(warning.category, DeprecationWarning)]
        return RankReport(
            rank=rank,
            coordinates=mesh.coordinates,
            state=state,
            issued=tuple(recorder.issued),
            num_microbatches_run=microbatches,
            step_traffic={},
            activation=runner.transport.activation if isinstance(runner, PipelineRunner) else None,
            notes=tuple(dict.fromkeys(notes)),
        )


def _draw_nothing(name: str, module: nn.Module) -> None:
    """Fake tensors have no values that could be drawn, read, or looked at once they are."""


def prepare_device_mesh(plan: Plan, mesh: Mesh) -> None:
    """Make ZeRO-3's DeviceMeshes while tensors still have values; the mesh keeps them."""
    if plan.data_parallel.shards_weights and plan.mesh.shard * plan.mesh.context > 1:
        data = plan.data_parallel
        sums_replicas = plan.mesh.replicate > 1 and not (data.replicas_step_alone or data.compresses)
        copies = ("replicate",) if sums_replicas else ()
        mesh.device_mesh(*copies, "shard")
        if plan.mesh.expert > 1 and mesh["expert_shard"].group is not None:
            mesh.device_mesh(*copies, "expert_shard")


def example_batch(blueprint: Blueprint, plan: Plan) -> Batch:
    """One microbatch of the example's shapes, which the blueprint must bring."""
    assert blueprint.example is not None
    example = blueprint.example(plan.microbatch.size)
    batch = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in example.items()}
    batch |= {name: place_prompt(field, batch[name]) for name, field in blueprint.samples.items()}
    return {"sample_ids": torch.zeros(plan.microbatch.size, dtype=torch.int64), **batch}


def _totals(issued: Iterable[IssuedCollective]) -> dict[tuple[str, str], tuple[float, float]]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for one in issued:
        counts[one.axis, one.op] += 1
        sizes[one.axis, one.op] += one.size_bytes
    return {key: (float(counts[key]), float(sizes[key])) for key in counts}


def _state_bytes(training: TrainingState) -> StateBytes:
    """Bytes of the storages behind each kind of state, each storage once, in the order weights, masters, …; not of
    those that are elsewhere."""
    # What a technique keeps elsewhere counts as seen already.  Then every storage goes to the first kind that has it:
    # under fp32 weights are their own masters, and must not count twice.
    seen = {identity for technique in training.model.techniques for identity in technique.offloaded_storages()}
    parts = training.model.parts
    shards = training.model.stores.shards
    parameters = [parameter for part in parts for parameter in part.module.parameters()]
    weights = _bytes_of(parameters, seen)
    masters = _bytes_of((shard.master for shard in shards), seen)
    gradients = _bytes_of(_gradients(parameters), seen)
    gradients += _bytes_of((shard.gradient for shard in shards if shard.gradient is not None), seen)
    optimizer = _bytes_of((stored.tensor for stored in training.optimizer.checkpoint_shards()), seen)
    buffers = _bytes_of((buffer for part in parts for buffer in part.module.buffers()), seen)
    return StateBytes(
        weights=weights,
        gradients=gradients,
        masters=masters,
        optimizer=optimizer,
        buffers=buffers,
        residuals=training.model.stores.model_state_bytes()["residuals"],
        techniques=sum(technique.state_bytes() for technique in training.model.techniques),
    )


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad


def _bytes_of(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        # By storage and not by tensor: views of one flat buffer are many tensors, and padding belongs to none.
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        identity = storage._cdata  # pyright: ignore[reportPrivateUsage]  fake storages have no address
        if identity not in seen:
            seen.add(identity)
            total += storage.nbytes()
    return total
