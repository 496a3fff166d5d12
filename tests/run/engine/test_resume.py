"""Saved and resumed: bit for bit under the same plan, within rounding under any other, and no sample twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import BATCH, Seen, Training, agreed, plan_of, recipe_of, snapshot, train

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Plan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import WeftError
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.data import BatchSource, data_shape, open_data
from weft.run.data.preparation import prepare_data
from weft.run.engine import Trainer, TrainingResult, create_training
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process

ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=4, average_decay=0.9)
SAVED, END = 3, 6
PLANS = {
    1: {"one": plan_of(), "fp16 one": plan_of("fp16")},
    2: {
        "zero1": plan_of(replicate=2, zero=1),
        "zero3": plan_of(shard=2, zero=3),
        "bf16 zero1": plan_of("bf16", replicate=2, zero=1),
        "bf16 zero3": plan_of("bf16", shard=2, zero=3),
        "fp16 zero2": plan_of("fp16", replicate=2, zero=2),
    },
    4: {"tensor pipeline": plan_of(tensor=2, pipeline=2)},
}


def interrupt(plans: dict[str, Plan], folder: Path) -> dict[str, tuple[Seen, Seen]]:
    """Train to the end with a save on the way; and again from that save, by objects made anew."""
    results: dict[str, tuple[Seen, Seen]] = {}
    for name, plan in plans.items():
        recipe = recipe_of(plan.compute.precision, ADAMW, steps=END)
        whole = Training(recipe, plan)
        keeper = Checkpointer(folder / name, Peers.of_group(whole.mesh["world"]))
        if whole.state.loss_scale is not None:
            whole.state.loss_scale.growth_interval = 2  # so that the scale moves before and after the save
        for step in range(END):
            if step == SAVED:
                keeper.save(step, whole.state.checkpoint_shards(), whole.state.state())
            whole.step(step)
        again = Training(recipe, plan, mesh=whole.mesh)
        again.state.restored(keeper.load("latest", again.state.checkpoint_shards()))
        for step in range(SAVED, END):
            again.step(step)
        results[name] = whole.finished(), again.finished()
    return results


@pytest.mark.parametrize("world", PLANS)
def test_the_same_plan_goes_on_bit_for_bit(ranks: Any, tmp_path: Path, world: int) -> None:
    results = ranks.run(world, interrupt, PLANS[world], tmp_path)
    for name in PLANS[world]:
        whole, again = agreed([one[name][0] for one in results]), agreed([one[name][1] for one in results])
        assert again.losses == whole.losses[SAVED:], name
        assert again.norms == whole.norms[SAVED:], name
        assert again.scales == whole.scales[SAVED:], name
        for one in results:
            pairs = list(zip(one[name][0].state, one[name][1].state, strict=True))
            assert [a.name for a, b in pairs if not torch.equal(a.tensor, b.tensor)] == [], name


def carry_on(recipe: Recipe, plan: Plan, folder: Path, first: int, last: int) -> Seen:
    """Train steps [first, last) from what is saved in the folder, and save."""
    training = Training(recipe, plan)
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    if first:
        training.state.restored(keeper.load("latest", training.state.checkpoint_shards()))
    for step in range(first, last):
        training.step(step)
    keeper.save(last, training.state.checkpoint_shards(), training.state.state())
    return training.finished()


def test_a_run_changes_its_plan_on_the_way(ranks: Any, tmp_path: Path) -> None:
    """Tensor × pipeline, then ZeRO-3, then tensor × ZeRO-1, then one process: the curve and state of one process."""
    chain = [
        plan_of(tensor=2, pipeline=2),
        plan_of(shard=2, zero=3),
        plan_of(replicate=2, tensor=2, zero=1, sequence=True),
        one_process(plan_of()),
    ]
    recipe = recipe_of(optimizer=ADAMW, steps=8)
    (expected,) = ranks.run(1, train, recipe, chain[-1], 8)
    losses, ids = list[float](), list[int]()
    actual: list[Seen] = []
    for leg, plan in enumerate(chain):
        actual = ranks.run(plan.mesh.world_size, carry_on, recipe, plan, tmp_path, 2 * leg, 2 * leg + 2)
        losses += agreed(actual).losses
        ids += [i for one in actual for step in one.sample_ids for i in step]
    assert losses == pytest.approx(expected.losses, rel=TOLERANCES["fp64"])
    assert set(ids) == set(range(8 * BATCH))
    worst = compare(assemble([expected.state]), assemble([one.state for one in actual]))[0]
    assert worst.relative < TOLERANCES["fp64"], str(worst)


# ── the loop itself, on real batches ──────────────────────────────────────────────────────────────────────────────────


def digits_recipe(steps: int, **run: Any) -> Recipe:
    return Recipe(
        model=ModelRecipe(
            reference="mlp", shape=MlpShape(num_layers=2, input_size=12, hidden_size=16, num_classes=10, dropout=0.1)
        ),
        data=DataRecipe(train=(DataSource(source="synthetic"),), prefetch_workers=0),
        batch=BatchRecipe(global_batch_size=BATCH),
        optimizer=replace(ADAMW, warmup_steps=2),
        run=RunRecipe(steps=steps, **run),
        permit=PermitRecipe(precision=("fp64",)),
    )


class Noted:
    """Batches that remember which samples they gave, and break those of some steps."""

    def __init__(self, batches: BatchSource, broken: frozenset[int]) -> None:
        self._batches, self._broken = batches, broken
        self.ids: list[int] = []

    def microbatches(self, step: int) -> list[Any]:
        results = self._batches.microbatches(step)
        self.ids += [int(i) for batch in results for i in batch["sample_ids"]]
        if step in self._broken:
            for batch in results:
                batch["images"] = batch["images"] * torch.nan
        return results

    def evaluation(self, global_batches: int | None) -> Iterator[list[Any]]:
        return self._batches.evaluation(global_batches)

    def state(self, step: int) -> dict[str, Any]:
        return dict(self._batches.state(step))

    def step_of(self, state: Any) -> int:
        return self._batches.step_of(state)


def run_loop(
    recipe: Recipe, plan: Plan, folder: Path, broken: frozenset[int] = frozenset()
) -> tuple[TrainingResult, list[int], Seen]:
    """The whole loop on one rank, resuming what the folder holds."""
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = build_model(recipe)
    recorder = Recorder()
    training = create_training(recipe, plan, blueprint, mesh, recorder)
    shape = data_shape(blueprint, recipe)
    opened = open_data(
        recipe,
        shape,
        microbatch=plan.microbatch,
        data_ranks=plan.mesh.data,
        data_index=mesh.index("data"),
        prepared=prepare_data(recipe, shape),
    )
    data = Noted(opened, broken)
    keeper = Checkpointer(folder, Peers.of_group(mesh["world"]))
    trainer = Trainer(
        recipe, training, data, mesh, recorder, checkpointer=TieredCheckpointer(keeper, None, ranks_on_host=1)
    )
    if keeper.latest() is not None:
        trainer.resume()
    outcome = trainer.run()
    return outcome, data.ids, Seen(state=snapshot(training), extra={"validation": trainer.evaluate()})


LOOPS = {
    1: one_process(plan_of()),
    2: plan_of(replicate=2, zero=1, shares=(3, 1)),
    4: plan_of(shard=2, tensor=2, zero=3),
}


def test_the_loop_sees_every_sample_once_and_evaluates_all_of_the_validation_set(ranks: Any, tmp_path: Path) -> None:
    """Eight steps in one go; and 3 steps on one process, 3 on two uneven ranks, 2 on four."""
    whole = digits_recipe(8, evaluate_every=4)
    ((outcome, ids, seen),) = ranks.run(1, run_loop, whole, LOOPS[1], tmp_path / "whole")
    assert len(set(ids)) == 8 * BATCH
    losses, together = list[float](), list[int]()
    results: Any = None
    for world, end in ((1, 3), (2, 6), (4, 8)):
        results = ranks.run(world, run_loop, digits_recipe(end, evaluate_every=4), LOOPS[world], tmp_path / "legs")
        losses += results[0][0].losses
        together += [i for at, one in enumerate(results) if world < 4 or at % 2 == 0 for i in one[1]]
    assert losses == pytest.approx(outcome.losses, rel=1e-9)
    assert sorted(together) == sorted(ids)
    assert outcome.validation_loss is not None
    for one in results:
        assert one[0].validation_loss == pytest.approx(outcome.validation_loss, rel=1e-9)
        assert one[2].extra["validation"] == pytest.approx(seen.extra["validation"], rel=1e-9)


def test_too_many_steps_that_are_not_finite_end_the_run(ranks: Any, tmp_path: Path) -> None:
    recipe = digits_recipe(8, max_skipped_steps=2, save_every=1)
    ((outcome, _, _), _) = ranks.run(2, run_loop, recipe, LOOPS[2], tmp_path / "two", broken=frozenset({2, 3}))
    assert outcome.steps == 8
    assert [loss == loss for loss in outcome.losses] == [True, True, False, False, True, True, True, True]
    with pytest.raises(
        WeftError, match=r"3 steps in a row up to step 5 .*max_skipped_steps = 2.*learning_rate.*samples \d+ to \d+"
    ):
        ranks.run(2, run_loop, recipe, LOOPS[2], tmp_path / "three", broken=frozenset({2, 3, 4}))
    assert Checkpointer(tmp_path / "three").latest() is not None, "what was saved before stays"
