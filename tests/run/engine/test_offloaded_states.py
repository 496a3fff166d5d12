"""Masters and optimizer states on a disk: the same training bit for bit, less on the device, refusals, what is left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, agreed, plan_of, recipe_of, train

from weft.config.plan import ComputePlan, MemoryPlan, Plan
from weft.config.recipe import OptimizerRecipe
from weft.errors import PlanError
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.techniques.check import check_runnable
from weft.techniques.core import ParameterLayout, Segment, Shard, resident_groups
from weft.techniques.cost_terms import Layout
from weft.techniques.offload.keeper import StateKeeper
from weft.techniques.offload.storage import ALIGNMENT, FileStorage
from weft.techniques.registry import check_no_loop, describe, unsupported_in_script, update_seconds
from weft.verify.dry_run import dry_run_rank
from weft.verify.numerics import TOLERANCES

ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2, average_decay=0.9)
LAMB = OptimizerRecipe(name="lamb", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
LARS = OptimizerRecipe(name="lars", learning_rate=1.0, weight_decay=0.1)
ADAFACTOR = OptimizerRecipe(name="adafactor", learning_rate=1e-2, relative_step=True)
SGD = OptimizerRecipe(name="sgd", learning_rate=1e-2, momentum=0.0)
STEPS, SAVED = 4, 2
CASES: dict[str, tuple[OptimizerRecipe, Plan]] = {
    "adamw, one process": (ADAMW, plan_of()),
    "adamw, zero 0": (ADAMW, plan_of(replicate=2)),
    "adamw, zero 1": (ADAMW, plan_of(replicate=2, zero=1)),
    "adamw, zero 2": (ADAMW, plan_of("bf16", replicate=2, zero=2)),
    "adamw, zero 3": (ADAMW, plan_of("bf16", shard=2, zero=3)),
    "adamw, stages": (ADAMW, plan_of("bf16", pipeline=2)),
    "lamb, zero 1": (LAMB, plan_of("bf16", replicate=2, zero=1)),
    "lars, zero 1": (LARS, plan_of("bf16", replicate=2, zero=1)),
    "adafactor, zero 1": (ADAFACTOR, plan_of("bf16", replicate=2, zero=1)),
}


def on_disk(plan: Plan, folder: str = "") -> Plan:
    return replace(plan, memory=MemoryPlan(offload="optimizer", offload_to="disk", offload_folder=folder))


def both(optimizer: OptimizerRecipe, plan: Plan, steps: int = STEPS) -> tuple[Seen, Seen]:
    made = recipe_of(plan.compute.precision, optimizer, steps=steps)
    return train(made, plan, steps), train(made, on_disk(plan), steps)


def differing(one: Seen, other: Seen) -> list[str]:
    pairs = zip(one.state, other.state, strict=True)
    return [a.name for a, b in pairs if a.name != b.name or not torch.equal(a.tensor, b.tensor)]


@pytest.mark.parametrize("name", CASES)
def test_states_on_a_disk_change_no_bit(ranks: Any, name: str) -> None:
    optimizer, plan = CASES[name]
    results = ranks.run(plan.mesh.world_size, both, optimizer, plan)
    plain, away = agreed([one for one, _ in results]), agreed([other for _, other in results])
    assert away.losses == plain.losses
    assert away.norms == plain.norms
    for one, other in results:
        assert differing(one, other) == []
        assert other.bytes["masters"] == 0
        assert other.bytes["optimizer"] < one.bytes["optimizer"] or optimizer.name == "adafactor"


def test_twenty_steps_end_in_the_same_bits(ranks: Any) -> None:
    plan = plan_of("bf16", replicate=2, zero=1)
    for one, other in ranks.run(2, both, ADAMW, plan, 20):
        assert other.losses == one.losses
        assert differing(one, other) == []


def interrupted(plans: tuple[Plan, Plan], folder: Path) -> tuple[Seen, Seen]:
    """Train under the first plan with a save on the way, skip a step, and go on from the save under the second."""
    made = recipe_of(plans[0].compute.precision, ADAMW, steps=STEPS)
    whole = Training(made, plans[0])
    keeper = Checkpointer(folder, Peers.of_group(whole.mesh["world"]))
    for step in range(STEPS):
        if step == SAVED:
            keeper.save(step, whole.state.checkpoint_shards(), whole.state.state())
        whole.step(step)
    again = Training(made, plans[1], mesh=whole.mesh)
    again.state.restored(keeper.load("latest", again.state.checkpoint_shards()))
    for step in range(SAVED, STEPS):
        again.step(step)
    return whole.finished(), again.finished()


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("saved_on_disk", [True, False])
def test_a_checkpoint_does_not_know_where_states_lay(
    ranks: Any, tmp_path: Path, precision: str, saved_on_disk: bool
) -> None:
    plan = plan_of(precision, replicate=2, zero=1)
    plans = (on_disk(plan), plan) if saved_on_disk else (plan, on_disk(plan))
    for whole, again in ranks.run(2, interrupted, plans, tmp_path):
        assert again.losses == whole.losses[SAVED:]
        assert differing(whole, again) == []


def skipping(plan: Plan) -> Seen:
    """A step whose gradients are not finite, between two others."""
    training = Training(recipe_of("bf16", ADAMW, steps=3), plan)
    training.step(0)
    parameter = next(training.state.model.module.parameters())
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    training.step(1)
    handle.remove()
    training.step(2)
    return training.finished()


def test_a_skipped_step_moves_nothing(ranks: Any) -> None:
    plan = plan_of("bf16", replicate=2, zero=1)
    for one, other in zip(ranks.run(2, skipping, plan), ranks.run(2, skipping, on_disk(plan)), strict=True):
        assert other.skipped == one.skipped == [False, True, False]
        assert differing(one, other) == []


def close_leaves_nothing(folder: str) -> tuple[list[str], int, int]:
    """Files in the folder while training; open descriptors before and after."""
    before = len(os.listdir("/proc/self/fd"))
    training = Training(recipe_of("bf16", ADAMW, steps=2), on_disk(plan_of("bf16"), folder))
    training.step(0)
    seen = os.listdir(folder)
    training.state.close()
    return seen, before, len(os.listdir("/proc/self/fd"))


def test_files_have_no_name_and_end_with_the_training(ranks: Any, tmp_path: Path) -> None:
    ((seen, before, after),) = ranks.run(1, close_leaves_nothing, str(tmp_path / "fast"))
    assert seen == []
    assert after <= before


# ── the keeper itself ─────────────────────────────────────────────────────────────────────────────────────────────────


def shards_of(sizes: list[int], *, narrow: bool = True) -> list[Shard]:
    made = list[Shard]()
    for index, size in enumerate(sizes):
        layout = ParameterLayout(name=f"p{index}", shape=torch.Size([size]))
        segment = Segment(layout=layout, local_shape=layout.shape, offset=0, start=0, length=size)
        made.append(Shard(master=torch.randn(size), segments=[segment]))
        made[-1].weights = made[-1].master.bfloat16() if narrow else None
    return made


def test_groups_pass_through_fewer_buffers_than_there_are(tmp_path: Path) -> None:
    shards = shards_of([700 * index + 3 for index in range(12)])
    before = [shard.master.clone() for shard in shards]
    keeper = StateKeeper(torch.device("cpu"))
    for shard in shards:
        shard.keeper = keeper
    states = [shard.new_state() for shard in shards]
    kept = keeper.begin(shards, lambda size: FileStorage(size, tmp_path, torch.device("cpu")))
    assert kept >= 8 * sum(shard.size for shard in shards)
    assert keeper.buffer_bytes() < kept
    with pytest.raises(RuntimeError, match="size"):
        torch.add(shards[3].master, torch.zeros(shards[3].size))  # whoever forgets to fetch it
    groups = list[list[int]]()
    for turn in range(3):
        for here in resident_groups(shards):
            groups.append(list(here))
            for index in here:
                shards[index].master.add_(1.0)
                states[index].add_(turn + index)
    assert len(groups) > 3 * 3, "more groups than buffers"
    assert sorted(index for group in groups[: len(groups) // 3] for index in group) == list(range(12))
    for here in resident_groups(shards, states=False, writes=False):
        for index in here:
            shards[index].master.zero_()  # nobody said that anything would change
    for index, shard in enumerate(shards):
        assert torch.equal(shard.at_rest(shard.master), before[index] + 1.0 + 1.0 + 1.0)
        assert torch.equal(shard.at_rest(states[index]), torch.full((shard.size,), 3.0 * index + 3.0))
        assert shard.weights is not None
        assert torch.equal(shard.weights, (before[index] + 1.0 + 1.0 + 1.0).bfloat16())
    shards[5].at_rest(shards[5].master).fill_(2.0)
    keeper.refresh(shards)
    assert shards[5].weights is not None
    assert shards[5].weights.eq(2.0).all()
    keeper.close()


def test_a_full_disk_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"needs [\d,.]+ [TP]B in .* for this rank alone, and .* are free"):
        FileStorage(1 << 50, tmp_path, torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot write to.*offload_folder"):
        FileStorage(ALIGNMENT, tmp_path / "file", torch.device("cpu"))


# ── refusals, words, prices, the dry run ──────────────────────────────────────────────────────────────────────────────


def refusal(optimizer: OptimizerRecipe, plan: Plan) -> str:
    try:
        Training(recipe_of(plan.compute.precision, optimizer, steps=2), plan)
    except PlanError as error:
        return str(error)
    return ""


def test_what_would_move_nothing_is_refused(ranks: Any) -> None:
    to_host = replace(plan_of(), memory=MemoryPlan(offload="optimizer"))
    results = [ranks.run(1, refusal, *case)[0] for case in ((SGD, on_disk(plan_of())), (ADAMW, to_host))]
    assert "would move nothing: this optimizer keeps no state" in results[0]
    assert "this rank computes on the host's cores: nothing would get smaller" in results[1]
    with pytest.raises(PlanError, match='with compute.device = "cpu" ranks compute on the host\'s cores'):
        check_runnable(replace(to_host, compute=ComputePlan(device="cpu")))
    check_runnable(on_disk(plan_of()))


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(PlanError, match='offload_to = "disk" has no effect with offload = "none"'):
        MemoryPlan(offload_to="disk")
    with pytest.raises(PlanError, match='offload_folder = "/x" has no effect with offload_to = "host"'):
        MemoryPlan(offload="optimizer", offload_folder="/x")
    with pytest.raises(PlanError, match='offload = "optimizer" needs an optimizer of Weft\'s own'):
        check_no_loop(on_disk(plan_of()))
    assert any("offloads nothing" in line for line in unsupported_in_script(on_disk(plan_of())))


def test_a_disk_is_priced_and_named() -> None:
    plain, away = Layout.of(plan_of()), Layout.of(on_disk(plan_of()))
    assert update_seconds(plain, 3e9) == 0.0
    assert update_seconds(away, 3e9) == pytest.approx(4.0)
    assert "offload optimizer to disk" in list(describe(away))


def test_the_dry_run_holds_less() -> None:
    plan = plan_of("bf16", replicate=2, zero=1)
    made = recipe_of("bf16", replace(ADAMW, average_decay=None), steps=2)
    plain, away = (dry_run_rank(made, one, lambda: build_model(made)) for one in (plan, on_disk(plan)))
    assert away.state.masters == 0
    assert 0 < away.state.optimizer < plain.state.optimizer / 100, "how often each parameter was updated stays"
    assert 0 < away.state.techniques < plain.state.masters + plain.state.optimizer + 16 * ALIGNMENT
    assert any("of masters and optimizer states are on the disk" in note for note in away.notes)
    assert away.step_traffic == plain.step_traffic


def test_a_dry_run_of_host_memory_needs_no_accelerator() -> None:
    """Which other device is meant does not matter to it."""
    plan = plan_of("bf16", replicate=2, zero=1)
    made = recipe_of("bf16", replace(ADAMW, average_decay=None), steps=2)
    report = dry_run_rank(made, replace(plan, memory=MemoryPlan(offload="optimizer")), lambda: build_model(made))
    assert report.state.masters == 0
    assert any("in the memory of the host" in note for note in report.notes), report.notes


def test_one_process_and_two_agree_to_rounding(ranks: Any) -> None:
    """Where states lie beside ZeRO-2 against one process with everything in memory."""
    made = recipe_of("fp64", LAMB, steps=STEPS)
    (expected,) = ranks.run(1, train, made, plan_of(), STEPS)
    actual = ranks.run(2, train, made, on_disk(plan_of(replicate=2, zero=2)), STEPS)
    assert agreed(actual).losses == pytest.approx(expected.losses, rel=TOLERANCES["fp64"])
