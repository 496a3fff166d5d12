"""Replicas that step by themselves: beside one process that plays them all, over skipped steps, saved and resumed, on
other replicas."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, agreed, plan_of, recipe_of, snapshot, train
from engine_models import branches_blueprint, branches_sample, tables_blueprint, tables_sample
from torch import Tensor

from weft.comm.telemetry import Recorder
from weft.config.plan import Plan
from weft.config.recipe import OptimizerRecipe, Recipe
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.engine import Trainer, TrainingResult
from weft.run.engine.proof import optimizer_of
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.core import CheckpointShard
from weft.techniques.local_steps.runtime import LocalRounds
from weft.verify.dry_run._collective_recorder import CollectiveRecorder
from weft.verify.numerics import TOLERANCES, PlainLoop, TrialData, assemble, compare
from weft.verify.numerics._plain import _inputs, _module

STEPS, ROUND = 8, 3
"""Rounds end after steps 3 and 6, and with the training after 8."""
LIMIT = 300.0
"""Seconds: a busy machine takes its time, and a hang is a hang."""
_AGREEMENT = 200
"""Bytes of the step's one agreement of all ranks, at most."""
ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-6, max_grad_norm=0.5, warmup_steps=2)
PLAIN = OptimizerRecipe(name="sgd", momentum=0.0, learning_rate=0.05, weight_decay=0.0, max_grad_norm=None)


def recipe(optimizer: OptimizerRecipe = ADAMW, precision: str = "fp64", **run: Any) -> Recipe:
    made = recipe_of(precision, optimizer, steps=STEPS, dropout=0.0)
    return replace(made, permit=replace(made.permit, local_steps=ROUND), run=replace(made.run, **run))


def local(steps: int, precision: str = "fp64", *, rate: float = 0.7, momentum: float = 0.9, **settings: Any) -> Plan:
    plan = plan_of(precision, **settings)
    data = replace(plan.data_parallel, local_steps=steps, outer_learning_rate=rate, outer_momentum=momentum)
    return replace(plan, data_parallel=data)


MESHES: dict[str, dict[str, Any]] = {
    "2 replicas": {"replicate": 2},
    "one replica counts nothing": {"replicate": 2, "micro": 1, "shares": (7, 1)},
    "3 uneven replicas": {"replicate": 3, "micro": 1, "shares": (3, 3, 2)},
    "4 replicas": {"replicate": 4, "micro": 1},
    "2 x 2 zero 1": {"replicate": 2, "shard": 2, "zero": 1, "micro": 1},
    "2 x 2 zero 2": {"replicate": 2, "shard": 2, "zero": 2, "micro": 1, "shares": (3, 2, 2, 1)},
    "2 x 2 zero 3": {"replicate": 2, "shard": 2, "zero": 3, "micro": 1},
    "tensor": {"replicate": 2, "tensor": 2, "sequence": True},
    "pipeline": {"replicate": 2, "pipeline": 2, "micro": 1},
}


def weights(stored_shards: list[list[CheckpointShard]]) -> dict[str, Tensor]:
    """Whole weights; nan where replicas differ."""
    return {name: tensor for name, tensor in assemble(stored_shards).items() if name.startswith("model/")}


def written(stored_shards: list[list[CheckpointShard]]) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    return assemble([[stored for stored in group if stored.counts] for group in stored_shards])


# ── what is computed ──────────────────────────────────────────────────────────────────────────────────────────────────


def trained(made: Recipe, plan: Plan, steps: int) -> tuple[list[CheckpointShard], Seen]:
    """First weights, and what was seen."""
    training = Training(made, plan)
    initial = snapshot(training.state)
    for step in range(steps):
        training.step(step)
    return initial, training.finished()


def played(
    made: Recipe, plan: Plan, initial: Mapping[str, Tensor]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """One process plays all replicas, with torch's own optimizers inside and outside: losses, the largest norms of
    each step, and the weights at the end."""
    data, shard, blueprint = plan.data_parallel, plan.mesh.shard, build_model(made)
    loop = PlainLoop(recipe=made, plan=plan, label_range=None)
    anchor = dict(_module(blueprint, initial).named_parameters())
    replicas = [_module(blueprint, initial) for _ in range(plan.mesh.replicate)]
    inner = [optimizer_of(made, dict(module.named_parameters())) for module in replicas]
    momentum = data.outer_momentum
    outer = torch.optim.SGD(anchor.values(), lr=data.outer_learning_rate, momentum=momentum, nesterov=momentum > 0)
    samples = [TrialData(blueprint, plan, data_index=i, seed=made.run.seed) for i in range(plan.mesh.data)]
    losses, norms, counted = list[float](), list[float](), [0.0] * len(replicas)
    for step in range(STEPS):
        sums, counts, results = list[float](), list[float](), list[float]()
        for index, (module, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            module.zero_grad()
            batches = [b for one in samples[index * shard : (index + 1) * shard] for b in one.microbatches(step)]
            totals = [blueprint.loss(module(**_inputs(blueprint, batch)), batch) for batch in batches]
            loss, count = sum(total for total, _ in totals), sum(float(count) for _, count in totals)
            assert isinstance(loss, Tensor)
            (loss / (count or 1.0)).backward()
            results.append(loop._clip(list(module.parameters())))
            if count:
                loop._step(optimizer, step)
            sums.append(float(loss.detach()))
            counts.append(count)
        losses.append(sum(sums) / sum(counts))
        norms.append(max(results))
        counted = [total + count for total, count in zip(counted, counts, strict=True)]
        if (step + 1) % data.local_steps == 0 or step + 1 == STEPS:
            with torch.no_grad():
                for name, parameter in anchor.items():
                    drifts = [parameter - module.get_parameter(name) for module in replicas]
                    parameter.grad = sum(
                        (count / sum(counted) * drift for count, drift in zip(counted, drifts, strict=True)),
                        torch.zeros_like(parameter),
                    )
                outer.step()
                for module in replicas:
                    for name, parameter in anchor.items():
                        module.get_parameter(name).copy_(parameter)
            counted = [0.0] * len(replicas)
    return losses, norms, {f"model/{name}": parameter.detach() for name, parameter in anchor.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_replicas_are_those_that_one_process_plays(ranks: Any, mesh: str) -> None:
    """AdamW inside, Nesterov outside, tied weights, accumulation, unequal shares and counts, over three rounds of which
    the last is short."""
    made, plan = recipe(), local(ROUND, **MESHES[mesh])
    check_plan(plan, made, facts_of(made), plan.mesh.world_size)
    check_runnable(plan)
    actual = ranks.run(plan.mesh.world_size, trained, made, plan, STEPS, timeout=LIMIT)
    losses, norms, expected = played(made, plan, weights([one[0] for one in actual]))
    seen = agreed([one[1] for one in actual])
    assert seen.losses == pytest.approx(losses, rel=TOLERANCES["fp64"])
    assert seen.norms == pytest.approx(norms, rel=TOLERANCES["fp64"])
    worst = compare(expected, weights([one[1].state for one in actual]))[0]
    assert worst.relative < TOLERANCES["fp64"], str(worst)


@pytest.mark.parametrize("mesh", ["2 replicas", "3 uneven replicas", "one replica counts nothing", "2 x 2 zero 3"])
def test_rounds_of_one_plain_step_are_ordinary_data_parallelism(ranks: Any, mesh: str) -> None:
    made = recipe(replace(PLAIN, weight_decay=0.1))
    plans = {"local": local(1, rate=1.0, momentum=0.0, **MESHES[mesh]), "ordinary": plan_of(**MESHES[mesh])}
    results = ranks.run(plans["local"].mesh.world_size, train_both, made, plans, timeout=LIMIT)
    local_, ordinary = ([one[name] for one in results] for name in plans)
    assert agreed(local_).losses == pytest.approx(agreed(ordinary).losses, rel=TOLERANCES["fp64"])
    worst = compare(weights([one.state for one in ordinary]), weights([one.state for one in local_]))[0]
    assert worst.relative < TOLERANCES["fp64"], str(worst)


def train_both(made: Recipe, plans: Mapping[str, Plan], model: str = "") -> dict[str, Seen]:
    if not model:
        return {name: train(made, plan, STEPS) for name, plan in plans.items()}
    build = branches_blueprint if model == "branches" else lambda: tables_blueprint(sparse=True)
    sample = branches_sample if model == "branches" else tables_sample
    return {name: train(made, plan, STEPS, build, sample) for name, plan in plans.items()}


@pytest.mark.parametrize("model", ["branches", "tables"])
def test_parameters_of_some_samples_and_sparse_tables(ranks: Any, model: str) -> None:
    """A layer that only one replica used in a step stays as it is on the other; rows of tables meet inside one."""
    plans = {"local": local(1, rate=1.0, momentum=0.0, replicate=2), "ordinary": plan_of(replicate=2)}
    results = ranks.run(2, train_both, recipe(PLAIN), plans, model, timeout=LIMIT)
    local_, ordinary = ([one[name] for one in results] for name in plans)
    assert agreed(local_).losses == pytest.approx(agreed(ordinary).losses, rel=TOLERANCES["fp64"])
    worst = compare(weights([one.state for one in ordinary]), weights([one.state for one in local_]))[0]
    assert worst.relative < TOLERANCES["fp64"], str(worst)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(ranks: Any, precision: str) -> None:
    """Masters are what is averaged: all replicas end with the same bits, near those of fp32."""
    settings: dict[str, Any] = {"replicate": 2, "shard": 2, "zero": 1, "micro": 1}
    results = ranks.run(
        4, trained, recipe(precision=precision), local(ROUND, precision, **settings), STEPS, timeout=LIMIT
    )
    wide = ranks.run(4, trained, recipe(precision="fp32"), local(ROUND, "fp32", **settings), STEPS, timeout=LIMIT)
    assert agreed([one[1] for one in results]).losses == pytest.approx(wide[0][1].losses, rel=0.02)
    assert not [
        name for name, tensor in weights([one[1].state for one in results]).items() if bool(tensor.isnan().any())
    ]


# ── on the wire ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sent(plan: Plan) -> tuple[list[dict[str, int]], int, int]:
    """Bytes that each step handed to collectives between replicas, by axis; those of a round as claimed, and what is
    held for it."""
    training = Training(recipe(), plan)
    results: list[dict[str, int]] = []
    with CollectiveRecorder(training.mesh) as recorder:
        for step in range(STEPS):
            recorder.issued.clear()
            training.step(step)
            sizes: dict[str, int] = {}
            for one in recorder.issued:
                if one.axis == "replicate" or (one.axis == "data" and one.size_bytes > _AGREEMENT):
                    sizes[one.axis] = sizes.get(one.axis, 0) + one.size_bytes
            results.append(sizes)
    (rounds,) = (each for each in training.state.model.techniques if isinstance(each, LocalRounds))
    return results, rounds.round_bytes(), rounds.state_bytes()


@pytest.mark.parametrize("mesh", ["2 replicas", "2 x 2 zero 3"])
def test_replicas_send_their_weights_once_a_round(ranks: Any, mesh: str) -> None:
    plan = local(ROUND, **MESHES[mesh])
    results = ranks.run(plan.mesh.world_size, sent, plan, timeout=LIMIT)
    ends = (ROUND - 1, 2 * ROUND - 1, STEPS - 1)
    for steps, claimed, held in results:
        assert steps == [{"replicate": claimed} if step in ends else {} for step in range(STEPS)]
        assert held == 2 * claimed, "the anchor and the momentum"
    parameters = sum(p.numel() for p in build_model(recipe()).module.parameters()) * 8
    whole = sum(claimed for _, claimed, _ in results) / plan.mesh.replicate
    assert parameters <= whole <= 1.2 * parameters, "weights in fp64, and padding"


# ── skipped steps, evaluation ─────────────────────────────────────────────────────────────────────────────────────────


def skip(
    plan: Plan, broken: int
) -> tuple[list[CheckpointShard], list[CheckpointShard], list[bool], list[CheckpointShard]]:
    """All state before and after a step that rank 1's loss breaks, which steps were skipped, and the state at the
    end."""
    training = Training(recipe(), plan)
    before: list[CheckpointShard] = []
    after: list[CheckpointShard] = []
    for step in range(STEPS):
        if step != broken:
            training.step(step)
            continue
        before = snapshot(training.state)
        layer = next(m for m in training.state.model.module.modules() if isinstance(m, torch.nn.Linear))
        if training.mesh.rank == 1:
            handle = layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
            training.step(step)
            handle.remove()
        else:
            training.step(step)
        after = snapshot(training.state)
    return before, after, training.seen.skipped, training.finished().state


@pytest.mark.parametrize("broken", [1, ROUND - 1])
def test_a_step_that_one_replica_breaks_is_skipped_by_all(ranks: Any, broken: int) -> None:
    """Nothing changes in the middle of a round; a round whose last step is skipped ends all the same."""
    results = ranks.run(2, skip, local(ROUND, replicate=2), broken, timeout=LIMIT)
    for before, after, skipped, _ in results:
        assert skipped == [step == broken for step in range(STEPS)]
        changed = [a.name for a, b in zip(before, after, strict=True) if not torch.equal(a.tensor, b.tensor)]
        assert bool(changed) == (broken == ROUND - 1)
        assert not [name for name in changed if "optimizer/" in name]
    differ = [bool(tensor.isnan().any()) for tensor in weights([one[1] for one in results]).values()]
    assert any(differ) == (broken == 1)
    assert not [name for name, tensor in weights([one[3] for one in results]).items() if bool(tensor.isnan().any())]


def evaluate(plan: Plan) -> list[tuple[float, bool]]:
    """After every step the validation loss, and whether the weights were the same bits afterwards."""
    training = Training(recipe(), plan)
    made = recipe()
    trainer = Trainer(made, training.state, training.data, training.mesh, Recorder(), checkpointer=None)
    results: list[tuple[float, bool]] = []
    for step in range(STEPS):
        training.step(step)
        before = snapshot(training.state)
        loss = trainer.evaluate()
        pairs = zip(before, snapshot(training.state), strict=True)
        results.append((loss, all(torch.equal(a.tensor, b.tensor) for a, b in pairs)))
    return results


@pytest.mark.parametrize("mesh", ["2 replicas", "2 x 2 zero 2", "2 x 2 zero 3"])
def test_what_replicas_agreed_on_is_evaluated(ranks: Any, mesh: str) -> None:
    plan = local(ROUND, **MESHES[mesh])
    results = ranks.run(plan.mesh.world_size, evaluate, plan, timeout=LIMIT)
    assert all(kept for one in results for _, kept in one)
    for one in results:
        losses = [loss for loss, _ in one]
        assert losses == [loss for loss, _ in results[0]]
        assert losses[0] == losses[1]
        assert losses[2] == losses[3] == losses[4]
        assert losses[5] == losses[6]
        assert len(set(losses)) == 4


# ── saved and resumed ─────────────────────────────────────────────────────────────────────────────────────────────────


def interrupt(plan: Plan, folder: Path, saved: int) -> tuple[Seen, Seen]:
    """Train to the end with a save on the way; and again from that save, by objects made anew."""
    whole = Training(recipe(), plan)
    keeper = Checkpointer(folder, Peers.of_group(whole.mesh["world"]), file_bytes=5000)
    for step in range(STEPS):
        if step == saved:
            keeper.save(step, whole.state.checkpoint_shards(), whole.state.state())
        whole.step(step)
    again = Training(recipe(), plan, mesh=whole.mesh)
    again.state.restored(keeper.load("latest", again.state.checkpoint_shards()))
    for step in range(saved, STEPS):
        again.step(step)
    return whole.finished(), again.finished()


@pytest.mark.parametrize("saved", [ROUND, ROUND + 1])
@pytest.mark.parametrize("mesh", ["one replica counts nothing", "2 x 2 zero 2", "2 x 2 zero 3", "tensor", "pipeline"])
def test_the_same_plan_goes_on_bit_for_bit(ranks: Any, tmp_path: Path, mesh: str, saved: int) -> None:
    """From the end of a round, and from the middle of one."""
    plan = local(ROUND, **MESHES[mesh])
    results = ranks.run(plan.mesh.world_size, interrupt, plan, tmp_path, saved, timeout=LIMIT)
    whole, again = agreed([one[0] for one in results]), agreed([one[1] for one in results])
    assert again.losses == whole.losses[saved:]
    for one in results:
        pairs = list(zip(one[0].state, one[1].state, strict=True))
        assert [a.name for a, b in pairs if not torch.equal(a.tensor, b.tensor)] == []


def leg(
    plan: Plan, folder: Path, first: int, last: int
) -> tuple[list[CheckpointShard], list[CheckpointShard], list[str]]:
    """Train steps [first, last) from what the folder holds and save: all state at the start and at the end, and what
    was said."""
    messages = list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    training = Training(recipe(), plan)
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    logger, listener = logging.getLogger("weft.run.checkpoint"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        if first:
            training.state.restored(keeper.load("latest", training.state.checkpoint_shards()))
    finally:
        logger.removeHandler(listener)
    begun = snapshot(training.state)
    for step in range(first, last):
        training.step(step)
    ended = snapshot(training.state)
    keeper.save(last, training.state.checkpoint_shards(), training.state.state())
    return begun, ended, messages


def chain(ranks: Any, folder: Path, plan: Plan, first: int, last: int) -> tuple[Any, Any, list[str]]:
    """Begun and ended states of all ranks, and what rank 0 said; the others say nothing."""
    results = ranks.run(plan.mesh.world_size, leg, plan, folder, first, last, timeout=LIMIT)
    assert not [messages for one in results[1:] for messages in one[2]]
    return [one[0] for one in results], [one[1] for one in results], results[0][2]


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor], *prefixes: str) -> None:
    names = [name for name in left if name.startswith(prefixes)]
    assert names
    for name in names:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0)


def test_other_replicas_go_on_from_the_end_of_a_round(ranks: Any, tmp_path: Path) -> None:
    """2 replicas, 2 x 2, 4, then ordinary data parallelism, and back: weights, outer momentum, and the first replica's
    optimizer states for all; what finds no place is told once."""
    two, two_by_two = local(2, replicate=2), local(2, replicate=2, shard=2, zero=3, micro=1)
    four, ordinary = local(2, replicate=4, micro=1), plan_of(replicate=2, zero=1)
    _, ended, messages = chain(ranks, tmp_path, two, 0, 2)
    assert messages == []
    begun, more, messages = chain(ranks, tmp_path, two_by_two, 2, 4)
    same(written(begun), written(ended), "model/", "optimizer/", "local/momentum/", "local/1-of-2/optimizer/")
    assert messages == []
    begun, ended, messages = chain(ranks, tmp_path, four, 4, 6)
    same(assemble(begun), written(more), "model/", "optimizer/", "local/momentum/")
    assert len(messages) == 1
    assert "holds the optimizer states of all replicas but the first, for which this plan has no place" in messages[0]
    begun, more, messages = chain(ranks, tmp_path, ordinary, 6, 8)
    same(assemble(begun), written(ended), "model/", "optimizer/")
    assert len(messages) == 1
    assert "of all replicas but the first, and the outer momentum of local steps, for which" in messages[0]
    begun, _, messages = chain(ranks, tmp_path, two, 8, 9)
    same(assemble(begun), written(more), "model/", "optimizer/")
    assert messages == []
    assert not any(bool(t.any()) for name, t in assemble(begun).items() if name.startswith("local/momentum/"))


def test_other_replicas_drop_a_round_that_was_under_way(ranks: Any, tmp_path: Path) -> None:
    """They start from what the replicas agreed on last, and say so."""
    _, agreed_on, _ = chain(ranks, tmp_path, local(ROUND, replicate=2), 0, ROUND)
    _, ended, messages = chain(ranks, tmp_path, local(ROUND, replicate=2), ROUND, ROUND + 1)
    assert messages == []
    assert any(bool(tensor.isnan().any()) for tensor in weights(ended).values()), "replicas differ"
    begun, _, messages = chain(ranks, tmp_path, local(ROUND, replicate=4, micro=1), ROUND + 1, ROUND + 2)
    same(assemble(begun), written(agreed_on), "model/", "local/momentum/")
    assert len(messages) == 1
    assert "what each replica has learnt since all were averaged" in messages[0]


def run_loop(
    plan: Plan, folder: Path
) -> tuple[TrainingResult, TrainingResult, list[CheckpointShard], list[CheckpointShard]]:
    """The trainer's own loop to the end; and again from its save in the middle of the last round."""
    made = recipe(evaluate_every=2, save_every=STEPS - 1)
    results: list[tuple[TrainingResult, list[CheckpointShard]]] = []
    for resumed in (False, True):
        training = Training(made, plan)
        keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
        trainer = Trainer(
            made, training.state, training.data, training.mesh, Recorder(),
            checkpointer=TieredCheckpointer(keeper, None, ranks_on_host=1),
        )  # fmt: skip
        if resumed:
            trainer.resume(folder / f"step-{STEPS - 1:06d}")
        results.append((trainer.run(), snapshot(training.state)))
    return results[0][0], results[1][0], results[0][1], results[1][1]


def test_the_loop_ends_with_weights_that_all_agree_on(ranks: Any, tmp_path: Path) -> None:
    results = ranks.run(2, run_loop, local(ROUND, replicate=2), tmp_path, timeout=LIMIT)
    for whole, again, state, resumed in results:
        assert whole.steps == again.steps == STEPS
        assert again.losses == whole.losses[STEPS - 1 :]
        assert again.validation_loss == whole.validation_loss == results[0][0].validation_loss
        pairs = zip(state, resumed, strict=True)
        assert [a.name for a, b in pairs if not torch.equal(a.tensor, b.tensor)] == []
    assert not [name for name, tensor in weights([one[2] for one in results]).items() if bool(tensor.isnan().any())]
