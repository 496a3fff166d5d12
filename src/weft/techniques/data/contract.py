"""Data parallelism: how the global batch falls into microbatches of data ranks, and which models allow it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, final

from weft.config.document import Rules, spell
from weft.config.settings import setting
from weft.errors import PlanError
from weft.techniques.contract import Case, Removal, Technique

if TYPE_CHECKING:
    from weft.config.plan import Plan

_RULES = Rules(PlanError)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPlan:
    """How the global batch falls into microbatches."""

    size: int = setting(
        1,
        layout="microbatch_size",
        space="microbatch_sizes",
        asked=("size", "microbatch", "micro", "microbatch_size"),
        explained=True,
    )
    """Samples per microbatch and data rank."""
    per_step: int | tuple[int, ...] = setting(1, follows="microbatch.size")
    """Microbatches per step on each data rank; a list gives data ranks unequal shares."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "size")
        if isinstance(self.per_step, int):
            _RULES.at_least(self, 1, "per_step")
        elif not self.per_step or min(self.per_step) < 1:
            raise _RULES.refuse(self, "per_step", "must give each data rank at least 1 microbatch.")

    @property
    def is_split(self) -> bool:
        """Whether a data rank takes its samples in more than one microbatch, or ranks take unequal numbers."""
        return self.per_step != 1

    @property
    def has_unequal_shares(self) -> bool:
        """Whether some data ranks have more microbatches than others."""
        return isinstance(self.per_step, tuple) and len(set(self.per_step)) > 1

    @classmethod
    def of(cls, size: int, shares: tuple[int, ...]) -> Self:
        """Return microbatches of `size` samples, so many on each data rank."""
        return cls(size=size, per_step=as_per_step(shares))

    @classmethod
    def of_share(cls, samples: int, at_least: int) -> Self:
        """Return microbatches of a rank's samples: the fewest that are at least so many, or one sample each."""
        wanted = min(at_least, samples)
        number = next(number for number in range(wanted, samples + 1) if samples % number == 0)
        return cls(size=samples // number, per_step=number)

    def smaller(self) -> Self | None:
        """Return the same samples in smaller microbatches, by the smallest divisor of the size; None: of one sample."""
        divisor = next((by for by in range(2, self.size + 1) if self.size % by == 0), None)
        if divisor is None:
            return None
        each = self.per_step
        more = each * divisor if isinstance(each, int) else tuple(share * divisor for share in each)
        return replace(self, size=self.size // divisor, per_step=more)

    def joined(self) -> Self:
        """Return the same samples in one microbatch per data rank; itself where ranks have unequal shares."""
        if self.has_unequal_shares:
            return self
        each = self.shares(1)[0]
        return replace(self, size=self.size * each, per_step=1)

    def shares(self, data_ranks: int) -> tuple[int, ...]:
        """Microbatches of each data rank."""
        return (self.per_step,) * data_ranks if isinstance(self.per_step, int) else self.per_step


def even_shares(microbatches: int, data_ranks: int) -> tuple[int, ...]:
    """Return microbatches per data rank, as equal as can be, the larger shares first: 32 over 3 is 11, 11, 10."""
    each, more = divmod(microbatches, data_ranks)
    return tuple(each + (rank < more) for rank in range(data_ranks))


def as_per_step(shares: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return shares as `per_step` spells them: one number when they are equal."""
    return shares[0] if len(set(shares)) == 1 else shares


def split_batch(global_batch_size: int, data_ranks: int, largest: int) -> MicrobatchPlan | None:
    """Return the microbatches that keep the global batch exactly; None when there are more data ranks than samples.

    The busiest rank gets as few samples as can be; among such splits the microbatch is the largest up to `largest`.
    """
    if data_ranks > global_batch_size:
        return None
    best: tuple[int, int] | None = None
    for size in range(1, min(largest, global_batch_size // data_ranks) + 1):
        if global_batch_size % size == 0:
            busiest = even_shares(global_batch_size // size, data_ranks)[0] * size
            best = min(best, (busiest, -size)) if best is not None else (busiest, -size)
    if best is None:
        return None
    size = -best[1]
    return MicrobatchPlan(size=size, per_step=as_per_step(even_shares(global_batch_size // size, data_ranks)))


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
    removals = (
        Removal("data ranks", _without, frees_ranks=True),
        Removal("accumulation", _without_accumulation),
    )

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
        return f"Use per_step = {spell(as_per_step(even_shares(batch // size, ranks)))}."
    fitting = split_batch(batch, ranks, size)
    assert fitting is not None
    return f"Use size = {fitting.size} and per_step = {spell(fitting.per_step)}."


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
        no_gathering=case.facts.no_gathering,
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
