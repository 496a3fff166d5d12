"""`plan = "auto"`, for now: the largest data-parallel split that fits, with the batch kept exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.cluster import Cluster
from weft.errors import PlanError
from weft.figures import spell_figure, spell_memory
from weft.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, ModelFacts, Plan, check_plan, mesh_sizes
from weft.recipe import Precision, Recipe
from weft.search._rule_memory import MemoryNeed, estimate_memory
from weft.techniques.compute.contract import THREADS
from weft.techniques.data.contract import MicrobatchPlan, split_batch
from weft.techniques.recompute.contract import RECOMPUTE_KEY, Recompute
from weft.techniques.zero.contract import ZERO_KEY, Stage

_USABLE = 0.9
"""Share of the memory to plan with; the rest is for fragmentation and for what the estimate leaves out."""
_TOKENS = {False: 4096, True: 16_384}
"""Tokens per microbatch beyond which larger ones are no faster, on the CPU and on an accelerator."""
_MICROBATCHES_PER_STAGE = 4
"""Enough that a pipeline waits for less than a fifth of the step."""
_SAVINGS: tuple[tuple[Stage, Recompute], ...] = ((1, "none"), (3, "none"), (3, "selective"), (3, "full"))
"""What to try, in this order, before another axis than data is used.  ZeRO-2 saves nothing that ZeRO-3 does not."""


def auto_plan(
    recipe: Recipe, cluster: Cluster, facts: ModelFacts, processes: int | None = None
) -> tuple[Plan, dict[str, str]]:
    """Choose a plan for `processes` ranks, or for as many of the cluster's devices as the batch can use.

    Returns the plan and the reason of each setting, by dotted key.

    Raises:
        PlanError: when nothing fits into memory, or the batch cannot be divided over the processes.
    """
    if processes is not None and processes < 1:
        raise PlanError(f"processes = {processes} is too few. Use 1 or more.")
    search = _Search(recipe, cluster, facts)
    smallest: tuple[Plan, MemoryNeed] | None = None
    for plan in search.candidates(processes):
        need = estimate_memory(plan, recipe, facts, on_accelerator=cluster.has_accelerators)
        if need is None or need.total_bytes <= search.budget_bytes(plan.mesh.world_size):
            check_plan(plan, recipe, facts, processes)
            return plan, search.reasons(plan, need)
        if smallest is None or need.total_bytes < smallest[1].total_bytes:
            smallest = (plan, need)
    raise _nothing_fits(search, smallest, processes)


@dataclass(frozen=True, slots=True)
class _Search:
    recipe: Recipe
    cluster: Cluster
    facts: ModelFacts

    def budget_bytes(self, world: int) -> float:
        """Memory that one rank may use."""
        if self.cluster.has_accelerators:
            return _USABLE * self.cluster.device_memory_bytes
        return _USABLE * min(node.memory_bytes for node in self.cluster.nodes) / self.ranks_per_node(world)

    def ranks_per_node(self, world: int) -> int:
        return -(-world // self.cluster.num_nodes)

    def candidates(self, processes: int | None) -> Iterator[Plan]:
        """Plans for `processes` ranks, or for as many as are of use: the most data ranks first, then the fastest."""
        for data, tensor, pipeline in sorted(self._splits(processes), key=lambda s: (-s[0], s[1] * s[2], s[2])):
            threads = self._threads(data * tensor * pipeline)
            for stage, words in _SAVINGS:
                if (stage == 3 and data == 1 and words == "none") or (self.facts.no_stages and words != "none"):
                    continue
                mesh = MeshPlan(pipeline=pipeline, tensor=tensor, replicate=data)
                if stage == 3 and data > 1:
                    mesh = replace(mesh, replicate=1, shard=data)
                for microbatch in self._microbatches(data, pipeline):
                    yield Plan(
                        mesh=mesh,
                        data_parallel=DataParallelPlan().at_stage(stage if data > 1 else 1),
                        microbatch=microbatch,
                        memory=MemoryPlan().recomputing(words),
                        compute=ComputePlan(precision=self._precision()).with_threads(threads),
                    )

    def _splits(self, processes: int | None) -> Iterator[tuple[int, int, int]]:
        """Sizes of (data, tensor, pipeline) that the processes, the model and the batch allow."""
        world = self.cluster.num_devices if processes is None else processes
        blocks, sizes = 1 if self.facts.no_stages else self.facts.num_blocks or 1, self.facts.divisible
        common = math.gcd(*sizes.values()) if sizes and not self.recipe.model.split else 1
        for tensor in range(1, min(common, self.ranks_per_node(world)) + 1):
            for pipeline in range(1, min(blocks, world // tensor) + 1):
                data = self._data_ranks(world // (tensor * pipeline))
                exact = processes is None or data * tensor * pipeline == world
                if common % tensor == 0 and exact:
                    yield data, tensor, pipeline

    def _data_ranks(self, most: int) -> int:
        """Return how many of `most` data ranks the batch can use."""
        batch = self.recipe.batch.global_batch_size
        if not self.facts.per_sample_loss:
            return 1
        most = min(most, batch)
        if self.facts.has_batch_norm:
            return max(ranks for ranks in range(1, most + 1) if batch % ranks == 0)
        return most

    def _microbatches(self, data: int, pipeline: int) -> Iterator[MicrobatchPlan]:
        """Ways to split the batch over `data` ranks, the largest microbatch that is of use first."""
        batch = self.recipe.batch.global_batch_size
        if not self.facts.per_sample_loss or self.facts.has_batch_norm:
            yield MicrobatchPlan(size=batch // data)
            return
        tokens = _TOKENS[self.cluster.has_accelerators]
        largest = max(1, tokens // (self.facts.sequence_length or 1))
        if pipeline > 1:
            largest = max(1, min(largest, batch // data // (_MICROBATCHES_PER_STAGE * pipeline)))
        seen: set[int] = set()
        while largest:
            microbatch = split_batch(batch, data, largest)
            if microbatch is not None and microbatch.size not in seen:
                seen.add(microbatch.size)
                yield microbatch
            largest //= 2

    def _precision(self) -> Precision:
        permitted = self.recipe.permit.precision
        wanted: Precision = "bf16" if self.cluster.has_accelerators else "fp32"
        return wanted if wanted in permitted else permitted[0]

    def _threads(self, world: int) -> int:
        ranks = self.ranks_per_node(world)
        if self.cluster.has_accelerators:  # The other devices' ranks may be another job's.
            ranks = max(ranks, *(node.devices.count for node in self.cluster.nodes))
        return max(1, min(node.cores for node in self.cluster.nodes) // ranks)

    def reasons(self, plan: Plan, need: MemoryNeed | None) -> dict[str, str]:
        """Return why each setting is as it is."""
        world, batch = plan.mesh.world_size, self.recipe.batch.global_batch_size
        axis = "mesh.shard" if plan.mesh.shard > 1 else "mesh.replicate"
        budget = self.budget_bytes(world) / 2**30
        fits = (
            ""
            if need is None
            else f"; about {spell_figure(need.total_bytes / 2**30, 2)} of {spell_figure(budget)} GiB per process"
        )
        shares = plan.microbatch.shares(plan.mesh.data)
        listed = f"{shares[0]} × {plan.mesh.data} data rank{'s' if plan.mesh.data > 1 else ''}"
        if len(set(shares)) > 1:
            listed = f"({' + '.join(map(str, shares))})"
        count = f"{world} processes" if world > 1 else "1 process"
        reasons = {
            axis: f"the largest data-parallel split of {count} that fits{fits}",
            "microbatch.size": self._size_reason(plan),
            "microbatch.per_step": f"{plan.microbatch.size} × {listed} = the recipe's {batch}",
            THREADS: f"{self.cluster.num_cores:,} cores over {count}",
            "compute.precision": "the fastest here that the recipe permits",
        }
        if plan.data_parallel.shards_weights:
            reasons[ZERO_KEY] = "weights, gradients and optimizer would not fit on every process"
        if plan.mesh.tensor > 1:
            reasons["mesh.tensor"] = "data ranks alone do not fit, or the batch is too small for more of them"
        if plan.mesh.pipeline > 1:
            reasons["mesh.pipeline"] = "data and tensor ranks alone do not fit, or cannot make up all processes"
        if plan.memory.recomputes:
            reasons[RECOMPUTE_KEY] = "activations would not fit otherwise"
        return reasons

    def _size_reason(self, plan: Plan) -> str:
        if self.facts.has_batch_norm:
            return "BatchNorm must see the whole batch of a step at once"
        if not self.facts.per_sample_loss:
            return "the loss must see all samples of a step at once"
        tokens = plan.microbatch.size * (self.facts.sequence_length or 1)
        unit = "tokens" if self.facts.sequence_length else "samples"
        return f"{tokens:,} {unit} per microbatch"


def _nothing_fits(search: _Search, smallest: tuple[Plan, MemoryNeed] | None, processes: int | None) -> PlanError:
    name = search.facts.name
    if smallest is None:
        assert processes is not None
        batch = search.recipe.batch.global_batch_size
        usable = next(n for n in range(processes, 0, -1) if any(True for _ in search.candidates(n)))
        return PlanError(
            f"processes = {processes} cannot share the recipe's global_batch_size = {batch} exactly, "
            f"and the {name} cannot be cut into enough parts.\nUse processes = {usable}."
        )
    plan, need = smallest
    budget = search.budget_bytes(plan.mesh.world_size)
    devices = math.ceil(plan.mesh.world_size * need.total_bytes / budget)
    parts = (("states", need.states_bytes), ("activations", need.activations_bytes), ("logits", need.logits_bytes))
    listed = ", ".join(f"{part} {spell_figure(size / 2**30)}" for part, size in parts)
    return PlanError(
        f"No plan fits: a {name} of {search.facts.num_parameters or 0:,} parameters needs at least "
        f"{spell_memory(need.total_bytes)} per process ({mesh_sizes(plan)}, {plan.data_parallel.stage_name}, "
        f"{plan.memory.recompute_line}: {listed}), and {spell_memory(budget)} can be used.\n"
        f"Use about {devices} devices of this size, or a smaller model."
    )
