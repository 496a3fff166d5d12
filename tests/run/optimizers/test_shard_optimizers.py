"""Optimizers over shards that one process holds, against torch's own and against their papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_shards import (
    SHAPES,
    draw,
    gather,
    layout_of,
    make_shard,
    reference_adafactor,
    reference_lamb,
    reference_lars,
    relative_difference,
    scatter,
    set_gradients,
    train,
    unused,
    whole_groups,
)
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan
from weft.config.recipe import (
    GroupSettings,
    OptimizerGroup,
    OptimizerRecipe,
    ParameterGroup,
    check_group_globs,
    group_parameters,
    parameter_settings,
)
from weft.errors import PlanError, RecipeError
from weft.run.engine.optimizers import (
    ShardOptimizer,
    create_optimizer,
    squared_sum,
)
from weft.run.engine.optimizers.adafactor import Adafactor
from weft.run.engine.optimizers.adamw import AdamW
from weft.run.engine.optimizers.lamb import LAMB
from weft.run.engine.optimizers.lars import LARS
from weft.run.engine.optimizers.sgd import SGD
from weft.techniques.core import Shard

Cuts = list[tuple[str, float]]


def one_process() -> Mesh:
    return Mesh(MeshPlan(), torch.device("cpu"))


def shards_cut_at(points: Sequence[int], gap: int, values: dict[str, Tensor]) -> list[Shard]:
    """All parameters one after the other, cut at any elements."""
    edges = sorted({0, *points, sum(math.prod(shape) for shape in SHAPES.values())})
    shards: list[Shard] = []
    for low, high in zip(edges, edges[1:], strict=False):
        runs, first = [], 0
        for name, shape in SHAPES.items():
            start, stop = max(low - first, 0), min(high - first, math.prod(shape))
            if start < stop:
                runs.append((layout_of(name), start, stop - start))
            first += math.prod(shape)
        shards.append(make_shard(runs, values, gap=gap))
    return shards


def whole_shards(values: dict[str, Tensor], gap: int = 3) -> list[Shard]:
    """Two shards of whole parameters, as data ranks hold them for Adafactor."""
    names = list(SHAPES)
    return [
        make_shard([(layout_of(n), 0, math.prod(SHAPES[n])) for n in some], values, gap=gap)
        for some in (names[:4], names[4:])
    ]


cut_points = st.lists(st.integers(1, 310), max_size=5)


def trained_by_torch(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], steps: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    weights = {name: torch.nn.Parameter(value) for name, value in draw(0, dtype=dtype).items()}
    optimizer = make(list(weights.values()))
    for step in range(1, steps + 1):
        for name, gradient in draw(100 + step, dtype=dtype).items():
            weights[name].grad = None if name in unused(step) else gradient
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


@settings(max_examples=25, deadline=None)
@given(points=cut_points, gap=st.sampled_from([0, 3]), decay=st.sampled_from([0.0, 0.1]))
def test_adamw_equals_torch_wherever_it_is_cut(points: list[int], gap: int, decay: float) -> None:
    shards = shards_cut_at(points, gap, draw(0))
    train(AdamW(shards, whole_groups(decay), betas=(0.9, 0.95), epsilon=1e-8), shards, 4, learning_rate=0.02)
    expected = trained_by_torch(lambda w: torch.optim.AdamW(w, 0.02, (0.9, 0.95), 1e-8, decay), 4)
    assert relative_difference(gather(shards), expected) < 1e-12


@settings(max_examples=25, deadline=None)
@given(points=cut_points, gap=st.sampled_from([0, 3]))
def test_a_frozen_variance_keeps_the_scale_of_every_element(points: list[int], gap: int) -> None:
    """1-bit Adam (Tang et al. 2021, algorithm 1) after two steps of AdamW, wherever shards are cut; an element without
    a gradient until then has no scale, and only decays."""
    rate, decay, epsilon, betas = 0.02, 0.1, 1e-8, (0.9, 0.95)
    weights, gradients = draw(0), [draw(100 + step) for step in range(5)]
    for early in gradients[:2]:
        early["norm.weight"][3] = 0
    shards = shards_cut_at(points, gap, weights)
    optimizer = AdamW(shards, whole_groups(decay), betas=betas, epsilon=epsilon, frozen_after=2)
    for gradient in gradients:
        set_gradients(shards, gradient)
        optimizer.step(rate)
    for name, weight in weights.items():
        mean, variance = torch.zeros_like(weight), torch.zeros_like(weight)
        for step, gradient in enumerate(gradients, 1):
            mean = betas[0] * mean + (1 - betas[0]) * gradient[name]
            if step <= 2:
                variance = betas[1] * variance + (1 - betas[1]) * gradient[name] ** 2
            size = (variance / (1 - betas[1] ** min(step, 2))).sqrt() + epsilon
            move = torch.where(variance > 0, mean / (1 - betas[0] ** step) / size, 0)
            weight = weight * (1 - rate * decay) - rate * move
        weights[name] = weight
    assert relative_difference(gather(shards), weights) < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    points=cut_points, momentum=st.sampled_from([0.0, 0.9]), nesterov=st.booleans(), decay=st.sampled_from([0.0, 0.1])
)
def test_sgd_equals_torch_wherever_it_is_cut(points: list[int], momentum: float, nesterov: bool, decay: float) -> None:
    nesterov = nesterov and momentum > 0
    shards = shards_cut_at(points, 0, draw(0))
    train(SGD(shards, whole_groups(decay), momentum=momentum, nesterov=nesterov), shards, 4, learning_rate=0.02)
    expected = trained_by_torch(
        lambda w: torch.optim.SGD(w, 0.02, momentum=momentum, nesterov=nesterov, weight_decay=decay), 4
    )
    assert relative_difference(gather(shards), expected) < 1e-12


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_scale_is_a_factor_on_gradients(dtype: torch.dtype, scale: float) -> None:
    for make in (
        lambda s, g: AdamW(s, g, epsilon=1e-30),
        lambda s, g: SGD(s, g),
        lambda s, g: LAMB(s, g, one_process()),
        lambda s, g: LARS(s, g, one_process()),
        lambda s, g: Adafactor(s, g, one_process()),
    ):
        results: list[dict[str, Tensor]] = []
        for factor in (1.0, scale):
            shards = whole_shards(draw(0, dtype=dtype))
            set_gradients(shards, draw(1, 1e-3 * (scale / factor), dtype=dtype))
            make(shards, whole_groups()).step(0.1, factor)
            results.append(gather(shards))
        assert relative_difference(*results) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_scales_without_an_inverse_in_fp32_work_too() -> None:
    shards = whole_shards(draw(0, dtype=torch.float32))
    set_gradients(shards, draw(1, 1e30, dtype=torch.float32))
    SGD(shards, whole_groups(), momentum=0.0).step(10.0, 1e-31)
    expected = {name: value - draw(1)[name] for name, value in draw(0).items()}
    assert relative_difference(gather(shards), expected) < 1e-5


def test_a_gradient_in_bf16_updates_masters_in_fp32() -> None:
    shards = whole_shards(draw(0, dtype=torch.float32))
    set_gradients(shards, draw(1, dtype=torch.float32))
    for shard in shards:
        assert shard.gradient is not None
        shard.gradient = shard.gradient.bfloat16()
    rounded = [shard.gradient for shard in shards]
    SGD(shards, whole_groups(), momentum=0.0).step(0.5, 1.0)
    start = whole_shards(draw(0, dtype=torch.float32))
    for shard, before, gradient in zip(shards, start, rounded, strict=True):
        assert gradient is not None
        torch.testing.assert_close(shard.master, before.master - 0.5 * gradient.float())


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_equals_its_paper_wherever_it_is_cut(decay: float) -> None:
    shards = shards_cut_at([5, 100, 101, 290], 2, draw(0))
    train(LAMB(shards, whole_groups(decay), one_process(), betas=(0.9, 0.99)), shards, 4, learning_rate=0.02)
    assert relative_difference(gather(shards), reference_lamb(4, 0.02, decay, (0.9, 0.99), 1e-6)) < 1e-12


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_equals_its_paper_wherever_it_is_cut(decay: float) -> None:
    shards = shards_cut_at([5, 100, 101, 290], 2, draw(0))
    train(LARS(shards, whole_groups(decay), one_process()), shards, 4, learning_rate=0.5)
    assert relative_difference(gather(shards), reference_lars(4, 0.5, decay, 0.9)) < 1e-12


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_equals_its_paper(decay: float, relative: bool) -> None:
    shards = whole_shards(draw(0))
    train(Adafactor(shards, whole_groups(decay), one_process(), relative_step=relative), shards, 4, learning_rate=0.6)
    expected = reference_adafactor(4, 0.6, decay, relative=relative)
    assert relative_difference(gather(shards), expected) < 1e-12


def test_adafactor_equals_another_implementation() -> None:
    transformers = pytest.importorskip("transformers")
    shards = whole_shards(draw(0))
    train(Adafactor(shards, whole_groups(0.1), one_process()), shards, 4, learning_rate=0.02)
    options = {"lr": 0.02, "scale_parameter": False, "relative_step": False, "warmup_init": False, "weight_decay": 0.1}
    expected = trained_by_torch(lambda w: transformers.Adafactor(w, **options), 4)
    assert relative_difference(gather(shards), expected) < 1e-12


def test_adafactor_refuses_a_cut_inside_a_row() -> None:
    shards = [make_shard([(layout_of("attention.out"), 0, 6)], draw(0))]
    with pytest.raises(
        PlanError, match=r"attention\.out is cut at elements 0 to 6 of its \(8, 4\).* inside a row of 4"
    ):
        Adafactor(shards, whole_groups(), one_process())


def test_zero_norms_take_the_plain_step() -> None:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for optimizer in (LAMB, LARS):
        shards = whole_shards(zeros)
        made = optimizer(shards, whole_groups(0.1), one_process())
        set_gradients(shards, draw(1))
        made.step(0.1, 1.0)
        assert all(value.isfinite().all() and value.abs().max() > 0.01 for value in gather(shards).values())
        set_gradients(shards, zeros)
        made.step(0.1, 1.0)
        assert all(value.isfinite().all() for value in gather(shards).values())


def makers() -> dict[str, Callable[[list[Shard]], ShardOptimizer]]:
    return {
        "adamw": lambda s: AdamW(s, whole_groups(0.1)),
        "sgd": lambda s: SGD(s, whole_groups(0.1)),
        "lamb": lambda s: LAMB(s, whole_groups(0.1), one_process()),
        "lars": lambda s: LARS(s, whole_groups(0.1), one_process()),
        "adafactor": lambda s: Adafactor(s, whole_groups(0.1), one_process()),
    }


@pytest.mark.parametrize("name", list(makers()))
def test_states_move_to_another_cut_through_pieces(name: str) -> None:
    """Steps 1 and 2, then the other cut for step 3 with the first one's checkpoint shards: nothing changes."""
    make = makers()[name]
    straight = whole_shards(draw(0))
    train(make(straight), straight, 3, learning_rate=0.02)
    first = whole_shards(draw(0), gap=0)
    optimizer = make(first)
    train(optimizer, first, 2, learning_rate=0.02)
    saved: dict[str, Tensor] = {}
    for stored in optimizer.checkpoint_shards():
        scatter(stored, saved.setdefault(stored.name, torch.full(stored.shape, math.nan, dtype=torch.float64)))
    cut = whole_shards(gather(first)) if name == "adafactor" else shards_cut_at([7, 120, 250], 1, gather(first))
    resumed = make(cut)
    for stored in resumed.checkpoint_shards():
        assert not stored.split
        flat = saved[stored.name].view(-1)
        stored.tensor.copy_(flat[stored.start : stored.start + stored.tensor.numel()])
    set_gradients(cut, draw(103, 2.0))
    resumed.step(0.02, 0.5)
    assert relative_difference(gather(cut), gather(straight)) < 1e-12


@pytest.mark.parametrize("name", list(makers()))
def test_pieces_write_every_element_once_and_account_for_all_bytes(name: str) -> None:
    shards = whole_shards(draw(0)) if name == "adafactor" else shards_cut_at([7, 120, 250], 0, draw(0))
    optimizer = makers()[name](shards)
    written: dict[str, Tensor] = {}
    for stored in optimizer.checkpoint_shards():
        assert stored.tensor.ndim == 1
        if stored.counts:
            seen = written.setdefault(stored.name, torch.zeros(stored.shape, dtype=torch.int64)).view(-1)
            seen[stored.start : stored.start + stored.tensor.numel()] += 1
    assert all((seen == 1).all() for seen in written.values())
    states = [stored for stored in optimizer.checkpoint_shards() if not stored.name.startswith("optimizer/step/")]
    assert optimizer.state_bytes() == sum(stored.tensor.numel() * 8 for stored in states)


def test_groups_have_their_own_rate_and_decay() -> None:
    shards = [
        make_shard([(layout_of(name), 0, math.prod(SHAPES[name]))], draw(0), group=i) for i, name in enumerate(SHAPES)
    ]
    groups = [
        OptimizerGroup(settings=GroupSettings(learning_rate_scale=1.0 + i, weight_decay=0.1 * i), names=(name,))
        for i, name in enumerate(SHAPES)
    ]
    train(AdamW(shards, groups), shards, 3, learning_rate=0.01)
    expected = trained_by_torch(
        lambda ws: torch.optim.AdamW(
            [{"params": [w], "lr": 0.01 * (1 + i), "weight_decay": 0.1 * i} for i, w in enumerate(ws)],
            betas=(0.9, 0.95),
        ),
        3,
    )
    assert relative_difference(gather(shards), expected) < 1e-12


def test_settings_of_parameters_come_from_the_first_group_that_matches() -> None:
    recipe = OptimizerRecipe(
        weight_decay=0.1,
        groups=(
            ParameterGroup(match="embedding.*", learning_rate_scale=0.5),
            ParameterGroup(match="*.weight", weight_decay=0.3),
        ),
    )
    assert parameter_settings(recipe, "embedding.weight", (3, 4)) == GroupSettings(
        learning_rate_scale=0.5, weight_decay=0.1
    )
    assert parameter_settings(recipe, "norm.weight", (3,)) == GroupSettings(learning_rate_scale=1.0, weight_decay=0.3)
    assert parameter_settings(recipe, "norm.bias", (3,)) == GroupSettings(learning_rate_scale=1.0, weight_decay=0.0)
    groups = group_parameters(recipe, {"a.weight": (2, 2), "a.bias": (2,), "b.weight": (2,), "embedding.x": (1, 1)})
    assert [group.names for group in groups] == [("a.weight", "b.weight"), ("a.bias",), ("embedding.x",)]


def test_a_glob_that_matches_nothing_is_an_error_with_a_suggestion() -> None:
    recipe = OptimizerRecipe(groups=(ParameterGroup(match="embeding.weight", learning_rate_scale=0.5),))
    with pytest.raises(
        RecipeError, match=r"groups\[0\]\.match = 'embeding\.weight' matches none .* Did you mean embedding"
    ):
        check_group_globs(recipe, SHAPES)
    check_group_globs(OptimizerRecipe(groups=(ParameterGroup(match="embedding*", learning_rate_scale=2.0),)), SHAPES)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "lamb", "lars"])
def test_create_optimizer_builds_what_the_recipe_names(name: str) -> None:
    recipe = OptimizerRecipe(name=name, learning_rate=0.1)  # type: ignore[arg-type]
    made = create_optimizer(recipe, whole_shards(draw(0)), one_process(), group_parameters(recipe, SHAPES))
    assert type(made).__name__.lower() == name
    assert recipe.cuts == ("parameter" if name == "adafactor" else "anywhere")


def test_squared_sums_do_not_depend_on_the_cut() -> None:
    flat = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = float(flat.double().square().sum())
    parts = sum(float(squared_sum(part)) for part in flat.split(7919))
    assert float(squared_sum(flat)) == pytest.approx(exact, rel=1e-7)
    assert parts == pytest.approx(exact, rel=1e-7)
    assert float(squared_sum(flat[:0])) == 0.0
