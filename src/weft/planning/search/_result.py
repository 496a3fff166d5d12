"""The result of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.config.cluster import Cluster
from weft.config.plan import Plan
from weft.model.profile import Profile
from weft.planning.price import CostModel, Prediction, model_flops
from weft.planning.search._objective import Objective
from weft.planning.search._space import Space
from weft.techniques.cost_terms import Calibration, Framework, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its price."""

    layout: Layout
    prediction: Prediction
    plan: Plan | None
    """None where the layout has what no plan can say, such as fp8."""
    score: float
    """The number by which candidates are ranked: less is better."""
    pessimistic_seconds: float
    """Pessimistic time of a step: step · exp(z · spread)."""
    tokens_per_second: float
    """Samples per second where samples are no sequences."""
    model_flops_utilization: float
    """The model's FLOPs (forward and backward, nothing computed again, causal attention counted half) of the whole
    batch over what all used devices could do at their dense peak in the precision of the plan."""
    cost_per_million_tokens: float | None = None
    """Cost in the currency of the price that was given; None without one."""
    training_seconds: float | None = None
    """Time until the objective's tokens are trained on; None where their number was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many plans there were, and what became of them."""

    searched: int
    """All valid combinations of splits, schedules, ZeRO stages, recomputation and offloading whose model states may
    fit; orders, schemes, shards, buckets and algorithms left out."""
    invalid: Mapping[str, int]
    """Combinations of axis sizes that were left out because they cannot be, by cause."""
    memory_bound: int
    """Splits of which even a lower bound of the model states does not fit."""
    time_bound: int
    """Splits that cannot be the best, whatever is chosen besides."""
    estimated: int
    """Rows (see `weft.planning.search._rows`) whose bound was below the best price so far, and that may fit."""
    priced: int
    out_of_memory: int
    """How many of the priced ones do not fit."""
    refused: Mapping[str, int]
    """How many a training of the model would not take, by reason, the commonest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plans, best first, and how they were found."""

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    objective: Objective
    space: Space
    framework: Framework
    calibration: Calibration
    """The constants with which prices were made."""
    best: tuple[Candidate, ...]
    """The best of each combination of axes and ZeRO stage.  Empty where nothing fits."""
    counts: Counts

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.profile.sequence_length


def candidate_of(
    cost_model: CostModel,
    objective: Objective,
    global_batch_size: int,
    layout: Layout,
    prediction: Prediction,
    plan: Plan | None,
    *,
    relative_speed: float = 1.0,
) -> Candidate:
    """Return a priced layout with all that is said of it.

    Args:
        relative_speed: peak of the mean of the used devices over that of the slowest.
    """
    step, profile = prediction.step_seconds, cost_model.profile
    tokens = global_batch_size * profile.sequence_length
    pessimistic = objective.pessimistic_seconds(step, prediction.spread)
    cost = None
    if objective.price_per_device_hour is not None:
        cost = objective.cost_per_million_tokens(step, layout.world_size, tokens)
    peak = cost_model.device(layout).peak(layout.precision) * relative_speed
    return Candidate(
        layout=layout,
        prediction=prediction,
        plan=plan,
        score=objective.score(pessimistic, layout.world_size),
        pessimistic_seconds=pessimistic,
        tokens_per_second=tokens / step,
        model_flops_utilization=model_flops(profile) * global_batch_size / (layout.world_size * peak * step),
        cost_per_million_tokens=cost,
        training_seconds=objective.training_seconds(pessimistic, tokens),
    )
