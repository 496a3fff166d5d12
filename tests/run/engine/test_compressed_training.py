"""Trainings with compressed gradients: beside every other axis, over skipped steps, saved and resumed, on other
ranks."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, agreed, plan_of, recipe_of, snapshot
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, Plan
from weft.config.recipe import OptimizerRecipe, Recipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.run.checkpoint import Checkpointer, Peers
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.compression.runtime import compression_of
from weft.techniques.core import CheckpointShard
from weft.verify.numerics import assemble

SAVED, END, FEW = 3, 6, 4
PATIENCE = 240.0
"""Seconds until ranks are taken to hang: a busy machine takes its time."""
SIZES: dict[str, Any] = {"hidden_size": 32, "ffn_size": 64, "vocabulary_size": 64, "dropout": 0.0}
ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
CODECS = ("bf16", "int8", "powersgd", "topk", "onebit", "randomk", "signsgd")
BIASED = ("powersgd", "topk", "onebit", "randomk", "signsgd")
SPECIAL: dict[str, dict[str, Any]] = {
    "powersgd": {"powersgd_rank": 2},
    "topk": {"topk_share": 0.05},
    "randomk": {"randomk_share": 0.25},
    "onebit": {"onebit_warmup_steps": 2},
}


def recipe(plan: Plan) -> Recipe:
    """What a plan trains: 1-bit Adam cannot be clipped, and Adam hardly minds."""
    is_clipped = plan.data_parallel.compression != "onebit"
    optimizer = ADAMW if is_clipped else replace(ADAMW, max_grad_norm=None)
    made = recipe_of(plan.compute.precision, optimizer, steps=END, **SIZES)
    return replace(made, permit=replace(made.permit, compression=CODECS))


def exact(precision: str = "fp32", **settings: Any) -> Plan:
    """Buckets of several parameters: what these tests wait for is messages, not bytes."""
    return plan_of(precision, bucket_bytes=20_000, **settings)


def compressed(codec: str, precision: str = "fp32", **settings: Any) -> Plan:
    plan = exact(precision, **settings)
    return replace(plan, data_parallel=replace(plan.data_parallel, compression=codec, **SPECIAL.get(codec, {})))


MESHES: dict[str, dict[str, Any]] = {
    "zero 0": {"replicate": 2},
    "zero 1": {"replicate": 2, "zero": 1},
    "zero 2": {"replicate": 2, "zero": 2},
    "uneven shares": {"replicate": 2, "zero": 1, "shares": (3, 1)},
    "hybrid": {"replicate": 2, "shard": 2, "zero": 3, "micro": 1},
    "tensor": {"replicate": 2, "tensor": 2},
    "tensor and sequence": {"replicate": 2, "tensor": 2, "sequence": True, "zero": 1},
    "pipeline": {"replicate": 2, "pipeline": 2, "zero": 1, "micro": 1},
    "hybrid pipeline": {"replicate": 2, "shard": 2, "pipeline": 2, "zero": 3, "micro": 1},
    "hybrid tensor": {"replicate": 2, "shard": 2, "tensor": 2, "zero": 3, "micro": 1},
}


def fits(codec: str, settings: dict[str, Any]) -> bool:
    """1-bit Adam goes on once per step, and ZeRO-2 reduces in every microbatch."""
    return codec != "onebit" or settings.get("zero") != 2


# ── beside other techniques ───────────────────────────────────────────────────────────────────────────────────────────


def shared_mesh(plans: dict[str, Plan]) -> Mesh:
    """The groups of plans with equal axes, made once."""
    (axes,) = {plan.mesh for plan in plans.values()}
    return Mesh(axes, torch.device("cpu"))


def train_all(plans: dict[str, Plan], steps: int) -> dict[str, Seen]:
    mesh = shared_mesh(plans)
    results: dict[str, Seen] = {}
    for name, plan in plans.items():
        training = Training(recipe(plan), plan, mesh=mesh)
        for step in range(steps):
            training.step(step)
        results[name] = training.finished()
    return results


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_as_without_compression(ranks: Any, mesh: str) -> None:
    """Losses of a few steps stay near those of exact sums: rounding codecs closely, biased ones at their first step
    too, because its loss is that of the first weights."""
    plans = {codec: compressed(codec, **MESHES[mesh]) for codec in CODECS if fits(codec, MESHES[mesh])}
    plans["none"] = exact(**MESHES[mesh])
    for plan in plans.values():
        check_plan(plan, recipe(plan), facts_of(recipe(plan)), plan.mesh.world_size)
        check_runnable(plan)
    results = ranks.run(plans["none"].mesh.world_size, train_all, plans, FEW, timeout=PATIENCE)
    seen = {name: agreed([one[name] for one in results]) for name in plans}
    for name in set(plans) - {"none"}:
        limit = {"bf16": 1e-3, "int8": 1e-2}.get(name, 0.1)
        assert seen[name].losses[0] == seen["none"].losses[0], name
        assert seen[name].losses == pytest.approx(seen["none"].losses, rel=limit), name
        if name in ("bf16", "powersgd") or mesh not in ("hybrid pipeline", "hybrid tensor"):  # shards are small
            assert seen[name].losses != seen["none"].losses, f"{name} compressed nothing"
    assert all(seen[name].bytes["residuals"] > 0 for name in BIASED if name in plans)
    assert seen["none"].bytes["residuals"] == 0
    for name in plans:  # copies of a weight on several ranks are the same bits
        copies: dict[tuple[str, int, int], Tensor] = {}
        for stored in (stored for one in results for stored in one[name].state if stored.name.startswith("model/")):
            key = (stored.name, stored.split.index if stored.split else -1, stored.start)
            first = copies.setdefault(key, stored.tensor)
            if len(first) == len(stored.tensor):
                assert torch.equal(first, stored.tensor), (name, key)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_half_precision(ranks: Any, codec: str) -> None:
    for precision in ("bf16", "fp16"):
        plan = compressed(codec, precision, replicate=2, zero=1)
        results = ranks.run(2, train_all, {"it": plan, "none": exact(precision, replicate=2, zero=1)}, END)
        assert results[0]["it"].losses == pytest.approx(results[0]["none"].losses, rel=0.02)


def test_biased_codecs_in_bf16(ranks: Any) -> None:
    plans = {codec: compressed(codec, "bf16", replicate=2, zero=1) for codec in BIASED}
    plans["none"] = exact("bf16", replicate=2, zero=1)
    results = ranks.run(2, train_all, plans, END)
    for codec in BIASED:
        assert agreed([one[codec] for one in results]).losses == pytest.approx(results[0]["none"].losses, rel=0.1)


# ── skipped steps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def skip_all(plans: dict[str, Plan]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]]:
    mesh = shared_mesh(plans)
    return {name: skip(Training(recipe(plan), plan, mesh=mesh)) for name, plan in plans.items()}


def skip(training: Training) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    """Train with a loss that one rank breaks at a step: all state before and after that step."""
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for step in range(END):
        if step == SAVED:
            before = {stored.name: stored.tensor for stored in snapshot(training.state)}
            layer = next(m for m in training.state.model.module.modules() if isinstance(m, torch.nn.Linear))
            if training.mesh.rank == 1:
                handle = layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
                training.step(step)
                handle.remove()
            else:
                training.step(step)
            after = {stored.name: stored.tensor for stored in snapshot(training.state)}
        else:
            training.step(step)
    return before, after, training.seen.skipped


@pytest.mark.parametrize("mesh", ["zero 0", "zero 2", "hybrid"])
def test_a_skipped_step_freezes_everything(ranks: Any, mesh: str) -> None:
    """Under hybrid sharding what breaks on one rank of one replica is not finite on all shards of both."""
    plans = {codec: compressed(codec, **MESHES[mesh]) for codec in BIASED if fits(codec, MESHES[mesh])}
    for one in ranks.run(plans["topk"].mesh.world_size, skip_all, plans, timeout=PATIENCE):
        for codec, (before, after, skipped) in one.items():
            assert skipped == [step == SAVED for step in range(END)], codec
            assert [name for name in before if name.startswith("compression/residual/")], codec
            assert [name for name in before if not torch.equal(before[name], after[name])] == [], codec


# ── saved and resumed ─────────────────────────────────────────────────────────────────────────────────────────────────


def interrupt(plans: dict[str, Plan], folder: Path) -> dict[str, tuple[Seen, Seen]]:
    """Train to the end with a save on the way; and again from that save, by objects made anew."""
    mesh = shared_mesh(plans)
    results: dict[str, tuple[Seen, Seen]] = {}
    for name, plan in plans.items():
        whole = Training(recipe(plan), plan, mesh=mesh)
        keeper = Checkpointer(folder / name, Peers.of_group(mesh["world"]), file_bytes=50_000)
        for step in range(END):
            if step == SAVED:
                keeper.save(step, whole.state.checkpoint_shards(), whole.state.state())
            whole.step(step)
        again = Training(recipe(plan), plan, mesh=mesh)
        again.state.restored(keeper.load("latest", again.state.checkpoint_shards()))
        for step in range(SAVED, END):
            again.step(step)
        results[name] = whole.finished(), again.finished()
    return results


@pytest.mark.parametrize("mesh", ["zero 0", "zero 2", "hybrid", "tensor and sequence", "pipeline"])
def test_the_same_plan_goes_on_bit_for_bit(ranks: Any, tmp_path: Path, mesh: str) -> None:
    plans = {codec: compressed(codec, **MESHES[mesh]) for codec in CODECS if fits(codec, MESHES[mesh])}
    results = ranks.run(plans["int8"].mesh.world_size, interrupt, plans, tmp_path, timeout=PATIENCE)
    for name in plans:
        whole, again = agreed([one[name][0] for one in results]), agreed([one[name][1] for one in results])
        assert again.losses == whole.losses[SAVED:], name
        for one in results:
            pairs = list(zip(one[name][0].state, one[name][1].state, strict=True))
            assert [a.name for a, b in pairs if not torch.equal(a.tensor, b.tensor)] == [], name


def leg(
    plan: Plan, folder: Path, first: int, last: int, mesh: Mesh | None = None
) -> tuple[list[CheckpointShard], list[CheckpointShard]]:
    """Train steps [first, last) from what the folder holds and save: what compression held at the start and the end."""
    training = Training(recipe(plan), plan, mesh=mesh)
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    if first:
        training.state.restored(keeper.load("latest", training.state.checkpoint_shards()))
    begun = [replace(p, tensor=p.tensor.clone()) for p in training.state.model.stores.checkpoint_shards()]
    for step in range(first, last):
        training.step(step)
    keeper.save(last, training.state.checkpoint_shards(), training.state.state())
    return begun, training.state.model.stores.checkpoint_shards()


def owed(stored_shards: list[list[CheckpointShard]]) -> dict[str, Tensor]:
    """What all ranks together owe to each parameter."""
    ranks = max((stored.addend[1] for group in stored_shards for stored in group if stored.addend), default=0)
    total: dict[str, Tensor] = {}
    for index in range(ranks):
        mine = [
            [replace(p, addend=None) for p in group if p.addend and p.addend[0] == index] for group in stored_shards
        ]
        for name, tensor in assemble(mine).items():
            total[name] = total[name] + tensor if name in total else tensor.double()
    return total


CHAIN: list[dict[str, Any]] = [
    {"replicate": 4, "micro": 1},
    {"replicate": 2, "zero": 1},
    {"replicate": 2, "shard": 2, "zero": 3, "micro": 1},
    {"replicate": 3, "zero": 2, "micro": 1, "shares": (3, 3, 2)},
    {"replicate": 2, "tensor": 2, "zero": 0},
]


def leg_of_all(plans: dict[str, Plan], folder: Path, first: int, last: int) -> dict[str, tuple[Any, Any]]:
    mesh = shared_mesh(plans)
    return {name: leg(plan, folder / name, first, last, mesh) for name, plan in plans.items()}


def test_other_ranks_go_on_owing_the_same_sum(ranks: Any, tmp_path: Path) -> None:
    """Over plans with 4, 2, 2 × 2 and 3 data ranks, and two tensor ranks: what is owed to each weight never changes."""
    before: dict[str, dict[str, Tensor]] = {}
    for number, settings in enumerate(CHAIN):
        plans = {codec: compressed(codec, **settings) for codec in BIASED if codec != "onebit"}
        world, steps = plans["topk"].mesh.world_size, (2 * number, 2 * number + 2)
        results = ranks.run(world, leg_of_all, plans, tmp_path, *steps, timeout=PATIENCE)
        for codec in plans:
            begun = owed([one[codec][0] for one in results])
            if number:
                common = before[codec].keys() & begun.keys()
                assert len(common) > 8, f"the plans compress the same matrices of {codec}, or nearly"
                for name in common:
                    torch.testing.assert_close(begun[name], before[codec][name], rtol=1e-5, atol=1e-9)
            before[codec] = owed([one[codec][1] for one in results])
            assert any(bool(tensor.any()) for tensor in before[codec].values()), codec


ONEBIT_CHAIN: list[dict[str, Any]] = [
    {"replicate": 4, "micro": 1},
    {"replicate": 3, "zero": 1, "micro": 1, "shares": (3, 3, 2)},
    {"replicate": 2, "tensor": 2},
]
"""1-bit Adam on other ranks: on two meshes a rank sees whole matrices, on the last one parts of them."""


@dataclass(frozen=True, slots=True)
class Momenta:
    """What 1-bit Adam holds on all ranks together, by parameter."""

    owed: dict[str, Tensor]
    sent: dict[str, Tensor]
    """Momenta over 1 − β, as all ranks know them from the last exchange; nan where ranks disagree."""
    steps: dict[str, int]
    average: dict[str, Tensor]
    """The optimizer's own."""

    @classmethod
    def of(cls, stored_shards: list[list[CheckpointShard]]) -> Momenta:
        def shared(kind: str) -> dict[str, Tensor]:
            mine = [[p for p in group if p.name.startswith(f"compression/{kind}/")] for group in stored_shards]
            return {name.removeprefix(f"compression/{kind}/"): results for name, results in assemble(mine).items()}

        averages = [[p for p in group if p.name.startswith("optimizer/exp_avg/")] for group in stored_shards]
        return cls(
            owed={name.removeprefix("compression/residual/"): results for name, results in owed(stored_shards).items()},
            sent=shared("momentum"),
            steps={name: int(results) for name, results in shared("steps").items()},
            average={name.removeprefix("optimizer/exp_avg/"): results for name, results in assemble(averages).items()},
        )


def whole_sample(index: int) -> dict[str, Tensor]:
    """Ten tokens whose labels all count: the gradients of every step have one scale, and so have sums over steps."""
    tokens = torch.randint(SIZES["vocabulary_size"], (1, 11), generator=torch.Generator().manual_seed(index))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def leg_of_onebit(
    plan: Plan, folder: Path, first: int, last: int, trained: Recipe | None = None
) -> tuple[list[CheckpointShard], list[CheckpointShard]]:
    """Train steps [first, last) from what the folder holds and save: all state at the start and at the end."""
    training = Training(trained or recipe(plan), plan, sample=whole_sample)
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    if first:
        training.state.restored(keeper.load("latest", training.state.checkpoint_shards()))
    begun = snapshot(training.state)
    for step in range(first, last):
        training.step(step)
    keeper.save(last, training.state.checkpoint_shards(), training.state.state())
    return begun, snapshot(training.state)


def test_1_bit_adam_goes_on_on_other_ranks(ranks: Any, tmp_path: Path) -> None:
    """What is owed keeps its sum; momenta, which are sums over all samples, stay what they are.

    Where a rank sees other parts of the matrices a second warm-up begins, whose exact sums pay what was owed.
    """
    decay = ADAMW.betas[0]
    before = Momenta({}, {}, {}, {})
    for number, settings in enumerate(ONEBIT_CHAIN):
        plan = compressed("onebit", **settings)
        results = ranks.run(plan.mesh.world_size, leg_of_onebit, plan, tmp_path, 3 * number, 3 * number + 3)
        begun, ended = (Momenta.of([one[moment] for one in results]) for moment in (0, 1))
        if number:
            assert before.owed.keys() & begun.owed.keys()
            for name in before.owed.keys() & begun.owed.keys():
                torch.testing.assert_close(begun.owed[name], before.owed[name], rtol=1e-5, atol=1e-9)
        goes_on = number < 2
        assert set(begun.steps.values()) == ({3 * number} if goes_on else {0})
        for name, sent in begun.sent.items():
            assert torch.equal(sent, before.sent[name] if number and goes_on else torch.zeros_like(sent)), name
        if goes_on:  # the optimizer has made the same momentum of what came out of the exchange
            for name, sent in ended.sent.items():
                average = ended.average[name].view(-1)
                assert ((1 - decay) * sent - average).norm() <= 1e-5 * average.norm(), name
        assert any(bool(tensor.any()) for tensor in ended.owed.values()), "nothing was compressed"
        before = ended


def test_a_second_warm_up_pays_what_was_owed(ranks: Any, tmp_path: Path) -> None:
    """On shards, where a checkpoint of whole matrices says nothing about momenta, against a run that forgets."""
    ranks.run(2, leg_of_onebit, compressed("onebit", replicate=2), tmp_path / "it", 0, 3)
    shutil.copytree(tmp_path / "it", tmp_path / "none")
    plan, unclipped = compressed("onebit", **MESHES["hybrid"]), recipe(compressed("onebit"))
    results = ranks.run(4, leg_of_onebit, plan, tmp_path / "it", 3, 4)
    begun, ended = (Momenta.of([one[moment] for one in results]) for moment in (0, 1))
    forgot = ranks.run(4, leg_of_onebit, exact(**MESHES["hybrid"]), tmp_path / "none", 3, 4, unclipped)
    without = Momenta.of([one[1] for one in forgot]).average
    assert not any(bool(tensor.any()) for tensor in ended.owed.values())
    for name, debt in begun.owed.items():
        paid = (ended.average[name] - without[name]) / (1 - ADAMW.betas[0])
        assert (paid - debt).norm() <= 1e-4 * debt.norm(), name


def test_compression_may_begin_and_end_with_a_resume(ranks: Any, tmp_path: Path) -> None:
    """Nothing is owed by a checkpoint without compression; and one with it is told to be dropped, once."""
    plain = exact(replicate=2)
    ranks.run(2, leg, plain, tmp_path, 0, 2)
    begun = [one[0] for one in ranks.run(2, leg, compressed("topk", replicate=2), tmp_path, 2, 4)]
    assert owed(begun)
    assert all(not bool(tensor.any()) for tensor in owed(begun).values())
    messages = ranks.run(2, told_by, "weft.run.checkpoint", leg, plain, tmp_path, 4, 5)
    assert len(messages[0]) == 1
    assert "what compressed gradients still owed to" in messages[0][0]
    assert "it is dropped" in messages[0][0]
    assert messages[1] == []


def told_by(room: str, job: Callable[..., Any], *args: Any, **settings: Any) -> list[str]:
    """Warnings of a room while this rank does a job."""
    messages = list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger(room), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        job(*args, **settings)
    finally:
        logger.removeHandler(listener)
    return messages


def what_is_told(plans: dict[str, Plan]) -> dict[str, list[str]]:
    mesh = shared_mesh(plans)
    return {name: told_by("weft.techniques", Training, recipe(plan), plan, mesh=mesh) for name, plan in plans.items()}


def test_what_is_not_proven_to_converge_is_said_aloud_once(ranks: Any) -> None:
    plans = {codec: compressed(codec, replicate=2) for codec in CODECS}
    first, second = ranks.run(2, what_is_told, plans)
    assert all(messages == [] for messages in second.values())
    for codec, messages in first.items():
        if codec not in ("randomk", "signsgd"):
            assert messages == [], codec
            continue
        (message,) = messages
        assert f'plan.data_parallel.compression = "{codec}": nothing guarantees that this training conv' in message
        assert 'or use "int8"' in message


def test_1_bit_adam_refuses_an_optimizer_that_it_cannot_freeze() -> None:
    mesh = Mesh(MeshPlan(), torch.device("cpu"))
    with pytest.raises(PlanError, match="freezes the variance of AdamW, which your own optimizer does not allow"):
        compression_of(compressed("onebit", replicate=2), 1, mesh, None)
