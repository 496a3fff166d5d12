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

from weft.data import data_shape, prepare_data
from weft.entry import training_of
from weft.events import MetricsSink, Run, RunFolder
from weft.launch import initialise_distributed
from weft.models import build_model
from weft.plan import Plan

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


def go_on(folder: str, plans: list[Plan], each: int) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Losses of `each` steps under every plan in turn, and what was held after each."""
    recipe = recipe_of(steps=each * len(plans))
    recipe = replace(recipe, data=replace(recipe.data, prefetch_workers=0))
    blueprint = build_model(recipe)
    prepared = prepare_data(recipe, data_shape(blueprint, recipe))
    run_folder, losses, after = RunFolder(Path(folder)), list[float](), list[tuple[int, int, int]]()
    with initialise_distributed("cpu") as distributed, Run(distributed.rank) as run:
        if distributed.rank == 0:
            run_folder.path.mkdir(exist_ok=True)
            run.attach(MetricsSink(run_folder.metrics))
        dist.barrier()
        for number, plan in enumerate(plans):
            with training_of(recipe, plan, distributed, run_folder, prepared, run) as trainer:
                if number:
                    assert trainer.resume() == number * each
                outcome = trainer.run(until=(number + 1) * each)
                model = weakref.ref(trainer._training.model.module)  # pyright: ignore[reportPrivateUsage]
            assert outcome.steps == (number + 1) * each
            losses += outcome.losses
            del trainer
            after.append(held())
            assert model() is None, "the model of the plan before is gone"
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
    found = ranks.run(2, go_on, str(tmp_path / "run"), plans, EACH, backend=backend, timeout=60)
    for losses, after in found:
        assert losses == pytest.approx(expected, rel=1e-9), names
        assert {groups for groups, _, _ in after} == {1}, "only the default group is left"
        assert max(threads for _, threads, _ in after) <= after[0][1] + 1
        assert after[-1][2] <= after[0][2] + 8, f"descriptors grow: {after}"
