"""Look at a model and its loss before training, by a few samples of the first batch on trial: of a session's model, and
of a recipe's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from weft.api.batches.stream import UserBatch
from weft.api.planning.settings import PlanSettings, SafetyChecks
from weft.api.preflight.conditional_blocks import conditional_blocks_note, find_conditional_blocks, gathers_blocks
from weft.api.preflight.coupled_samples import SampleCoupling, WholeBatchLoss, find_coupling, refuse_coupling
from weft.api.preflight.forward_state import ChangedState, find_changed_state, refuse_changed_state, runs_once
from weft.api.preflight.sample_trials import Trials, is_costly, part_of, trials_of
from weft.api.preflight.trial_copies import LOSS
from weft.api.ranks.agreement import gather_texts
from weft.config.plan import MeshPlan, MicrobatchPlan, ModelFacts, Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.run.data import PreparedData, data_shape, open_data

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLooks:
    """Findings about a model and its loss, the same on all ranks."""

    changed: ChangedState = field(default_factory=ChangedState)
    coupling: SampleCoupling = field(default_factory=SampleCoupling)
    branches: Sequence[str] = ()
    """Blocks that only some samples run, where ranks may have to gather each together."""

    def notes(self, plan: Plan, *others: str) -> list[str]:
        """Lines that tell of what was found, behind others."""
        return [f"note      {note}" for note in (*others, conditional_blocks_note(self.branches, plan)) if note]

    def limits(self, given: PlanSettings, world_size: int) -> PlanSettings:
        """Return the settings that limit `auto`: one microbatch, where several would differ.

        Raises:
            PlanError: no plan on so many ranks is right.
        """
        self.check(Plan(mesh=MeshPlan(replicate=world_size)))
        needs_one = bool(self.changed.by_forwards or self.coupling.where)
        return replace(given, microbatches=1) if needs_one and given.microbatches is None else given

    def check(self, plan: Plan) -> None:
        """Refuse a plan that would be wrong.

        Raises:
            PlanError: it would.
        """
        refuse_changed_state(self.changed, plan)
        refuse_coupling(self.coupling, plan)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """Return facts for the choice and the checks of plans, with the findings."""
        if not self.coupling.in_loss:
            return facts
        return replace(facts, per_sample_loss=False).limited("gathered_loss", self.coupling.no_gathering)

    def declared(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The loss, which says of itself what was found."""
        is_said = not getattr(loss, "per_sample", True)
        return WholeBatchLoss(loss) if self.coupling.in_loss and not is_said else loss


def look_first(
    blueprint: Blueprint,
    loss: Callable[..., Any],
    example: UserBatch,
    plan: Plan | None,
    nets: SafetyChecks,
    device: torch.device,
) -> FirstLooks:
    """Try a few samples of a batch, on every rank, before `plan` (None: `auto`) is laid over the model, which is told
    of its branches.

    Nothing is asked where one process takes the whole batch at once, and nothing is said of what cannot be tried: a
    forward that fails on a part of a batch.
    """
    is_declared = not getattr(loss, "per_sample", True)
    untried = SampleCoupling(where=LOSS, no_gathering="its forward cannot be tried on a part of a batch")
    looks = FirstLooks(coupling=untried if is_declared else SampleCoupling())
    if plan is not None and runs_once(plan):
        return looks
    trials = trials_of(blueprint, loss, example, part_of(plan))
    if trials is not None and is_costly(trials):
        logger.warning(
            "the model is too large to be tried on this host before training (%.0f GFLOP), so nobody has looked whether"
            " its forward leaves something behind or lets samples meet",
            trials.flops / 1e9,
        )
        trials = None
    blocks = blueprint.cut.blocks if blueprint.cut is not None and (plan is None or gathers_blocks(plan)) else ()
    if trials is not None:
        looks = _found(looks, trials, nets, blocks, is_declared=is_declared)
    looks = agreed_looks(looks, device)
    blueprint.sometimes = looks.branches
    return looks


def _found(
    looks: FirstLooks, trials: Trials, nets: SafetyChecks, blocks: Sequence[str] = (), *, is_declared: bool = False
) -> FirstLooks:
    """Return this rank's findings; a look that raises keeps those of `looks`."""
    if nets.changed_state:
        with suppress(Exception):  # whatever a user's forward raises on a part of a batch
            looks = replace(looks, changed=find_changed_state(trials))
    if nets.coupled_samples or is_declared:
        with suppress(Exception):  # as above
            looks = replace(looks, coupling=find_coupling(trials, is_declared=is_declared))
    if blocks:
        with suppress(Exception):  # as above
            looks = replace(looks, branches=find_conditional_blocks(trials, blocks))
    return looks


def agreed_looks(looks: FirstLooks, device: torch.device) -> FirstLooks:
    """Return the findings of all ranks: the first rank's that has found something, and the branches of all. Call on
    every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return looks
    of_ranks: list[dict[str, Any]] = [json.loads(text) for text in gather_texts(json.dumps(asdict(looks)), device)]

    def first(what: str) -> dict[str, str]:
        return next((one[what] for one in of_ranks if any(one[what].values())), of_ranks[0][what])

    return FirstLooks(
        changed=ChangedState(**first("changed")),
        coupling=SampleCoupling(**first("coupling")),
        branches=list(dict.fromkeys(name for one in of_ranks for name in one["branches"])),
    )


def refuse_by_first_looks(recipe: Recipe, plan: Plan, blueprint: Blueprint, prepared: PreparedData) -> None:
    """Refuse a plan under which a model of the user's own would leave something else behind than on one process, or
    whose ranks and microbatches would part samples that meet.  Not collective; nothing is said of a model that has no
    weights yet, or fails on a part of a batch.

    Raises:
        PlanError: it would.
    """
    trials = _trials(recipe, plan, blueprint, prepared)
    if trials is None:
        return
    is_declared = not blueprint.per_sample_loss
    looks = _found(FirstLooks(), trials, SafetyChecks(), is_declared=is_declared)
    looks.check(plan)
    if looks.coupling.in_loss and not is_declared and plan.mesh.data > 1:
        raise PlanError(
            f"the loss of {recipe.model.factory} is no sum over samples: the first ones give {looks.coupling.figures},"
            " together and in two parts, so that data ranks would train on something else than one process. Give the"
            " loss the attribute per_sample = False, and data ranks gather their samples for it; or, if it is a mean"
            " over something else than samples (tokens, pixels), return (sum, count)."
        )


def branches_by_first_looks(
    recipe: Recipe, plan: Plan, blueprint: Blueprint, prepared: PreparedData
) -> tuple[str, ...]:
    """Blocks that only some of the first samples run, where ranks gather each together.  Call on every rank that has
    been joined."""
    if blueprint.cut is None or not gathers_blocks(plan):
        return ()
    looks, trials = FirstLooks(), _trials(recipe, plan, blueprint, prepared)
    if trials is not None:
        looks = _found(looks, trials, SafetyChecks(changed_state=False, coupled_samples=False), blueprint.cut.blocks)
    return tuple(agreed_looks(looks, torch.device("cpu")).branches)


def _trials(recipe: Recipe, plan: Plan, blueprint: Blueprint, prepared: PreparedData) -> Trials | None:
    """Trials of the first samples, where these and the model are there and it does not take long."""
    if recipe.model.factory is None or runs_once(plan):
        return None
    with suppress(Exception):  # the ranks will say what is wrong with the data
        trials = trials_of(blueprint, blueprint.loss, _first_batch(recipe, blueprint, prepared), part_of(plan))
        return None if trials is None or is_costly(trials) else trials
    return None


def _first_batch(recipe: Recipe, blueprint: Blueprint, prepared: PreparedData) -> Batch:
    """The first global batch."""
    whole = MicrobatchPlan(size=recipe.batch.global_batch_size, per_step=1)
    with closing(open_data(recipe, data_shape(blueprint, recipe), microbatch=whole, prepared=prepared)) as data:
        return data.microbatches(0)[0]
