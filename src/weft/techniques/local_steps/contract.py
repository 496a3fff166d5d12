"""Local steps: what they cannot join, what they keep and send, their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from weft.config.plan import Plan
from weft.techniques.contract import Case, ExtraMemory, Technique
from weft.techniques.local_steps.settings import LocalStepsSettings

_KEY = "plan.data_parallel.local_steps"


@final
class LocalSteps(Technique):
    """Replicas that step by themselves, and average what they learnt every so many steps."""

    name = "local steps"
    part = LocalStepsSettings
    saved_as = "local_rounds"

    def runs(self, plan: Plan) -> bool:
        return plan.data_parallel.replicas_step_alone

    def sends(self, plan: Plan) -> bool:
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

    def extra_memory(self, settings: LocalStepsSettings) -> ExtraMemory:
        return ExtraMemory(master_copies=settings.outer_copies)

    def describe(self, settings: LocalStepsSettings) -> Iterator[str]:
        if settings.replicas_step_alone:
            yield f"replicas average every {settings.local_steps} steps"

    def unsupported_by_others(self, settings: LocalStepsSettings) -> Iterator[str]:
        if settings.replicas_step_alone:
            yield f"replicas that average every {settings.local_steps} steps"

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        if plan.data_parallel.replicas_step_alone:
            named = f"{_KEY} = {plan.data_parallel.local_steps}"
            yield f"{named}: the script sums gradients over all data ranks in every step. Use 0."

    def of_keyword(self, name: str, value: Any) -> Mapping[str, Any]:
        if name != "local_steps":
            return {}
        values = {"local_steps": value, "outer_learning_rate": 1.0, "outer_momentum": 0.0}  # plain averages: local SGD
        return {f"data_parallel.{setting}": each for setting, each in values.items()}

    def search_values(self, plan: Plan) -> Mapping[str, tuple[Any, ...]]:
        if not plan.data_parallel.replicas_step_alone:
            return {}
        return {"data_parallel.algorithm": ("auto",)}  # there are no sums in every step that another way could carry

    def exact(self, plan: Plan) -> tuple[Plan, str]:
        data = plan.data_parallel
        if not data.replicas_step_alone:
            return plan, ""
        note = "compared without local steps: replicas that step by themselves learn something else, which the recipe"
        return replace(plan, data_parallel=data.summed_every_step()), f"{note} permits"
