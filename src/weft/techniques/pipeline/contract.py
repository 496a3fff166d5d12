"""Pipeline parallelism: which models and schedules go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique
from weft.techniques.pipeline.settings import PipelineSettings

_PLAIN_SCHEDULE: Mapping[str, Any] = {"schedule": "1f1b", "chunks_per_rank": 1, "cuts": None}


def _with_plain_schedule(plan: Plan) -> Plan:
    if plan.mesh.pipeline == 1:
        return plan
    return replace(plan, pipeline_parallel=replace(plan.pipeline_parallel, **_PLAIN_SCHEDULE))


def _without(plan: Plan) -> Plan:
    return replace(_with_plain_schedule(plan), mesh=replace(plan.mesh, pipeline=1))


@final
class Pipeline(Technique):
    """Consecutive stages of the model on different ranks."""

    name = "pipeline parallelism"
    part = PipelineSettings
    ablations = (
        Ablation("the pipeline", _without, frees_ranks=True),
        Ablation("the pipeline's schedule", _with_plain_schedule),
    )
    judged_alone = ("mesh.pipeline",)

    def runs(self, plan: Plan) -> bool:
        return plan.mesh.pipeline > 1

    def sends(self, plan: Plan) -> bool:
        return plan.mesh.pipeline > 1

    def check_model(self, case: Case) -> None:
        plan, blocks = case.plan, case.facts.num_blocks
        stages, chunks = plan.num_stages, plan.pipeline_parallel.chunks_per_rank
        if plan.mesh.pipeline == 1:
            return
        self._check_schedule(case)
        if reason := case.facts.why_not("blocks", "pipeline"):
            problem = f"cannot cut this model into stages: {reason}.\nUse 1, and data ranks."
            raise case.refuse(("mesh", "pipeline"), problem)
        if blocks is not None and stages > blocks:
            most = blocks // chunks
            made = f"{plan.mesh.pipeline} × {chunks} chunks" if chunks > 1 else f"{plan.mesh.pipeline}"
            fix = f"Use {most} or less" if most > 1 else f"Use 1: {chunks} chunks per rank need {2 * chunks} blocks"
            problem = f"makes {made} stages of {blocks} blocks: some would be empty.\n{fix}."
            raise case.refuse(("mesh", "pipeline"), problem)
        self._check_cuts(case)

    def _check_schedule(self, case: Case) -> None:
        chosen = case.plan.pipeline_parallel
        (least, most), chunks = chosen.chunk_limits, chosen.chunks_per_rank
        if chunks < least or (most is not None and chunks > most):
            rule = f"exactly {least}" if least == most else f"{least} or more"
            problem = f'does not fit schedule = "{chosen.schedule}", which has {rule}.\nUse {least}.'
            raise case.refuse(("pipeline_parallel", "chunks_per_rank"), problem)
        if case.plan.compute.compile and chosen.splits_backward:
            problem = f'cannot join schedule = "{chosen.schedule}", whose backward comes in two passes: a compiled'
            raise case.refuse(("compute", "compile"), f'{problem} block has one.\nUse false, or schedule = "1f1b".')

    def _check_cuts(self, case: Case) -> None:
        blocks, stages = case.facts.num_blocks, case.plan.num_stages
        cuts, path = case.plan.pipeline_parallel.cuts, ("pipeline_parallel", "cuts")
        if cuts is None:
            return
        if len(cuts) != stages - 1:
            problem = f"has {len(cuts)} places to cut, and {stages} stages have {stages - 1}."
            raise case.refuse(path, f"{problem}{_cut_fix(blocks, stages)}")
        if blocks is not None and cuts[-1] >= blocks:
            raise case.refuse(path, f"goes past the last block, {blocks - 1}.{_cut_fix(blocks, stages)}")

    def check(self, case: Case) -> None:
        plan, chosen = case.plan, case.plan.pipeline_parallel
        if plan.mesh.pipeline == 1:
            ineffective = "has no effect with mesh.pipeline = 1.\nUse {}, or more pipeline ranks."
            if chosen.schedule != "1f1b":
                raise case.refuse(("pipeline_parallel", "schedule"), ineffective.format('"1f1b"'))
            if chosen.chunks_per_rank > 1:
                raise case.refuse(("pipeline_parallel", "chunks_per_rank"), ineffective.format(1))
            if chosen.cuts:
                raise case.refuse(("pipeline_parallel", "cuts"), "has no effect with mesh.pipeline = 1.\nRemove it.")

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        chosen = plan.pipeline_parallel
        if chosen.torch_schedule is None or chosen.chunks_per_rank > 1:
            yield (
                f'plan.pipeline_parallel.schedule = "{chosen.schedule}": torch\'s own schedules with several stages per'
                ' rank are not used here. Use "1f1b" or "gpipe".'
            )


def _cut_fix(blocks: int | None, stages: int) -> str:
    if blocks is None:
        return "\nLeave cuts out to have them found by cost."
    even = [stage * blocks // stages for stage in range(1, stages)]
    return f"\nUse {format_value(even)}, or leave cuts out to have them found by cost."
