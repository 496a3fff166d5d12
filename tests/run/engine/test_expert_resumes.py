"""A mixture goes from four ranks that share its experts out to one process, to eight and on, as if nothing had been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_kit import BATCH, Seen, Training, agreed, decoder_of, plan_of, recipe_of

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process


def sharing(expert: int, shard: int, zero: int) -> Plan:
    plan = plan_of(zero=zero, shard=shard, micro=max(1, BATCH // shard // 2))
    return replace(plan, mesh=replace(plan.mesh, expert=expert))


LEGS = (sharing(2, 4, 3), one_process(sharing(2, 2, 1)), sharing(4, 8, 3), sharing(4, 4, 3), sharing(2, 4, 2))
"""Under the first, ZeRO-3 cuts a rank's two experts over two ranks, under the third the matrices of its one expert."""


def carry_on(recipe: Recipe, plan: Plan, folder: Path, first: int) -> Seen:
    """One step from what is saved in the folder, and a save."""
    training = Training(recipe, plan, decoder_of(recipe))
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    if first:
        training.state.restored(keeper.load("latest", training.state.checkpoint_shards()))
    training.step(first)
    keeper.save(first + 1, training.state.checkpoint_shards(), training.state.state())
    training.state.close()
    return training.finished()


def alone(recipe: Recipe) -> Seen:
    training = Training(recipe, one_process(LEGS[0]), decoder_of(recipe))
    for step in range(len(LEGS)):
        training.step(step)
    training.state.close()
    return training.finished()


def test_experts_go_from_plan_to_plan(ranks: Any, tmp_path: Path) -> None:
    recipe = recipe_of(num_experts=4, top_k=2, expert_ffn_size=12, shared_experts=1, first_dense_layers=1)
    losses: list[float] = []
    actual: list[Seen] = []
    for first, plan in enumerate(LEGS):
        actual = ranks.run(plan.mesh.world_size, carry_on, recipe, plan, tmp_path, first)
        losses += agreed(actual).losses
    (expected,) = ranks.run(1, alone, recipe)
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    state = assemble([one.state for one in actual])
    worst = compare(assemble([expected.state]), state)[0]
    assert worst.relative < TOLERANCES["fp64"], str(worst)
    # Names and shapes are those of the model, whoever held which experts.
    whole = {f"model/{name}": tensor.shape for name, tensor in build_model(recipe).module.named_parameters()}
    assert {name: tensor.shape for name, tensor in state.items() if name in whole} == whole
