"""Ranks outlive plans: they leave the groups of one, drop its model, and go on under another in the same process."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine_kit import plan_of, recipe_of

from weft.api import training_of
from weft.config.plan import Plan
from weft.events import Run, RunFolder
from weft.model.build import build_model
from weft.run.data import data_shape
from weft.run.data.preparation import prepare_data
from weft.run.launch import Distributed, RankInfo, initialise_distributed

STEPS, EACH = 8, 2
PLANS = {
    "zero 0": plan_of(replicate=2),
    "zero 1": plan_of(replicate=2, zero=1),
    "zero 2": plan_of(replicate=2, zero=2, shares=(3, 1)),
    "zero 3": plan_of(shard=2, zero=3),
    "tensor": plan_of(tensor=2),
    "sequence": plan_of(tensor=2, sequence=True),
    "pipeline": plan_of(pipeline=2),
    "zbv": plan_of(pipeline=2, schedule="zbv", chunks=2, micro=1),
}


def held() -> tuple[int, int, int]:
    """What the process has: groups, threads, descriptors."""
    gc.collect()
    groups = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
    return len(groups), threading.active_count(), len(os.listdir("/proc/self/fd"))


def go_on(
    folder: str, plans: list[Plan], each: int, *, store: str | None = None, after_alone: Plan | None = None
) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Losses of `each` steps under every plan in turn, and what was held after each; then rank 0 alone takes as many.

    With a store the ranks form the default group themselves.
    """
    steps = each * (len(plans) + (after_alone is not None))
    recipe = recipe_of(steps=steps)
    recipe = replace(recipe, data=replace(recipe.data, prefetch_workers=0))
    run_folder, losses, after = RunFolder(Path(folder)), list[float](), list[tuple[int, int, int]]()
    rank_info = None
    if store is not None:
        rank_info = RankInfo(
            dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), store=store
        )
        dist.destroy_process_group()

    def train(distributed: Distributed, plan: Plan, number: int) -> None:
        with Run(distributed.rank) as run, training_of(recipe, plan, distributed, run_folder, prepared, run) as trainer:
            if number:
                assert trainer.resume() == number * each
            outcome = trainer.run(until=(number + 1) * each)
            model = weakref.ref(trainer._training.model.module)  # pyright: ignore[reportPrivateUsage]
        assert outcome.steps == (number + 1) * each
        losses.extend(outcome.losses)
        del trainer
        after.append(held())
        assert model() is None, "the model of the plan before is gone"

    prepared = prepare_data(recipe, data_shape(build_model(recipe), recipe))
    with initialise_distributed("cpu", rank_info) as distributed:
        for number, plan in enumerate(plans):
            train(distributed, plan, number)
        rank = distributed.rank
    if after_alone is not None and rank == 0:
        with initialise_distributed("cpu", RankInfo(0, 1, 0, 1)) as distributed:
            train(distributed, after_alone, len(plans))
    return losses, after


@pytest.fixture(scope="module")
def expected(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Without a change."""
    return ranks.run(2, go_on, str(tmp_path_factory.mktemp("one") / "run"), [PLANS["zero 0"]], STEPS)[0][0]


@pytest.mark.parametrize("backend", ["gloo", "cpu:weft"])
@pytest.mark.parametrize("seed", [1, 2])
def test_living_ranks_go_on_under_one_plan_after_another(
    ranks: Any, tmp_path: Path, expected: list[float], backend: str, seed: int
) -> None:
    names = random.Random(seed).sample(sorted(PLANS), STEPS // EACH)
    plans = [PLANS[name] for name in names]
    actual = ranks.run(2, go_on, str(tmp_path / "run"), plans, EACH, backend=backend, timeout=60)
    for losses, after in actual:
        assert losses == pytest.approx(expected, rel=1e-9), names
        assert {groups for groups, _, _ in after} == {1}, "only the default group is left"
        assert max(threads for _, threads, _ in after) <= after[0][1] + 1
        assert after[-1][2] <= after[0][2] + 8, f"descriptors grow: {after}"


@pytest.mark.parametrize("name", ["zero 1", "pipeline"])
def test_a_rank_goes_on_alone_when_the_other_has_left(
    ranks: Any, tmp_path: Path, expected: list[float], name: str
) -> None:
    options = {"store": str(tmp_path / "store"), "after_alone": plan_of()}
    (alone, _), (left, _) = ranks.run(2, go_on, str(tmp_path / "run"), [PLANS[name]], STEPS // 2, **options, timeout=60)
    assert alone == pytest.approx(expected, rel=1e-9)
    assert left == alone[: STEPS // 2]
