"""Whether a plan fits a recipe and a world: every refusal with its numbers, its reason and the change to make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from weft.document import Path, dotted, sentence, spell
from weft.errors import PlanError, Setting
from weft.plan._facts import ModelFacts
from weft.plan._plan import EXPERT_LENDERS, Plan, runnability
from weft.plan._reductions import reduction_conflict
from weft.plan._schedules import SPLIT_BACKWARD, chunk_limits
from weft.plan._shares import as_per_step, even_shares, split_batch
from weft.recipe import Recipe


def check_plan(plan: Plan, recipe: Recipe, facts: ModelFacts, world_size: int | None = None) -> None:
    """Raise unless the plan can train the recipe without changing its mathematics.

    Needs no torch and no processes.  `world_size` is the number of processes, where it is known.

    Raises:
        PlanError: for the first conflict found; the message has the numbers, the reason and the computed change.
    """
    case = _Case(plan, recipe, facts, world_size)
    for check in _CHECKS:
        check(case)


def check_given(given: Plan, recipe: Recipe, facts: ModelFacts) -> None:
    """Raise where one of the settings that a user gave (`origins`) can stand in no plan for this model, whatever a
    search chooses beside it.

    Raises:
        PlanError: a number of stages or tensor ranks, a recomputation or a shared sequence that the model has not got.
    """
    mesh, tensor, memory = Plan().mesh, Plan().tensor_parallel, Plan().memory
    if "mesh.pipeline" in given.origins:
        mesh = replace(mesh, pipeline=given.mesh.pipeline)
    if "mesh.tensor" in given.origins:
        mesh = replace(mesh, tensor=given.mesh.tensor)
    if "memory.recompute" in given.origins:
        memory = replace(memory, recompute=given.memory.recompute)
    if "tensor_parallel.sequence" in given.origins and given.mesh.tensor > 1:
        tensor = replace(tensor, sequence=given.tensor_parallel.sequence)
    plan = replace(Plan(), mesh=mesh, tensor_parallel=tensor, memory=memory, origins=given.origins)
    case = _Case(plan, recipe, facts, None)
    for check in (_check_tensor, _check_cuts, _check_recompute):
        check(case)


def check_runnable(plan: Plan) -> None:
    """Raise unless the engine can run the plan today.

    Raises:
        PlanError: with every setting that can only be predicted yet.
    """
    reasons = runnability(plan)
    if reasons:
        raise PlanError("\n".join(reasons))


@dataclass(frozen=True, slots=True)
class _Case:
    plan: Plan
    recipe: Recipe
    facts: ModelFacts
    world_size: int | None

    def refuse(self, path: Path, problem: str, *, show: bool = True) -> PlanError:
        """Return the error about one setting of the plan, with where it was given."""
        value: object = self.plan
        for name in path:
            value = getattr(value, str(name))
        setting = Setting(path, spell(value) if show else None, problem)
        origin = self.plan.origins.get(dotted(path))
        return PlanError(sentence("plan", setting, origin), setting=setting)


def list_choices(values: Iterable[int]) -> str:
    """Return `1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def mesh_sizes(plan: Plan) -> str:
    """Return the axes larger than one as a product: `data 2 × tensor 2 × pipeline 2`."""
    mesh = plan.mesh
    axes: list[tuple[str, int]] = [("data", mesh.data)]
    if mesh.replicate > 1 and mesh.shard > 1:
        axes = [("replicate", mesh.replicate), ("shard", mesh.shard)]
    axes += [("tensor", mesh.tensor), ("pipeline", mesh.pipeline), ("context", mesh.context)]
    return " × ".join(f"{name} {size}" for name, size in axes if size > 1) or "data 1"


def _check_world(case: _Case) -> None:
    world, mesh = case.world_size, case.plan.mesh
    if world is None or mesh.world_size == world:
        return
    data_axis = "shard" if mesh.shard > 1 else "replicate"
    others = {axis: mesh.world_size // getattr(mesh, axis) for axis in (data_axis, "tensor", "pipeline")}
    fixes = [f"{axis} = {world // rest}" for axis, rest in others.items() if world % rest == 0]
    fixes.append(f"{mesh.world_size} processes")
    problem = f"makes {mesh.world_size} processes ({mesh_sizes(case.plan)}), but there are {world}."
    raise case.refuse(("mesh",), f"{problem}\nUse {', or '.join(fixes)}.", show=False)


def _check_expert(case: _Case) -> None:
    mesh = case.plan.mesh
    room = mesh.expert_room
    if room % mesh.expert:
        choices = list_choices(n for n in range(1, room + 1) if room % n == 0)
        lenders = " × ".join(EXPERT_LENDERS)
        problem = f"does not divide {lenders} = {room}, from which experts borrow their ranks.\nUse {choices}."
        raise case.refuse(("mesh", "expert"), problem)


def _check_batch(case: _Case) -> None:
    plan, batch = case.plan, case.recipe.batch.global_batch_size
    ranks, microbatch = plan.mesh.data, plan.microbatch
    path = ("microbatch", "per_step")
    if ranks > batch:
        problem = f"makes {ranks} data ranks, and the recipe's global_batch_size = {batch} has no sample for some."
        raise case.refuse(("mesh",), f"{problem}\nUse {batch} data ranks or fewer.", show=False)
    shares = microbatch.shares(ranks)
    if len(shares) != ranks:
        problem = f"has {len(shares)} shares for {ranks} data ranks (replicate × shard).\n{_batch_fix(case)}"
        raise case.refuse(path, problem)
    if microbatch.size * sum(shares) != batch:
        total = f"{' + '.join(map(str, shares))}" if len(set(shares)) > 1 else f"{shares[0]} × {ranks} data ranks"
        total = f"{microbatch.size} × ({total})" if len(set(shares)) > 1 else f"{microbatch.size} × {total}"
        problem = (
            f"makes a global batch of {total} = {microbatch.size * sum(shares)}, "
            f"but the recipe's global_batch_size is {batch}.\n{_batch_fix(case)}"
        )
        raise case.refuse(path, problem)


def _batch_fix(case: _Case) -> str:
    """Return microbatch settings that keep the global batch exactly, with the plan's own size where that can be."""
    batch, ranks, size = case.recipe.batch.global_batch_size, case.plan.mesh.data, case.plan.microbatch.size
    if batch % size == 0 and batch // size >= ranks:
        return f"Use per_step = {spell(as_per_step(even_shares(batch // size, ranks)))}."
    fitting = split_batch(batch, ranks, size)
    assert fitting is not None
    return f"Use size = {fitting.size} and per_step = {spell(fitting.per_step)}."


def _check_batch_statistics(case: _Case) -> None:
    plan, batch, ranks = case.plan, case.recipe.batch.global_batch_size, case.plan.mesh.data
    recompute = plan.memory.recompute
    if case.facts.has_batch_norm and set(recompute if isinstance(recompute, tuple) else (recompute,)) != {"none"}:
        problem = "would run BatchNorm's forward twice per step, and its running statistics would move twice."
        raise case.refuse(("memory", "recompute"), f'{problem}\nUse recompute = "none".')
    if set(plan.microbatch.shares(ranks)) == {1}:
        return
    if case.facts.has_batch_norm:
        reason = "would give BatchNorm the statistics of a part of the batch: one process sees the whole at once."
        if batch % ranks == 0:
            raise case.refuse(
                ("microbatch", "per_step"), f"{reason}\nUse microbatch.size = {batch // ranks} and per_step = 1."
            )
        fitting = max(n for n in range(1, ranks) if batch % n == 0)
        fix = f"Use {fitting} data ranks with microbatch.size = {batch // fitting} and per_step = 1"
        raise case.refuse(("microbatch", "per_step"), f"{reason}\n{fix}, or a global batch that {ranks} divides.")


def _check_per_sample_loss(case: _Case) -> None:
    plan, batch = case.plan, case.recipe.batch.global_batch_size
    if case.facts.per_sample_loss or (plan.mesh.data == 1 and set(plan.microbatch.shares(1)) == {1}):
        return
    problem = "splits the batch, but this loss is no sum over samples: it must see all samples of a step at once."
    fix = f"Use mesh.replicate = 1, mesh.shard = 1, microbatch.size = {batch} and per_step = 1."
    path = ("microbatch", "per_step") if plan.mesh.data == 1 else ("mesh",)
    raise case.refuse(path, f"{problem}\n{fix}", show=plan.mesh.data == 1)


def _check_tensor(case: _Case) -> None:
    plan, sizes = case.plan, case.facts.divisible
    tensor = plan.mesh.tensor
    if plan.tensor_parallel.sequence and tensor == 1:
        problem = "has no effect with mesh.tensor = 1: the tensor ranks share the sequence.\nUse false."
        raise case.refuse(("tensor_parallel", "sequence"), problem)
    if plan.tensor_parallel.sequence and case.facts.no_stages:
        problem = f"needs to know where the blocks begin and end: {case.facts.no_stages}.\nUse false."
        raise case.refuse(("tensor_parallel", "sequence"), problem)
    if plan.tensor_parallel.sequence and case.facts.num_blocks is not None and case.facts.sequence_length is None:
        problem = f"has no sequence to split: samples of a {case.facts.name} are no sequences.\nUse false."
        raise case.refuse(("tensor_parallel", "sequence"), problem)
    if tensor == 1 or sizes is None or case.recipe.model.split:
        return  # A split table of one's own says itself what must divide; it is looked at when the model is built.
    if not sizes:
        why = case.facts.no_tensor or f"a {case.facts.name} has no layers for the tensor axis"
        problem = f"has nothing to split: {why}.\nUse 1, and data ranks."
        raise case.refuse(("mesh", "tensor"), problem)
    wrong = {name: size for name, size in sizes.items() if size % tensor}
    if wrong:
        common = math.gcd(*sizes.values())
        choices = [n for n in range(1, common + 1) if common % n == 0]
        listed = ", ".join(f"{name} = {size}" for name, size in wrong.items())
        raise case.refuse(("mesh", "tensor"), f"does not divide {listed}.\nUse {list_choices(choices)}.")


def _check_context(case: _Case) -> None:
    plan = case.plan
    if plan.mesh.context == 1 and plan.context_parallel.scheme != "ring":
        problem = 'has no effect with mesh.context = 1.\nUse "ring", or more context ranks.'
        raise case.refuse(("context_parallel", "scheme"), problem)


def _check_schedule(case: _Case) -> None:
    plan, pipeline = case.plan, case.plan.mesh.pipeline
    chosen = plan.pipeline_parallel
    if pipeline == 1:
        ineffective = "has no effect with mesh.pipeline = 1.\nUse {}, or more pipeline ranks."
        if chosen.schedule != "1f1b":
            raise case.refuse(("pipeline_parallel", "schedule"), ineffective.format('"1f1b"'))
        if chosen.chunks_per_rank > 1:
            raise case.refuse(("pipeline_parallel", "chunks_per_rank"), ineffective.format(1))
        if chosen.cuts:
            raise case.refuse(("pipeline_parallel", "cuts"), "has no effect with mesh.pipeline = 1.\nRemove it.")
        return
    least, most = chunk_limits(chosen.schedule)
    chunks = chosen.chunks_per_rank
    if chunks < least or (most is not None and chunks > most):
        rule = f"exactly {least}" if least == most else f"{least} or more"
        problem = f'does not fit schedule = "{chosen.schedule}", which has {rule}.\nUse {least}.'
        raise case.refuse(("pipeline_parallel", "chunks_per_rank"), problem)
    if plan.compute.compile and chosen.schedule in SPLIT_BACKWARD:
        problem = f'cannot join schedule = "{chosen.schedule}", whose backward comes in two passes: a compiled block '
        raise case.refuse(("compute", "compile"), f'{problem}has one.\nUse false, or schedule = "1f1b".')


def _check_cuts(case: _Case) -> None:
    plan, blocks = case.plan, case.facts.num_blocks
    stages, cuts = plan.num_stages, plan.pipeline_parallel.cuts
    if plan.mesh.pipeline == 1:
        return
    if case.facts.no_stages:
        problem = f"cannot cut this model into stages: {case.facts.no_stages}.\nUse 1, and data ranks."
        raise case.refuse(("mesh", "pipeline"), problem)
    if blocks is not None and stages > blocks:
        chunks = plan.pipeline_parallel.chunks_per_rank
        most = blocks // chunks
        made = f"{plan.mesh.pipeline} × {chunks} chunks" if chunks > 1 else f"{plan.mesh.pipeline}"
        fix = f"Use {most} or less" if most > 1 else f"Use 1: {chunks} chunks per rank need {2 * chunks} blocks"
        raise case.refuse(("mesh", "pipeline"), f"makes {made} stages of {blocks} blocks: some would be empty.\n{fix}.")
    if cuts is None:
        return
    if len(cuts) != stages - 1:
        problem = f"has {len(cuts)} places to cut, and {stages} stages have {stages - 1}.{_cut_fix(blocks, stages)}"
        raise case.refuse(("pipeline_parallel", "cuts"), problem)
    if blocks is not None and cuts[-1] >= blocks:
        problem = f"goes past the last block, {blocks - 1}.{_cut_fix(blocks, stages)}"
        raise case.refuse(("pipeline_parallel", "cuts"), problem)


def _cut_fix(blocks: int | None, stages: int) -> str:
    if blocks is None:
        return "\nLeave cuts out to have them found by cost."
    even = [stage * blocks // stages for stage in range(1, stages)]
    return f"\nUse {spell(even)}, or leave cuts out to have them found by cost."


def _check_sharding(case: _Case) -> None:
    mesh, zero = case.plan.mesh, case.plan.data_parallel.zero
    if zero == 0 and mesh.shard > 1:
        problem = f"has nothing to shard with data_parallel.zero = 0.\nUse replicate = {mesh.data} and shard = 1,"
        raise case.refuse(("mesh", "shard"), f"{problem} or zero = 1, 2 or 3.")
    if zero == 3 and mesh.shard == 1 and mesh.replicate > 1:
        problem = "shards the weights over mesh.shard only, which is 1: every rank would hold all of them."
        fix = f"Use replicate = 1 and shard = {mesh.replicate}, or zero = 1 or 2, which shard over replicate × shard."
        raise case.refuse(("data_parallel", "zero"), f"{problem}\n{fix}")


def _check_reductions(case: _Case) -> None:
    conflict = reduction_conflict(case.plan)
    if conflict is not None:
        raise case.refuse(("data_parallel", "reduce_every"), conflict)


def _check_numerics(case: _Case) -> None:
    plan, permit = case.plan, case.recipe.permit
    if plan.compute.precision not in permit.precision:
        allowed = spell(permit.precision)
        more = spell([*permit.precision, plan.compute.precision])
        problem = f"is not permitted by the recipe, whose permit.precision = {allowed}."
        raise case.refuse(
            ("compute", "precision"), f'{problem}\nUse "{permit.precision[0]}", or permit.precision = {more}.'
        )
    compression = plan.data_parallel.compression
    if compression != "none" and compression not in permit.compression:
        more = spell([*permit.compression, compression])
        problem = f'is not permitted by the recipe.\nUse "none", or permit.compression = {more}.'
        raise case.refuse(("data_parallel", "compression"), problem)
    if compression != "none" and plan.mesh.data * plan.mesh.context == 1:
        problem = 'has no effect with 1 data rank: there are no gradients to exchange.\nUse "none", or more data ranks.'
        raise case.refuse(("data_parallel", "compression"), problem)


def _check_local_steps(case: _Case) -> None:
    """What `runnability` cannot know: the recipe's permission, its model and its average."""
    plan, recipe = case.plan, case.recipe
    steps, permitted, path = plan.data_parallel.local_steps, recipe.permit.local_steps, ("data_parallel", "local_steps")
    if not steps:
        return
    if steps > permitted:
        problem = f"is not permitted by the recipe, whose permit.local_steps = {permitted}."
        raise case.refuse(path, f"{problem}\nUse {permitted}, or permit.local_steps = {steps}.")
    if plan.mesh.replicate == 1:
        problem = "has no effect with mesh.replicate = 1: there are no replicas that could step by themselves."
        raise case.refuse(path, f"{problem}\nUse 0, or more replicas.")
    if recipe.optimizer.average_decay is not None:
        problem = "leaves no weights of which a moving average could be taken in every step: each replica has its own."
        raise case.refuse(path, f"{problem}\nUse 0, or leave out the recipe's optimizer.average_decay.")
    if case.facts.has_batch_norm:
        problem = "would let the running statistics of BatchNorm drift apart: each replica sees its own samples."
        raise case.refuse(path, f'{problem}\nUse 0, or a model with another norm (norm = "group" in a convnet).')


def _check_onebit(case: _Case) -> None:
    data, optimizer, steps = case.plan.data_parallel, case.recipe.optimizer, case.recipe.run.steps
    if data.compression != "onebit":
        return
    path = ("data_parallel", "compression")
    if optimizer.name != "adamw":
        problem = f'is a way to run AdamW, and optimizer.name = "{optimizer.name}".\nUse "int8", or AdamW.'
        raise case.refuse(path, problem)
    if optimizer.max_grad_norm is not None:
        problem = "sends momenta, whose differences have norms of their own: nothing can be clipped by them."
        fix = 'Take max_grad_norm out of the recipe (in TOML, max_grad_norm = "none"), or use "int8".'
        raise case.refuse(path, f"{problem}\n{fix}")
    if data.onebit_warmup_steps >= steps:
        problem = f"is as long as the run of {steps} steps: nothing would be compressed.\nUse {max(1, steps // 5)}."
        raise case.refuse(("data_parallel", "onebit_warmup_steps"), problem)


def _check_recompute(case: _Case) -> None:
    recompute, blocks = case.plan.memory.recompute, case.facts.num_blocks
    if case.facts.no_stages and recompute != "none":
        problem = f'works block by block: {case.facts.no_stages}.\nUse "none".'
        raise case.refuse(("memory", "recompute"), problem)
    if isinstance(recompute, tuple) and blocks is not None and len(recompute) != blocks:
        problem = f"has {len(recompute)} words for {blocks} blocks.\nGive one word for all, or {blocks}."
        raise case.refuse(("memory", "recompute"), problem)


_CHECKS: tuple[Callable[[_Case], None], ...] = (
    _check_tensor,
    _check_context,
    _check_schedule,
    _check_cuts,
    _check_expert,
    _check_world,
    _check_batch,
    _check_batch_statistics,
    _check_per_sample_loss,
    _check_sharding,
    _check_reductions,
    _check_numerics,
    _check_local_steps,
    _check_onebit,
    _check_recompute,
)
