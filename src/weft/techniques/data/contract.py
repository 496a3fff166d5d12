"""Data parallelism: which batches and models can be shared out over data ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique
from weft.techniques.data.settings import MicrobatchPlan, as_per_step, even_shares, split_batch


def _without(plan: Plan) -> Plan:
    """One data rank with everybody's microbatches."""
    return replace(
        plan,
        mesh=replace(plan.mesh, replicate=1, shard=1, expert=1),
        data_parallel=plan.data_parallel.unsharded(),
        microbatch=replace(plan.microbatch, per_step=sum(plan.microbatch.shares(plan.mesh.data))),
    )


def _without_accumulation(plan: Plan) -> Plan:
    """The same samples on the same data ranks, in one microbatch each."""
    return replace(plan, microbatch=plan.microbatch.joined())


@final
class Data(Technique):
    """Samples shared out over ranks, and over time."""

    name = "data parallelism"
    part = MicrobatchPlan
    ablations = (
        Ablation("data ranks", _without, frees_ranks=True),
        Ablation("accumulation", _without_accumulation),
    )

    def sends(self, plan: Plan) -> bool:
        return True

    def check(self, case: Case) -> None:
        _check_batch(case)
        _check_batch_statistics(case)
        _check_whole_batch_loss(case)


def _check_batch(case: Case) -> None:
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


def _batch_fix(case: Case) -> str:
    """Return microbatch settings that keep the global batch exactly, with the plan's own size where that can be."""
    batch, ranks, size = case.recipe.batch.global_batch_size, case.plan.mesh.data, case.plan.microbatch.size
    if batch % size == 0 and batch // size >= ranks:
        return f"Use per_step = {format_value(as_per_step(even_shares(batch // size, ranks)))}."
    fitting = split_batch(batch, ranks, size)
    assert fitting is not None
    return f"Use size = {fitting.size} and per_step = {format_value(fitting.per_step)}."


def _check_batch_statistics(case: Case) -> None:
    plan, batch, ranks = case.plan, case.recipe.batch.global_batch_size, case.plan.mesh.data
    if set(plan.microbatch.shares(ranks)) == {1}:
        return
    if case.facts.has_batch_norm:
        norm = case.facts.batch_norm or "BatchNorm"
        reason = f"would give {norm} the statistics of a part of the batch: one process sees the whole at once."
        fix = f"{_one_microbatch(batch, ranks)} A BatchNorm in evaluation mode (module.eval() beforehand) takes none."
        raise case.refuse(("microbatch", "per_step"), f"{reason}\n{fix}")


def _one_microbatch(batch: int, ranks: int) -> str:
    """Settings under which each data rank takes its samples at once."""
    if batch % ranks == 0:
        return f"Use microbatch.size = {batch // ranks} and per_step = 1."
    fitting = max(n for n in range(1, ranks) if batch % n == 0)
    fix = f"Use {fitting} data ranks with microbatch.size = {batch // fitting} and per_step = 1"
    return f"{fix}, or a global batch that {ranks} divides."


def whole_batch_problem(*, ranks: int, is_split: bool, pipeline: int, no_gathering: str) -> tuple[tuple[str, ...], str]:
    """Why a loss that is no sum over samples is not shown a whole batch: the setting, and what about it; or nothing."""
    seen = "this loss is no sum over samples: it must see all samples of a step at once"
    if ranks > 1 and no_gathering:
        return ("mesh",), f"splits the batch, but {seen}, and ranks cannot gather them: {no_gathering}."
    if is_split:
        return ("microbatch", "per_step"), f"shows the loss a part of the batch at a time, but {seen}."
    if ranks > 1 and pipeline > 1:
        return ("mesh", "pipeline"), f"cuts the model into stages that get one microbatch in a step, because {seen}."
    return (), ""


def _check_whole_batch_loss(case: Case) -> None:
    """A loss that is no sum over samples: data ranks gather their samples, where they take them at once."""
    plan, batch, ranks = case.plan, case.recipe.batch.global_batch_size, case.plan.mesh.data
    if case.facts.per_sample_loss:
        return
    path, problem = whole_batch_problem(
        ranks=ranks,
        is_split=set(plan.microbatch.shares(ranks)) != {1},
        pipeline=plan.mesh.pipeline,
        no_gathering=case.facts.why_not("gathered_loss"),
    )
    if path == ("mesh",):
        fix = f"Use mesh.replicate = 1, mesh.shard = 1, microbatch.size = {batch} and per_step = 1."
        raise case.refuse(path, f"{problem}\n{fix}", show=False)
    if path == ("microbatch", "per_step"):
        raise case.refuse(path, f"{problem}\n{_one_microbatch(batch, ranks)}")
    if path:
        raise case.refuse(path, f"{problem}\nUse 1, or one data rank.")
    if ranks > 1 and plan.compute.compile:
        problem = "leaves no place to gather the samples of other data ranks in a forward, all of which this loss sees."
        raise case.refuse(("compute", "compile"), f"{problem}\nUse false, or one data rank.")
