"""What every technique says of itself holds together, for drawn plans."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from weft.config.plan import AXES, Plan, plan_settings
from weft.config.settings import choices_of
from weft.errors import PlanError
from weft.planning.search import plan_of
from weft.techniques.check import runnability
from weft.techniques.cost_terms import Layout
from weft.techniques.registry import TECHNIQUES, check_no_loop, describe, exact, extra_memory, unsupported_in_script

SEEDS = range(40)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "mesh.order": (AXES, tuple(reversed(AXES))),
    "mesh.pipeline": (1, 2, 4),
    "mesh.replicate": (1, 2, 3),
    "mesh.shard": (1, 2),
    "mesh.tensor": (1, 2),
    "mesh.context": (1, 2),
    "microbatch.size": (1, 3),
    "pipeline_parallel.chunks_per_rank": (1, 2),
    "data_parallel.bucket_bytes": (1000, 26_214_400),
    "data_parallel.local_steps": (0, 0, 5),
    "data_parallel.compression": ("none", "none", "int8", "powersgd", "onebit", "int4"),
    "memory.fused_loss": (False, True),
    "memory.offload_to": ("host",),  # a disk is for some values of another setting only
    "tensor_parallel.sequence": (False, True),
}


def drawn_plan(random: Random) -> Plan:
    """A plan that can be written; whether it can be run is another question."""
    plan = Plan()
    for setting in random.sample(plan_settings(), 12):
        values = NUMBERS.get(setting.key) or tuple(choices_of(setting.hint))
        if values:
            section = replace(getattr(plan, setting.section), **{setting.name: random.choice(values)})
            plan = replace(plan, **{setting.section: section})
    shares = tuple(random.choice((1, 2)) for _ in range(plan.mesh.data))
    return replace(plan, microbatch=replace(plan.microbatch, per_step=random.choice((2, shares))))


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_technique_the_batch_is_the_same(seed: int) -> None:
    plan = drawn_plan(Random(seed))
    for technique in TECHNIQUES:
        for ablation in technique.ablations:
            simpler = ablation.apply(plan)
            assert simpler.global_batch_size == plan.global_batch_size, ablation.name
            assert ablation.apply(simpler) == simpler, ablation.name
            assert simpler.mesh.world_size <= plan.mesh.world_size
            if ablation.frees_ranks and simpler != plan:
                assert simpler.mesh.world_size < plan.mesh.world_size or simpler.mesh == plan.mesh


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_compared_with_one_process_changes_nothing(seed: int) -> None:
    plan = drawn_plan(Random(seed))
    compared, left_out = exact(plan)
    data = compared.data_parallel
    assert not data.compresses
    assert not data.replicas_step_alone
    assert len(left_out) == plan.data_parallel.compresses + plan.data_parallel.replicas_step_alone
    assert exact(compared) == (compared, [])
    assert extra_memory(data).gradient_bytes == extra_memory(data).master_copies == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layout_says_what_its_plan_says(seed: int) -> None:
    """What a technique keeps and how it is named does not depend on whether a plan or a layout is asked; and a layout
    that can be written gives its plan back."""
    plan = drawn_plan(Random(seed))
    layout = Layout.of(plan)
    assert extra_memory(layout) == extra_memory(plan.data_parallel)
    of_sections = [*describe(plan.data_parallel), *describe(plan.memory)]
    assert list(describe(layout)) == of_sections
    searched = [setting for setting in plan_settings() if setting.knob.space and setting.name != "first_bucket_bytes"]
    for setting in searched:
        assert getattr(layout, setting.layout) == setting.of(plan), setting.key
    shares = plan.microbatch.shares(plan.mesh.data)
    again = plan_of(layout, global_batch_size=plan.global_batch_size, shares=shares)
    assert [setting.of(again) for setting in searched] == [setting.of(plan) for setting in searched]


@pytest.mark.parametrize("seed", SEEDS)
def test_refusals_name_a_setting_and_a_change(seed: int) -> None:
    plan = drawn_plan(Random(seed))
    keys = [setting.key for setting in plan_settings()]
    for reason in (*runnability(plan), *unsupported_in_script(plan)):
        assert any(f"plan.{key}" in reason for key in keys), reason
        assert "Use " in reason or "Leave " in reason, reason
    elsewhere = {
        "memory.offload": plan.memory.offloads,
        "mesh.context": plan.mesh.context > 1,
        "tensor_parallel.scheme": plan.tensor_parallel.scheme != "1d",
    }
    if any(elsewhere.values()):
        with pytest.raises(PlanError) as refusal:
            check_no_loop(plan)
        assert all((key in str(refusal.value)) == is_used for key, is_used in elsewhere.items())
    else:
        check_no_loop(plan)
