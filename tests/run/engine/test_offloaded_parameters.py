"""Shards of weights and gradients on a disk: the same training bit for bit, less in memory, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ADAMW, Seen, agreed, plan_of, recipe_of, train
from test_offloaded_states import differing, interrupted

from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, Plan
from weft.config.recipe import OptimizerRecipe
from weft.errors import PlanError
from weft.model.build import build_model
from weft.techniques.check import check_runnable
from weft.verify.dry_run import dry_run_rank

SGD = OptimizerRecipe(name="sgd", learning_rate=1e-2, momentum=0.0)
LAMB = OptimizerRecipe(name="lamb", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
AVERAGED = replace(ADAMW, average_decay=0.9)
STEPS = 4
CASES: dict[str, tuple[OptimizerRecipe, Plan, str]] = {
    "adamw, fp64": (AVERAGED, plan_of(shard=2, zero=3), "parameters"),
    "adamw, bf16": (ADAMW, plan_of("bf16", shard=2, zero=3), "parameters"),
    "with activations": (ADAMW, plan_of("fp32", shard=2, zero=3, micro=4), "parameters+activations"),
    "reduced once": (ADAMW, plan_of(shard=2, zero=3, every="step"), "parameters"),
    "hybrid": (ADAMW, plan_of(shard=2, replicate=2, zero=3), "parameters"),
    "tensor": (ADAMW, plan_of(shard=2, tensor=2, zero=3, sequence=True), "parameters"),
    "lamb": (LAMB, plan_of(shard=2, zero=3), "parameters"),
    "sgd": (SGD, plan_of(shard=2, zero=3), "parameters"),
    "uneven shards": (ADAMW, plan_of(shard=4, zero=3), "parameters"),
}


def away(plan: Plan, what: str = "parameters") -> Plan:
    return replace(plan, memory=MemoryPlan(offload=what, offload_to="disk"))  # type: ignore[arg-type]


def both(optimizer: OptimizerRecipe, plan: Plan, what: str, recompute: str = "none") -> tuple[Seen, Seen]:
    shape = {"ffn_size": 22} if plan.mesh.shard == 4 else {}
    made = recipe_of(plan.compute.precision, optimizer, steps=STEPS, **shape)
    other = away(plan, what)
    plan, other = (replace(each, memory=replace(each.memory, recompute=recompute)) for each in (plan, other))  # type: ignore[arg-type]
    return train(made, plan, STEPS), train(made, other, STEPS)


@pytest.mark.parametrize("name", CASES)
def test_parameters_on_a_disk_change_no_bit(ranks: Any, name: str) -> None:
    optimizer, plan, what = CASES[name]
    results = ranks.run(plan.mesh.world_size, both, optimizer, plan, what)
    plain, other = agreed([one for one, _ in results]), agreed([other for _, other in results])
    assert other.losses == plain.losses
    assert other.norms == plain.norms
    for one, there in results:
        assert differing(one, there) == []


def test_recomputed_blocks_gather_again(ranks: Any) -> None:
    for one, other in ranks.run(2, both, ADAMW, plan_of(shard=2, zero=3), "parameters", "full"):
        assert other.losses == one.losses
        assert differing(one, other) == []


@pytest.mark.parametrize("saved_on_disk", [True, False])
def test_a_checkpoint_does_not_know_where_weights_lay(ranks: Any, tmp_path: Path, saved_on_disk: bool) -> None:
    plan = plan_of(shard=2, zero=3)
    plans = (away(plan), plan) if saved_on_disk else (plan, away(plan))
    for whole, again in ranks.run(2, interrupted, plans, tmp_path):
        assert again.losses == whole.losses[-len(again.losses) :]
        assert differing(whole, again) == []


def test_what_does_not_go_together_is_refused() -> None:
    plan = away(plan_of(shard=2, zero=3))
    check_runnable(plan)
    check_runnable(replace(plan, memory=MemoryPlan(offload="parameters"), compute=ComputePlan(device="cuda")))
    for other, reason in (
        (away(plan_of(shard=2, zero=2)), r"Use data_parallel.zero = 3 with mesh.shard = 2 or more"),
        (away(plan_of(shard=1, zero=3)), r"Use data_parallel.zero = 3 with mesh.shard = 2 or more"),
        (
            replace(plan, memory=MemoryPlan(offload="parameters"), compute=ComputePlan(device="cpu")),
            r"nothing would get smaller",
        ),
        (away(plan_of(shard=2, pipeline=2, zero=3)), "cannot join plan.mesh.pipeline"),
        (away(plan_of(shard=2, zero=3, shares=(3, 1))), "cannot join plan.microbatch.per_step with unequal shares"),
        (replace(plan, compute=ComputePlan(compile=True)), "cannot join compute.compile"),
        (
            replace(plan, data_parallel=DataParallelPlan(zero=3, compression="int8")),
            "cannot join gradients that are compressed",
        ),
    ):
        with pytest.raises(PlanError, match=reason):
            check_runnable(other)


def test_the_dry_run_holds_neither_weights_nor_gradients() -> None:
    plan = plan_of("fp32", shard=2, zero=3)
    made = recipe_of("fp32", ADAMW, steps=2)
    plain, other = (dry_run_rank(made, one, lambda: build_model(made)) for one in (plan, away(plan)))
    assert plain.state.weights > 0
    assert plain.state.gradients > 0
    assert other.state.weights == other.state.gradients == other.state.masters == 0
    assert any("of weights and gradients are on the disk" in note for note in other.notes)
    assert other.step_traffic == plain.step_traffic


def test_nor_does_it_where_they_lie_with_the_host_of_an_accelerator() -> None:
    plan = plan_of("fp32", shard=2, zero=3)
    hosted = replace(plan, memory=MemoryPlan(offload="parameters"), compute=replace(plan.compute, device="cuda"))
    made = recipe_of("fp32", ADAMW, steps=2)
    plain, other = (dry_run_rank(made, one, lambda: build_model(made)) for one in (plan, hosted))
    assert other.state.weights == other.state.gradients == other.state.masters == 0
    assert other.state.optimizer < plain.state.optimizer / 100  # counters of steps
    assert any("in the host's memory, and stepped there" in note for note in other.notes)
    assert other.step_traffic == plain.step_traffic
