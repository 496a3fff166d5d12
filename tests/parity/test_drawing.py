"""What a model draws by functions: the same under every plan, or refused with the module's name."""

from __future__ import annotations

import random
from typing import Any

import cells
import drawing_models
import pytest
import torch
import torch.nn.functional as F
from drawing_models import ALL
from parity_run import joined, judge, run_rank
from pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe, Recipe
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.verify.numerics import one_process

STEPS = 2
ALONE = one_process(cells.plan())
PLANS: tuple[Plan, ...] = (
    cells.plan(replicate=2, micro=3),
    cells.plan(micro=4, recompute="full"),
    cells.plan(micro=4, recompute="selective"),
    cells.plan(shard=2, zero=3, recompute="full"),
    cells.plan(pipeline=2, micro=4),
    cells.plan(pipeline=2, schedule="zbv", chunks=2, recompute="full"),
    cells.plan(shard=2, zero=2, shares=(1, 5)),
)
EVERY = " ".join(ALL)


def recipe_of(kinds: str, **arguments: Any) -> Recipe:
    factory = "drawing_models:build_drawing"
    return cells.recipe_of(ModelRecipe(factory=factory, arguments={"kinds": kinds, **arguments}), "fp64")


def failures(ranks: RankPool, recipe: Recipe, plan: Plan) -> list[str]:
    wanted = joined(ranks.run(1, run_rank, recipe, ALONE, STEPS), ALONE)
    found = joined(ranks.run(plan.mesh.world_size, run_rank, recipe, plan, STEPS), plan)
    return judge(wanted, found, None).failures("fp64")


@pytest.mark.parametrize("plan", PLANS, ids=cells.name_of)
def test_every_kind_of_draw_is_the_same_under_a_plan(ranks: RankPool, plan: Plan):
    """All kinds in one model, block after block, and one in the loss."""
    assert failures(ranks, recipe_of(EVERY, noisy_loss=True), plan) == []


@pytest.mark.parametrize("seed", range(4))
def test_drawn_models_under_drawn_plans(ranks: RankPool, seed: int):
    drawn = random.Random(seed)
    kinds = " ".join(drawn.sample(ALL, 4))
    assert failures(ranks, recipe_of(kinds, noisy_loss=drawn.random() < 0.5), drawn.choice(PLANS)) == [], kinds


@pytest.mark.parametrize(
    "plan",
    [
        cells.plan(tensor=2, micro=4),
        cells.plan(tensor=4, micro=12, recompute="full"),
        cells.plan(tensor=2, replicate=2, micro=3, recompute="selective"),
        cells.plan(tensor=2, shard=2, zero=3, micro=2),
    ],
    ids=cells.name_of,
)
def test_tensor_ranks_draw_their_parts(ranks: RankPool, plan: Plan):
    """Of heads, of features and of whole activations: masks of attention inside torch's function among them."""
    recipe = cells.recipe_of(ModelRecipe(factory="drawing_models:build_split_drawing"), "fp64")
    assert failures(ranks, recipe, plan) == []


@pytest.mark.parametrize("how", ["new", "reentrant"])
@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_checkpoints_itself_draws_the_same_twice(ranks: RankPool, how: str, seed: int):
    """As Transformers' own gradient checkpointing does: the second run is in the backward."""
    drawn = random.Random(seed)
    kinds = " ".join(drawn.sample(ALL, 4))
    plan = PLANS[seed] if seed else PLANS[-2]
    wanted = joined(ranks.run(1, run_rank, recipe_of(kinds, checkpointed="never"), ALONE, STEPS), ALONE)
    for found_plan in (ALONE, plan):
        found = ranks.run(found_plan.mesh.world_size, run_rank, recipe_of(kinds, checkpointed=how), found_plan, STEPS)
        assert judge(wanted, joined(found, found_plan), None).failures("fp64") == [], kinds


def test_steps_and_layers_draw_differently():
    """A draw that ignored its keys would pass every comparison between plans."""
    from weft.techniques.randomness._draw_values import Elements
    from weft.techniques.randomness.keyed_dropout import sample_words

    def of(key: str = "a", step: int = 0, seed: int = 1, first: int = 0) -> Tensor:
        ids = torch.arange(first, first + 4)
        return Elements(sample_words(key, seed, step, ids), (0, 0), (64, 48), (64, 48)).normal()

    base = of()
    assert abs(float(base.mean())) < 0.05
    assert abs(float(base.std()) - 1) < 0.05
    for other in (of("b"), of(step=1), of(seed=2), of(first=1)):
        assert abs(float((base * other).mean())) < 0.05
    assert torch.equal(of(first=1)[:3], base[1:])
    words = sample_words("a", 1, 0, torch.arange(4))
    part = Elements(words, (3, 5), (7, 9), (64, 48))
    assert torch.equal(part.normal(), base[:, 3:10, 5:14])
    for p in (0.3, 0.003):
        whole = Elements(words, (0, 0), (64, 48), (64, 48)).kept(p)
        assert torch.equal(part.kept(p), whole[:, 3:10, 5:14])
        assert abs(float(whole.double().mean()) - p) < 0.02


# ── refused, with the module's name ───────────────────────────────────────────────────────────────────────────────────


class Draws(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(HOW[self.how](self, x)).mean(1)


def _late(module: Draws, x: Tensor) -> Tensor:
    """Draws from its second forward on, which no trace shows."""
    module.calls += 1
    return x * torch.rand(x.shape[0], 1, 1).to(x) if module.calls > 2 else x


def _python(module: Draws, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else x * 0.5


def _numpy(module: Draws, x: Tensor) -> Tensor:
    import numpy as np

    return x + torch.from_numpy(np.random.normal(size=(x.shape[0], 1, 1))).to(x)


def _length_first(module: Draws, x: Tensor) -> Tensor:
    turned = F.dropout(x.transpose(0, 1).reshape(-1, x.shape[-1]), 0.3)
    return turned.view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def _checkpointed(module: Draws, x: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(x, 0.3), x, use_reentrant=False)  # type: ignore[no-any-return]


HOW: dict[str, Any] = {
    "checkpointed": _checkpointed,
    "late": _late,
    "python": _python,
    "numpy": _numpy,
    "mixed": lambda module, x: x + x[torch.randperm(x.shape[0])],
    "half": lambda module, x: x * torch.rand(x.shape[0] // 2, 1, 1).to(x).sum(),
    "length_first": _length_first,
    "map": lambda module, x: x * F.dropout(x.mean((1, 2))[:, None, None].expand(-1, 13, 13), 0.3).mean((1, 2), True),
    "binomial": lambda module, x: x * torch.poisson(torch.ones_like(x)),
}


class Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = Draws(how)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows)


def _squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return (outputs - batch["targets"]).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def build_refused(how: str) -> Blueprint:
    example = drawing_models.build_drawing("dropout").example
    return Blueprint(module=Outer(how), inputs={"rows": "rows"}, loss=_squares, initialise=None, example=example)


def refused_recipe(how: str) -> Recipe:
    return cells.recipe_of(ModelRecipe(factory="test_drawing:build_refused", arguments={"how": how}), "fp64")


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("late", "the forward of Outer or its loss drew from torch's generator where no trace of it showed a draw"),
        ("python", "Outer or its loss draws from Python's random generator"),
        ("numpy", "Outer or its loss draws from numpy's generator"),
        ("mixed", r"inner draws by randperm \(test_drawing\.py:\d+\)"),
        ("half", r"inner draws by rand \(test_drawing\.py:\d+\) a tensor of \(2, 1, 1\) in which the samples cannot"),
        ("length_first", "inner draws by bernoulli_ .* a tensor of .* in which the samples cannot be told apart"),
        ("binomial", "inner draws by poisson"),
        ("checkpointed", r"inner draws by bernoulli_ in a function that it gives to torch\.utils\.checkpoint"),
    ],
)
def test_what_cannot_be_keyed_is_refused_by_name(how: str, match: str):
    with pytest.raises(PlanError, match=match):
        run_rank(refused_recipe(how), cells.plan(micro=4), 3)
    if how != "checkpointed":  # whose gradient would be wrong anywhere
        run_rank(refused_recipe(how), ALONE, 1)  # one process with the whole batch at once may draw as it likes


def test_draws_do_not_go_with_compiled_blocks():
    with pytest.raises(PlanError, match=r"compile = true, but blocks.0.draw draws by bernoulli_"):
        run_rank(recipe_of("dropout"), cells.plan(micro=4, compiled=True), 1)


def test_generators_are_left_as_they_were():
    from weft.techniques.core import Generators
    from weft.techniques.randomness._draw_trace import find_draws
    from weft.techniques.randomness.draws import keys_itself

    built = [build_refused(how) for how in HOW]
    before = Generators.now(torch.device("cpu"))
    for blueprint in built:
        find_draws(blueprint, keys_itself)
    assert before.moved(Generators.now(torch.device("cpu"))) == ""


def test_a_worked_out_size_that_the_first_prime_divides_is_told_from_samples():
    """A map of 13 × 13 places, where thirteen samples are tried first."""
    from weft.techniques.randomness._draw_trace import find_draws
    from weft.techniques.randomness.draws import keys_itself

    (layouts,) = find_draws(build_refused("map"), keys_itself).layouts.values()
    assert [(layout.place, layout.dim, layout.whole) for layout in layouts] == [("sample", 0, (1, 13, 13))]


@pytest.mark.parametrize("dim", [1, 2])
def test_a_tensor_rank_draws_its_part_of_the_whole(dim: int):
    """Shards of an activation along heads or features, as the ranks of a tensor group hold them."""
    from weft.comm.mesh import GroupView
    from weft.techniques.core import MicrobatchState, StepContext
    from weft.techniques.randomness._draw_trace import DrawLayout
    from weft.techniques.randomness._draw_trace import Draws as Found
    from weft.techniques.randomness.draws import keyed

    layout = DrawLayout(place="sample", dim=0, whole=(1, 6, 10))
    found = Found(layouts={("a", "bernoulli_", 0): [layout]})
    context = StepContext()
    state = MicrobatchState(seed=1, step=2, sample_ids=torch.arange(4), sequence_length=None)

    def drawn(x: Tensor, view: GroupView) -> Tensor:
        state.calls.restart()
        with context.entered(state):
            return keyed(lambda x: F.dropout(x, 0.4), "a", found, view, context)(x)

    whole = drawn(torch.ones(4, 6, 10), GroupView((0,), 0, None))
    group: Any = object()
    parts = [
        drawn(part.contiguous(), GroupView((0, 1), index, group))
        for index, part in enumerate(torch.ones(4, 6, 10).chunk(2, dim))
    ]
    assert torch.equal(torch.cat(parts, dim), whole)
    with pytest.raises(PlanError, match="does not say which part that is"):
        drawn(torch.ones(4, 3, 5), GroupView((0, 1), 0, group))
