"""Choose the plan of a session's model from the session's arguments and the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.analysis.facts import facts_of_blueprint
from weft.api.batches.batch_shape import taken_apart
from weft.api.batches.losses import LossOfUser
from weft.api.batches.stream import UserBatch, infer_inputs, shape_of
from weft.api.planning.arguments import check_inputs
from weft.api.planning.describe import describe_user_model, look_at_user_model, machine_for
from weft.api.planning.first_looks import FirstLooks
from weft.api.planning.settings import PlanSettings
from weft.api.ranks.agreement import check_same_on_all_ranks
from weft.config.plan import Plan, complete_plan
from weft.config.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.adopt import tables_of
from weft.model.blueprint import Blueprint
from weft.model.families import CutTable, SplitRule
from weft.planning.search import choose_plan
from weft.run.launch import RankInfo, threads_of_user
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.describe import describe_plan
from weft.techniques.registry import check_no_loop

UserLoss = Callable[[Any, Any], Any]
"""`loss(outputs, batch)`: a (sum, count) pair, or a scalar that is a mean over the batch's samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Arguments and facts from which a session chooses plans; the same on all ranks but for `rank`."""

    plan: Plan | None
    """None: `auto`."""
    given: PlanSettings
    rank_info: RankInfo | None
    rank: int
    world_size: int
    device: torch.device
    timeout_seconds: float
    seed: int
    permit: PermitRecipe
    quiet: bool
    batch_size: int | None = None
    """Samples of the batch, where a recipe has to have as many for each data rank; None: as the recipe says."""

    def recipe(self, model: nn.Module, batch: int, max_grad_norm: float | None) -> Recipe:
        """Return the session's facts as a recipe: the checks of plans read it."""
        kind = type(model)
        base = Recipe(
            model=ModelRecipe(factory=f"{kind.__module__}:{kind.__qualname__.replace('<locals>', 'locals')}"),
            batch=BatchRecipe(global_batch_size=batch),
            run=RunRecipe(steps=1, seed=self.seed),
            permit=self.permit,
        )
        return replace(base, optimizer=replace(base.optimizer, max_grad_norm=max_grad_norm))

    def blueprint(
        self,
        model: nn.Module,
        inputs: Mapping[str, str] | None,
        split: Sequence[SplitRule] | Mapping[str, Any],
        cut: CutTable | None,
        vocabulary_head: str | None,
        batch: UserBatch,
        *,
        checks_inputs: bool = True,
    ) -> Blueprint:
        example, shape = taken_apart(batch)
        if inputs is not None and checks_inputs:
            check_inputs(inputs, model, shape)
        inputs = inputs or infer_inputs(model, shape)
        own = (
            [SplitRule(match=match, kind=kind) for match, kind in split.items()]
            if isinstance(split, Mapping)
            else split
        )
        tables = tables_of(model)
        # The family's head is split for a fused vocabulary loss; a loss of the user's own reads whole logits.
        known = [
            replace(rule, gather_output=True)
            if rule.match == tables.vocabulary_head and vocabulary_head is None
            else rule
            for rule in tables.split
        ]
        tables.split, tables.cut = (*own, *known), cut if cut is not None else tables.cut
        tables.vocabulary_head = vocabulary_head
        blueprint = Blueprint(
            **tables.of_tables,
            module=model,
            inputs=inputs,
            beside=shape.part,
            loss=_unset_loss,  # TrainState puts the user's own in its place
            initialise=None,
            example=lambda number: {
                name: torch.empty((number, *value.shape[1:]), dtype=value.dtype, device="meta")
                for name, value in example.items()
            },
        )
        if self.plan is not None and self.plan.mesh.tensor > 1 and (own or not blueprint.splits):
            look_at_user_model(blueprint, has_table=bool(own))
        return blueprint

    def choose(
        self, recipe: Recipe, blueprint: Blueprint, loss: UserLoss, example: UserBatch, looks: FirstLooks
    ) -> Plan:
        facts, known = looks.facts(facts_of_blueprint(blueprint, recipe)), LossOfUser(loss)
        machine = machine_for(self.rank_info)
        reasons: Mapping[str, str] = {}
        plan, note = self.plan, ""
        if plan is None:
            known.like = shape_of(example)
            description = describe_user_model(replace(blueprint, loss=known), recipe)
            choice = choose_plan(
                recipe,
                machine.cluster,
                facts,
                self.world_size,
                profile=replace(description.profile, facts=facts),
                pins=looks.limits(self.given, self.world_size).pins(recipe.batch.global_batch_size, self.world_size),
            )
            plan = self.given.beyond(with_timeout(choice.plan, self.timeout_seconds))
            reasons = choice.reasons
            note = "; ".join(description.notes)
        plan, reasons = complete_plan(plan, recipe, reasons, threads_of_user(), is_chosen=self.plan is None)
        looks.check(plan)
        check_no_loop(plan)
        check_plan(plan, recipe, facts, self.world_size)
        check_runnable(plan)
        check_same_on_all_ranks(recipe, plan)
        torch.set_num_threads(plan.compute.num_threads)
        if self.rank == 0 and not self.quiet:
            noted = self._said_of_batch(plan, recipe) + looks.notes(plan, note)
            print("\n".join([*describe_plan(plan, reasons, facts, machine.cluster), *noted]), flush=True)
        return plan

    def _said_of_batch(self, plan: Plan, recipe: Recipe) -> list[str]:
        """Return a line that says that the loader's batch is the global one, and how much of it a data rank is handed;
        none where one rank takes all of it at once.

        A loop that weighs a step's loss by `len(batch)` would have a part of its epoch's mean, without a word.
        """
        counts, size = plan.microbatch.shares(plan.mesh.data), plan.microbatch.size
        least, most, total = min(counts), max(counts), self.batch_size or recipe.batch.global_batch_size
        if len(counts) == most == 1:
            return []
        line = f"batch     {total:,} samples in all per step"
        if len(counts) > 1:
            share = f"{size * least:,} to {size * most:,}" if least < most else f"{size * most:,}"
            share = share if size * sum(counts) == total else f"at most {size * most:,}"
            line += f": {share} on each of {len(counts)} data ranks"
        if most > 1:
            line += f", in {f'{least} to {most}' if least < most else most} microbatches of {size:,}"
        if len(counts) > 1 and self.batch_size is None:
            line += "; step.loss and step.count are those of all"
        return [line]


def with_timeout(plan: Plan, seconds: float | None) -> Plan:
    """The plan, whose ranks wait so long for one another."""
    return plan if seconds is None else replace(plan, compute=plan.compute.waiting(seconds))


def _unset_loss(outputs: Any, batch: Any) -> Any:
    raise AssertionError("the loss is set by TrainState")
