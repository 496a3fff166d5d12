"""A loss that leaps up is told with its samples; losses that are merely noisy are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from shrink_kit import recipe_of, train, write_corpus

import weft
from weft.events import RunFolder
from weft.run.launch.launcher import ForkServer
from weft.run.supervise import LossSpikeWatch

STEPS = 10_000
NOISE: dict[str, Callable[[random.Random], float]] = {
    "gaussian": lambda draw: draw.gauss(0, 0.05),
    "heavy tails": lambda draw: 0.05 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(2.5, 0.4)),
    "uniform": lambda draw: draw.uniform(-0.1, 0.1),
    "none": lambda draw: 0.0,
}


def curve(step: int) -> float:
    return 2.0 + 6.0 * math.exp(-step / 800)


@pytest.mark.parametrize("noise", NOISE)
def test_healthy_losses_raise_no_alarm_and_a_leap_does(noise: str) -> None:
    draw, told = random.Random(7), list[str]()
    watch = LossSpikeWatch(8, told.append)
    watch.look([curve(step) + NOISE[noise](draw) for step in range(STEPS)])
    assert not told
    watch.look([2.0 + 1.5 + NOISE[noise](draw) for _ in range(5)])
    (text,) = told
    assert f"in steps {STEPS + 1} to {STEPS + 3}" in text
    assert f"samples {8 * STEPS:,} to {8 * STEPS + 23:,} of the order" in text
    watch.look([2.0 + NOISE[noise](draw) for _ in range(100)])
    assert len(told) == 1


def test_single_batches_skipped_steps_and_the_beginning_say_nothing() -> None:
    told = list[str]()
    watch = LossSpikeWatch(8, told.append)
    watch.look([1.0, 9.0, 9.0, 9.0] * 5)
    assert not told
    watch = LossSpikeWatch(8, told.append)
    watch.look([2.0 + 0.01 * (step % 5) for step in range(60)])
    watch.look([7.0, 7.0, 2.0, 7.0, math.nan, 2.0])
    assert not told
    watch.look([7.0, math.nan, 7.0, 7.0])
    assert len(told) == 1
    watch.look([7.0 + 0.01 * (step % 5) for step in range(200)])  # a new level is told once
    assert len(told) == 1


def test_a_training_says_so(fork_server: ForkServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    recipe = recipe_of(corpus, tmp_path, fault={"fault": "spoil", "rank": 0, "step": 60}, steps=80, save_every=None)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=1e-3))
    train(recipe, tmp_path, fork_server, weft.Plan.ddp(replicate=1))
    log = RunFolder(tmp_path / "run").launcher_log
    assert "WARNING weft.run.supervise: the loss has leapt up" in log.read_text()
