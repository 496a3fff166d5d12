"""What is seen of a model and its loss before training, by a few samples of the first batch on trial."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from weft.api.batches.stream import UserBatch
from weft.api.planning.nets import Nets
from weft.api.planning.settings import PlanSettings
from weft.api.preflight.conditional_blocks import find_branches, gathers_blocks, words_on_branches
from weft.api.preflight.coupled_samples import SampleMeeting, WholeBatchLoss, find_meeting, refuse_meeting
from weft.api.preflight.forward_state import LeftBehind, find_left_behind, refuse_left_behind, runs_once
from weft.api.preflight.sample_trials import is_costly, part_of, trials_of
from weft.api.preflight.trial_copies import LOSS
from weft.api.ranks.agreement import gather_texts
from weft.config.plan import MeshPlan, ModelFacts, Plan
from weft.model.blueprint import Blueprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLooks:
    """What was found, the same on all ranks."""

    left: LeftBehind = field(default_factory=LeftBehind)
    meeting: SampleMeeting = field(default_factory=SampleMeeting)
    branches: Sequence[str] = ()
    """Blocks that only some samples run, where ranks may have to gather each together."""

    def notes(self, plan: Plan, *others: str) -> list[str]:
        """Lines that tell of what was found, behind others."""
        return [f"note      {note}" for note in (*others, words_on_branches(self.branches, plan)) if note]

    def limits(self, given: PlanSettings, world_size: int) -> PlanSettings:
        """What `auto` may choose from: one microbatch, where several would differ.

        Raises:
            PlanError: no plan on so many ranks is right.
        """
        self.check(Plan(mesh=MeshPlan(replicate=world_size)))
        needs_one = bool(self.left.by_forwards or self.meeting.where)
        return replace(given, accumulate=1) if needs_one and given.accumulate is None else given

    def check(self, plan: Plan) -> None:
        """Refuse a plan that would be wrong.

        Raises:
            PlanError: it would.
        """
        refuse_left_behind(self.left, plan)
        refuse_meeting(self.meeting, plan)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """What plans are chosen and checked by, with what was found."""
        if not self.meeting.in_loss:
            return facts
        return replace(facts, per_sample_loss=False, no_gathering=self.meeting.no_gathering)

    def declared(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The loss, which says of itself what was found."""
        is_said = not getattr(loss, "per_sample", True)
        return WholeBatchLoss(loss) if self.meeting.in_loss and not is_said else loss


def look_first(
    blueprint: Blueprint,
    loss: Callable[..., Any],
    example: UserBatch,
    plan: Plan | None,
    nets: Nets,
    device: torch.device,
) -> FirstLooks:
    """Try a few samples of a batch, on every rank, before `plan` (None: `auto`) is laid over the model, which is told
    of its branches.

    Nothing is asked where one process takes the whole batch at once, and nothing is said of what cannot be tried: a
    forward that fails on a part of a batch.
    """
    is_declared = not getattr(loss, "per_sample", True)
    untried = SampleMeeting(where=LOSS, no_gathering="its forward cannot be tried on a part of a batch")
    looks = FirstLooks(meeting=untried if is_declared else SampleMeeting())
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
    if trials is not None and nets.left_behind:
        with suppress(Exception):  # whatever a user's forward raises on a part of a batch
            looks = replace(looks, left=find_left_behind(trials))
    if trials is not None and (nets.meetings or is_declared):
        with suppress(Exception):  # as above
            looks = replace(looks, meeting=find_meeting(trials, is_declared=is_declared))
    blocks = blueprint.cut.blocks if blueprint.cut is not None and (plan is None or gathers_blocks(plan)) else ()
    if trials is not None and blocks:
        with suppress(Exception):  # as above
            looks = replace(looks, branches=find_branches(trials, blocks))
    looks = agreed_looks(looks, device)
    blueprint.sometimes = looks.branches
    return looks


def agreed_looks(looks: FirstLooks, device: torch.device) -> FirstLooks:
    """What any rank has found: the first that has found something, and the branches of all.  Call on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return looks
    told: list[dict[str, Any]] = [json.loads(text) for text in gather_texts(json.dumps(asdict(looks)), device)]

    def first(what: str) -> dict[str, str]:
        return next((one[what] for one in told if any(one[what].values())), told[0][what])

    return FirstLooks(
        left=LeftBehind(**first("left")),
        meeting=SampleMeeting(**first("meeting")),
        branches=list(dict.fromkeys(name for one in told for name in one["branches"])),
    )
