"""Other threads draw from the global generators while a forward runs: the net neither takes their draws for the
model's nor misses the model's among theirs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import cells
import numpy as np
import pytest
import torch
from drawing_models import ALL
from parity_run import joined, judge, run_rank
from pool import RankPool
from test_drawing import ALONE, STEPS, recipe_of

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.model.seeding import seeded
from weft.techniques.core import StepContext, without_draws

DRAWS: Mapping[str, Callable[[], object]] = {
    "torch's": lambda: torch.rand(3),
    "Python's random": random.random,
    "numpy's": lambda: np.random.normal(size=3),
}


@contextmanager
def drawing(*draws: Callable[[], object]) -> Generator[threading.Event]:
    """A thread that draws without end; the event is set whenever it has drawn."""
    stop, drew = threading.Event(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            for one in draws:
                one()
            drew.set()
            stop.wait(0.0005)

    thread = threading.Thread(target=draw, name="users-log")
    thread.start()
    try:
        yield drew
    finally:
        stop.set()
        thread.join()


def look(own: Callable[[], object] = lambda: None, wait: Callable[[], object] = lambda: None) -> None:
    """A forward that draws in its own thread, and lasts until another has drawn."""
    with without_draws(StepContext(), torch.device("cpu"), "the forward"):
        torch.ones(8, 8) @ torch.ones(8, 8)
        wait()
        own()


@pytest.mark.parametrize("whose", ["torch's", "Python's random"])
def test_draws_of_another_thread_are_not_the_models(whose: str):
    with drawing(DRAWS[whose]) as drew:
        for _ in range(5):
            drew.clear()
            look(wait=lambda: drew.wait(5))


def test_numpys_generator_waits_until_the_forward_has_ended():
    with drawing(*DRAWS.values()) as drew:
        for _ in range(20):
            look(wait=lambda: drew.wait(0.002))
            drew.clear()
            assert drew.wait(5), "the thread must go on between forwards"


@pytest.mark.parametrize("seed", range(6))
def test_the_models_draws_are_seen_among_those_of_threads(seed: int):
    drawn = random.Random(seed)
    whose = drawn.choice(list(DRAWS))
    others = drawn.sample(list(DRAWS), drawn.randint(1, 3))
    with (
        drawing(*(DRAWS[other] for other in others)),
        pytest.raises(PlanError, match=f"the forward drew from {whose} generator"),
    ):
        look(own=DRAWS[whose])


def run_beside_a_thread(recipe: Recipe, plan: Plan, steps: int) -> object:
    with drawing(*DRAWS.values()):
        return run_rank(recipe, plan, steps)


@pytest.mark.parametrize(
    "plan",
    [cells.plan(replicate=2, micro=3), cells.plan(shard=2, zero=3), cells.plan(pipeline=2, micro=4)],
    ids=cells.name_of,
)
def test_two_ranks_beside_drawing_threads_equal_one_process(ranks: RankPool, plan: Plan):
    recipe = recipe_of(" ".join(random.Random(7).sample(ALL, 4)), noisy_loss=True)
    wanted = joined(ranks.run(1, run_rank, recipe, ALONE, STEPS), ALONE)
    found = joined(ranks.run(plan.mesh.world_size, run_beside_a_thread, recipe, plan, STEPS), plan)
    assert judge(wanted, found, None).failures("fp64") == []


def _initialise(tensor: torch.Tensor, how: int) -> torch.Tensor:
    if how == 0:
        return torch.nn.init.xavier_normal_(tensor)
    if how == 1:
        return torch.nn.init.trunc_normal_(tensor)
    if how == 2:
        return torch.nn.init.orthogonal_(tensor)
    if how == 3:
        torch.manual_seed(11)
    return torch.rand(5, 4) if how < 5 else torch.randperm(20)


@pytest.mark.parametrize("how", range(6))
def test_seeded_numbers_are_the_same_beside_a_drawing_thread(how: int):
    with seeded(3):
        wanted = [_initialise(torch.empty(5, 4), how), _initialise(torch.empty(5, 4), how)]
    with drawing(DRAWS["torch's"]) as drew, seeded(3):
        first = _initialise(torch.empty(5, 4), how)
        drew.clear()
        assert drew.wait(5)
        assert torch.equal(first, wanted[0])
        assert torch.equal(_initialise(torch.empty(5, 4), how), wanted[1])
