"""Local steps: settings, what they cannot join, what they keep and send, their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from weft.config.document import Rules
from weft.errors import PlanError
from weft.techniques.contract import Case, Held, Technique

if TYPE_CHECKING:
    from weft.config.plan import Plan

_RULES = Rules(PlanError)
_KEY = "plan.data_parallel.local_steps"
_AVERAGE_PASSES = 4.0
"""Times that masters are read or written around the average of replicas, besides anchor and momentum."""


@dataclass(frozen=True, kw_only=True)
class LocalStepsSettings:
    """The part of `data_parallel` that is about local steps."""

    local_steps: int = 0
    """Steps that each replica takes by itself before replicas average what they learnt (local SGD, DiLoCo), with the
    recipe's permission only; 0: replicas sum their gradients in every step."""
    outer_learning_rate: float = 0.7
    """How far local steps' weights go towards the replicas' average; 1: all the way."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the averages of local steps; 0: none, which is local SGD."""
    # The defaults are those of DiLoCo (Douillard et al., arXiv 2311.08105, §3).

    def check_settings(self) -> None:
        _RULES.at_least(self, 0, "local_steps")
        _RULES.above_zero(self, "outer_learning_rate")
        _RULES.between(self, 0, 1, "outer_momentum")
        for name in ("outer_learning_rate", "outer_momentum"):
            if not self.local_steps and getattr(self, name) != getattr(_DEFAULTS, name):
                raise _RULES.refuse(self, name, "has no effect with local_steps = 0. Remove it, or give local_steps.")

    @property
    def replicas_step_alone(self) -> bool:
        """Whether gradients meet inside a replica only."""
        return self.local_steps > 0

    def ends_round(self, step: int, num_steps: int | None) -> bool:
        """Whether a round ends with a step, from 0, of a training of `num_steps`: its last one ends there, too.  None:
        nobody knows them yet."""
        return (step + 1) % self.local_steps == 0 or step + 1 == num_steps

    @property
    def outer_copies(self) -> int:
        """Copies of its masters that a rank keeps: the anchor, and the outer momentum if there is any."""
        if not self.local_steps:
            return 0
        return 2 if self.outer_momentum else 1

    def average_seconds(self, master_bytes: int, seconds_per_byte: float, memory_bytes_per_second: float) -> float:
        """Return seconds per element and step of averaging the replicas at the end of a round: nothing hides it.

        Args:
            master_bytes: of one element.
            seconds_per_byte: of an all-reduce over the replicas.
            memory_bytes_per_second: of a rank's device.
        """
        passes = (_AVERAGE_PASSES + 2.0 * self.outer_copies) * master_bytes
        return (seconds_per_byte * master_bytes + passes / memory_bytes_per_second) / self.local_steps


_DEFAULTS = LocalStepsSettings()


def local_sgd(steps: int) -> dict[str, Any]:
    """Return settings by dotted key, that of the rounds' length first: rounds of so many steps, with plain averages."""
    values = {"local_steps": steps, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    return {f"data_parallel.{name}": value for name, value in values.items()}


@final
class LocalSteps(Technique):
    """Replicas that step by themselves, and average what they learnt every so many steps."""

    name = "local steps"
    part = LocalStepsSettings
    saved_as = "local_rounds"

    def runs(self, plan: Plan) -> bool:
        return plan.data_parallel.replicas_step_alone

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        mesh, data = plan.mesh, plan.data_parallel
        named = f"{_KEY} = {data.local_steps}"
        if not data.replicas_step_alone:
            return
        if data.compresses:
            yield (
                f"{named} cannot join {data.compression_setting}: between replicas no gradients travel any more, and"
                ' inside a replica links are fast. Use compression = "none", or local_steps = 0.'
            )
        if data.gathers_after_step and mesh.shard == 1:
            yield (
                f"{named} cannot join {data.zero_setting} with mesh.shard = 1: replicas step by"
                " themselves, so each holds its whole optimizer state, and there is nobody to share it with. Use"
                " zero = 0, or mesh.shard = 2 or more."
            )
        if data.algorithm != "auto":
            yield (
                f'{named} cannot join data_parallel.algorithm = "{data.algorithm}": it chooses how gradients are'
                ' summed over all data ranks, and they are not. Use algorithm = "auto".'
            )

    def check(self, case: Case) -> None:
        plan, recipe = case.plan, case.recipe
        steps, permitted = plan.data_parallel.local_steps, recipe.permit.local_steps
        path = ("data_parallel", "local_steps")
        if not steps:
            return
        if steps > permitted:
            problem = f"is not permitted by the recipe, whose permit.local_steps = {permitted}."
            fix = f"Use {permitted}, or permit.local_steps = {steps}; of a session, weft.session(local_steps={steps})"
            raise case.refuse(path, f"{problem}\n{fix}.")
        if plan.mesh.replicate == 1:
            problem = "has no effect with mesh.replicate = 1: there are no replicas that could step by themselves."
            raise case.refuse(path, f"{problem}\nUse 0, or more replicas.")
        if recipe.optimizer.average_decay is not None:
            problem = "leaves no weights of which a moving average could be taken in every step: each replica has its"
            raise case.refuse(path, f"{problem} own.\nUse 0, or leave out the recipe's optimizer.average_decay.")
        if case.facts.has_batch_norm:
            problem = "would let the running statistics of BatchNorm drift apart: each replica sees its own samples."
            raise case.refuse(path, f'{problem}\nUse 0, or a model with another norm (norm = "group" in a convnet).')

        if not case.facts.per_sample_loss:
            problem = "would show this loss the samples of one replica alone, and it is no sum over samples."
            raise case.refuse(path, f"{problem}\nUse 0.")

    def held(self, settings: LocalStepsSettings) -> Held:
        return Held(master_copies=settings.outer_copies)

    def words(self, settings: LocalStepsSettings) -> Iterator[str]:
        if settings.replicas_step_alone:
            yield f"replicas average every {settings.local_steps} steps"

    def elsewhere(self, settings: LocalStepsSettings) -> Iterator[str]:
        if settings.replicas_step_alone:
            yield f"replicas that average every {settings.local_steps} steps"

    def unwritten(self, plan: Plan) -> Iterator[str]:
        if plan.data_parallel.replicas_step_alone:
            named = f"{_KEY} = {plan.data_parallel.local_steps}"
            yield f"{named}: the script sums gradients over all data ranks in every step. Use 0."

    def leaves(self, plan: Plan) -> Mapping[str, tuple[Any, ...]]:
        if not plan.data_parallel.replicas_step_alone:
            return {}
        return {"data_parallel.algorithm": ("auto",)}  # there are no sums in every step that another way could carry

    def exact(self, plan: Plan) -> tuple[Plan, str]:
        data = plan.data_parallel
        if not data.replicas_step_alone:
            return plan, ""
        names = ("local_steps", "outer_learning_rate", "outer_momentum")
        plain = {name: getattr(_DEFAULTS, name) for name in names}
        told = "compared without local steps: replicas that step by themselves learn something else, which the recipe"
        return replace(plan, data_parallel=replace(data, **plain)), f"{told} permits"
