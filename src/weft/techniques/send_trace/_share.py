"""A rank's share of a model under a plan: its place, its stages, and the parameters that it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.config.plan import BATCH_AXES, Axis, Plan, axis_coordinates, groups_over
from weft.config.recipe import Recipe, group_parameters
from weft.techniques.pipeline.schedules import stage_ranks
from weft.techniques.pipeline.stages import Tie, choose_cuts, stage_of, ties_of
from weft.techniques.send_trace._outline import ModuleCall, Outline, Parameter, Shape
from weft.techniques.send_trace._send import Operation
from weft.techniques.tensor.mesh_2d.shape import GridShape, grid_of_plan

_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One pipeline stage; without a pipeline, the whole model."""

    stage: int
    is_first: bool
    is_last: bool
    parameters: tuple[Parameter, ...]
    """Each tensor once, under its first name in this part."""
    calls: tuple[ModuleCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A trained parameter of this rank."""

    parameter: Parameter
    part: int
    """Index of the part whose backward completes it."""
    shape: Shape
    """Shape on this rank, after the split over the tensor axis."""
    group: int
    """Index of the optimizer's parameter group."""
    is_split: bool
    partial_over: str
    """Line of the tensor axis over which its gradient is one part of a sum; empty: it is the sum."""
    is_tied: bool
    """Whether other stages hold the parameter too."""
    tie: str
    """Axis over which they sum it; empty: no other rank holds it."""
    counts: bool
    """Whether norms and checkpoints count this rank's copy."""
    is_expert: bool = False
    """Whether this rank has some of its experts only, whose gradients fewer ranks sum."""

    @property
    def name(self) -> str:
        """Name of the parameter in the whole model."""
        return self.parameter.first

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShare:
    """What one rank has of a training."""

    outline: Outline
    recipe: Recipe
    plan: Plan
    rank: int
    labels: Sequence[int] | None = None
    """Labels that count in each microbatch of the step; None: all of them."""
    on_cores: bool = True
    """Whether it computes on a CPU."""
    is_fingerprinted: bool = False
    """Whether ranks compare their batches, as in a session."""
    is_widened: bool = False
    """Whether nothing in the model is narrower than the plan's precision, as trials in fp64 have it."""
    cuts_anywhere: bool = True
    """Whether the backend scatters and gathers regions of different sizes, as Weft does on Gloo and over shared
    memory; NCCL and a dry run sum everything and send region by region."""

    # ── its place ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def coordinates(self) -> Mapping[Axis, int]:
        return axis_coordinates(self.plan.mesh, self.rank)

    @property
    def data_index(self) -> int:
        """Its place among all data ranks."""
        return self._place_among("replicate", "shard")

    def _place_among(self, *axes: Axis) -> int:
        """Its place among the ranks that differ in these axes alone, in rising order of rank."""
        place = 0
        for axis in self.plan.mesh.order:
            if axis in axes:
                place = place * int(getattr(self.plan.mesh, axis)) + self.coordinates[axis]
        return place

    @property
    def sums_apart(self) -> bool:
        """Whether gradients meet inside a replica only."""
        return self.plan.data_parallel.replicas_step_alone

    @property
    def summing(self) -> tuple[str, int, int]:
        """Axis, ranks and this rank's index of those that sum gradients."""
        mesh = self.plan.mesh
        if self.sums_apart:
            return "shard", self.shards, self.shard_index
        return "data", mesh.data * mesh.context, self._place_among(*BATCH_AXES)

    def summing_of(self, *, is_expert: bool) -> tuple[str, int, int]:
        """Return axis, ranks and this rank's index of those that sum the gradients of a parameter."""
        if not is_expert:
            return self.summing
        ranks = self.group_over(BATCH_AXES, ("expert",))
        return "expert_data", len(ranks), ranks.index(self.rank)

    @cached_property
    def expert_ranks(self) -> tuple[int, ...]:
        """Ranks that share out experts with this one, in the order of their experts."""
        return self.group_over(("expert",))

    def group_over(self, axes: Sequence[Axis], holding: Sequence[Axis] = ()) -> tuple[int, ...]:
        """Return the ranks of this rank's group over axes, of those that have the same of `holding`."""
        return next(ranks for ranks in groups_over(self.plan.mesh, axes, holding) if self.rank in ranks)

    @property
    def shards(self) -> int:
        """Ranks that share out weights: those of the shard axis and, as they hold the same, of the context axis."""
        return self.plan.mesh.shard * self.plan.mesh.context

    @property
    def shard_index(self) -> int:
        """This rank's index among the ranks that share out weights."""
        return self._place_among("shard", "context")

    @property
    def world_axis(self) -> str:
        """Axis under which the group of all ranks is recorded."""
        mesh = self.plan.mesh
        return "data" if mesh.world_size == mesh.data * mesh.context else "world"

    @property
    def microbatches(self) -> int:
        """Microbatches in a step of this rank."""
        return self.plan.microbatch.shares(self.plan.mesh.data)[self.data_index]

    @cached_property
    def grid(self) -> GridShape | None:
        """The grid of the tensor ranks; None: they form none."""
        return grid_of_plan(self.plan)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step first runs all forwards once more, for what auxiliary losses say of the whole batch."""
        return bool(self.outline.auxiliary) and self.microbatches > 1

    # ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def compute_bytes(self) -> int:
        """Size of an element of weights and activations."""
        return _ELEMENT_BYTES[self.plan.compute.precision]

    @property
    def master_bytes(self) -> int:
        return max(self.compute_bytes, 4)

    @property
    def gradient_bytes(self) -> int:
        """Size of an element of the gradients that are summed."""
        return self.compute_bytes if self.plan.data_parallel.reduces_narrow else self.master_bytes

    def of_tokens(self, shape: Shape) -> Shape:
        """Return the shape of this rank's part of an activation whose tokens context ranks share."""
        ranks, tokens = self.plan.mesh.context, self.outline.tokens
        if ranks == 1 or len(shape) < 2 or shape[1] != tokens:
            return shape
        from weft.techniques.context.token_runs import tokens_of  # loaded where ranks share tokens

        return (shape[0], tokens_of(tokens, ranks, self.coordinates["context"]), *shape[2:])

    def of_microbatch(self, shape: Shape) -> Shape:
        """Return an activation's shape for what this rank has of the samples of the plan's microbatch."""
        parts = 1 if self.grid is None else self.grid.sample_parts
        return (shape[0] * self.plan.microbatch.size // (self.outline.samples * parts), *shape[1:])

    def activation_bytes(self, shape: Shape, element_bytes: int | None = None) -> int:
        """Return the bytes of an activation of this rank's tokens, of one microbatch; `shape` is the full one."""
        return math.prod(self.of_microbatch(self.of_tokens(shape))) * (element_bytes or self.compute_bytes)

    def read_bytes(self, call: ModuleCall) -> int:
        """Return the bytes of an element of a call's input."""
        return self.compute_bytes if self.is_widened else dict(call.widths).get(self.compute_bytes, self.compute_bytes)

    def gathered(self, sizes: Sequence[int]) -> tuple[Operation, Sequence[int]]:
        """Return how ranks' own regions of so many bytes come to all: as one operation, or as one for each."""
        if self.cuts_anywhere or len(set(sizes)) == 1:
            return "all_gather", [sum(sizes)]
        return "broadcast", [size for size in sizes if size]

    def shares_out(self, parameter: Parameter) -> bool:
        """Return whether this rank has only some of a parameter's experts."""
        return parameter.is_expert and self.plan.mesh.expert > 1

    # ── its part of the model ─────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """First block of each later stage."""
        stages, outline = self.plan.num_stages, self.outline
        if self.plan.mesh.pipeline == 1:
            return ()
        return choose_cuts(outline.block_costs, len(outline.blocks), stages, self.plan.pipeline_parallel.cuts)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        if self.plan.mesh.pipeline == 1:
            return (0,)
        return stage_ranks(*self.plan.pipeline_parallel.shape(self.plan.mesh.pipeline))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts of this rank, in rising order of stage."""
        mine = self.coordinates["pipeline"]
        return tuple(self._part(stage) for stage, rank in enumerate(self.stage_ranks) if rank == mine)

    def _part(self, stage: int) -> Part:
        parameters: dict[str, Parameter] = {}
        for parameter in self.outline.parameters:
            if self._is_on(parameter.name, stage):
                parameters.setdefault(parameter.first, parameter)
        return Part(
            stage=stage,
            is_first=stage == 0,
            is_last=stage == len(self.stage_ranks) - 1,
            parameters=tuple(parameters.values()),
            calls=tuple(call for call in self.outline.calls if self._is_on(call.module, stage)),
        )

    def _is_on(self, name: str, stage: int) -> bool:
        """Return whether a stage has a module or parameter; names in no table are on all stages."""
        return len(self.stage_ranks) == 1 or stage_of(name, self.outline, self.cuts) in (stage, None)

    @cached_property
    def ties(self) -> Mapping[str, Tie]:
        """Parameters that several stages hold, by their first name."""
        if len(self.stage_ranks) == 1:
            return {}
        return {tie.name: tie for tie in ties_of(self.outline.names, self.outline, self.cuts)}

    @cached_property
    def held(self) -> tuple[HeldParameter, ...]:
        """Every trained parameter of this rank once, in the order of its parts."""
        first: dict[str, tuple[int, Parameter]] = {}
        for index, part in enumerate(self.parts):
            for parameter in part.parameters:
                if parameter.is_trained:
                    # Parts of one rank share what is tied between them: the lowest one speaks for it.
                    first.setdefault(parameter.first, (index, parameter))
        groups = group_parameters(self.recipe.optimizer, {name: stored.shape for name, (_, stored) in first.items()})
        group_of = {name: index for index, group in enumerate(groups) for name in group.names}
        return tuple(self._hold(index, parameter, group_of[name]) for name, (index, parameter) in first.items())

    def _hold(self, part: int, parameter: Parameter, group: int) -> HeldParameter:
        tensor, tie = self.plan.mesh.tensor, self.ties.get(parameter.first)
        is_split = tensor > 1 and (parameter.split if self.grid is None else parameter.grid) is not None
        is_owner = tie is None or self.stage_ranks[tie.owner] == self.coordinates["pipeline"]
        partial = parameter.partial == "always" or (
            parameter.partial == "sequence" and self.plan.tensor_parallel.sequence
        )
        # As the engine's `ParameterLayout`: unsplit parameters that see a part of the tokens have partial gradients.
        over = "tensor" if tensor > 1 and not is_split and partial else ""
        is_first = is_split or self.coordinates["tensor"] == 0
        if self.grid is not None:
            over = self.grid.partial_over(parameter.grid)
            is_first = self.grid.is_first_copy(parameter.grid, self.coordinates["tensor"])
        return HeldParameter(
            parameter=parameter,
            part=part,
            shape=self.local_shape(parameter),
            group=group,
            is_split=is_split,
            partial_over=over,
            is_tied=tie is not None,
            tie="" if tie is None else self._tie_axis(tie),
            counts=is_owner and is_first,
            is_expert=self.shares_out(parameter),
        )

    def local_shape(self, parameter: Parameter) -> Shape:
        """Return a parameter's shape on this rank."""
        if self.grid is not None:
            return parameter.shape if parameter.grid is None else self.grid.local_shape(parameter.shape, parameter.grid)
        sizes = list(parameter.shape)
        if parameter.split is not None:
            sizes[parameter.split.dim] //= self.plan.mesh.tensor
        if parameter.is_expert:
            sizes[0] //= self.plan.mesh.expert
        return tuple(sizes)

    @cached_property
    def tie_axes(self) -> Mapping[str, str]:
        """Axis over which the gradients of a tied parameter are summed, by its name."""
        return {name: self._tie_axis(tie) for name, tie in self.ties.items()}

    def _tie_axis(self, tie: Tie) -> str:
        members = {self.stage_ranks[stage] for stage in tie.stages}
        if len(members) == 1:
            return ""
        return "pipeline" if len(members) == self.plan.mesh.pipeline else "tied"

    def recomputes(self, block: int | None) -> bool:
        """Whether a block runs its forward once more in the backward."""
        words = self.plan.memory.block_words
        return block is not None and words[block if len(words) > 1 else 0] != "none"
