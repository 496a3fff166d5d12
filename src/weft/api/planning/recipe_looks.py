"""First looks at a recipe's own model, by the first samples of its data, before a run begins."""

from __future__ import annotations

from contextlib import closing, suppress

import torch

from weft.api.planning.first_looks import FirstLooks, agreed_looks
from weft.api.preflight.conditional_blocks import find_branches, gathers_blocks
from weft.api.preflight.coupled_samples import find_meeting, refuse_meeting
from weft.api.preflight.forward_state import find_left_behind, refuse_left_behind, runs_once
from weft.api.preflight.sample_trials import Trials, is_costly, part_of, trials_of
from weft.config.plan import MicrobatchPlan, Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.run.data import PreparedData, data_shape, open_data


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
    left = meeting = None
    with suppress(Exception):  # whatever the model's forward raises on a part of a batch
        left = find_left_behind(trials)
    if left is not None:
        refuse_left_behind(left, plan)
    with suppress(Exception):  # as above
        meeting = find_meeting(trials, is_declared=not blueprint.per_sample_loss)
    if meeting is None:
        return
    refuse_meeting(meeting, plan)
    if meeting.in_loss and blueprint.per_sample_loss and plan.mesh.data > 1:
        raise PlanError(
            f"the loss of {recipe.model.factory} is no sum over samples: the first ones give {meeting.figures},"
            " together and in two parts, so that data ranks would train on something else than one process. Give the"
            " loss the attribute per_sample = False, and data ranks gather their samples for it; or, if it is a mean"
            " over something else than samples (tokens, pixels), return (sum, count)."
        )


def branches_by_first_looks(
    recipe: Recipe, plan: Plan, blueprint: Blueprint, prepared: PreparedData
) -> tuple[str, ...]:
    """Blocks that only some of the first samples run, where ranks gather each together.  Call on every rank that has
    been joined."""
    looks = FirstLooks()
    if blueprint.cut is None or not gathers_blocks(plan):
        return ()
    trials = _trials(recipe, plan, blueprint, prepared)
    if trials is not None:
        with suppress(Exception):  # as above
            looks = FirstLooks(branches=find_branches(trials, blueprint.cut.blocks))
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
