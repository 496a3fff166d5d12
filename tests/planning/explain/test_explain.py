"""Explanations: terms add up, questions are answered with the numbers of the cost model, pictures show something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.config.cluster import Cluster, Node, parse_cluster_spec
from weft.errors import PlanError
from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.planning.explain import (
    PICTURES,
    draw,
    explain_choice,
    imbalance_line,
    layout_line,
    memory_line,
    next_changes,
    time_line,
    waterfall,
)
from weft.planning.price import CostModel
from weft.planning.search import SearchResult, search, space_of
from weft.techniques.cost_terms import Layout

SIZES = ModelSizes(
    name="small", num_layers=12, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, sequence_length=4096,
    vocabulary_size=32000,
)  # fmt: skip
LAYOUT = Layout(
    pipeline=4, replicate=2, tensor=2, zero=1, sequence_parallel=True, microbatch_size=1, microbatches=8,
    recompute="selective",
)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of_sizes(SIZES)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return parse_cluster_spec("2x8xh100")


@pytest.fixture(scope="module")
def cost_model(profile: Profile, cluster: Cluster) -> CostModel:
    return CostModel(profile, cluster)


@pytest.fixture(scope="module")
def result(profile: Profile, cluster: Cluster, cost_model: CostModel) -> SearchResult:
    space = replace(
        space_of(profile, cluster, global_batch_size=32),
        schedules=("1f1b",),
        per_block_recompute=False,
        bucket_bytes=(26_214_400,),
    )
    return search(profile, cluster, global_batch_size=32, space=space, cost_model=cost_model, top=3)


def test_waterfall_adds_up(cost_model: CostModel) -> None:
    time = cost_model.predict(LAYOUT).time
    assert sum(seconds for _, seconds in waterfall(time)) == pytest.approx(time.total)
    assert time_line(time).startswith("ideal ")


def test_what_prices_assume_of_experts_is_said(cost_model: CostModel) -> None:
    assert imbalance_line(LAYOUT, cost_model.calibration, cost_model.framework) == ""
    shared = replace(LAYOUT, expert=2)
    measured = replace(cost_model.calibration, expert_imbalance=1.25)
    said = imbalance_line(shared, measured, cost_model.framework)
    assert said.startswith("of 2 ranks that share out experts, the busiest has 1.25 times the mean")
    assert imbalance_line(shared, measured, replace(cost_model.framework, balances_experts=True)) == ""


def test_a_question_about_experts_says_what_prices_assume() -> None:
    mixture = profile_of_sizes(replace(SIZES, num_experts=4, top_k=2, expert_ffn_size=2048))
    near = parse_cluster_spec("8xh100")
    space = replace(
        space_of(mixture, near, global_batch_size=16), schedules=("1f1b",), per_block_recompute=False, experts=(1, 4)
    )
    asking = CostModel(mixture, near)
    alone = search(mixture, near, global_batch_size=16, space=replace(space, experts=(1,)), cost_model=asking, top=1)
    lines = explain_choice(replace(alone, space=space), asking, "expert=4")
    assert lines[-1].startswith("Prices assume: of 4 ranks that share out experts, the busiest has 1.05 times")


def test_memory_line_adds_up(cost_model: CostModel) -> None:
    prediction = cost_model.predict(LAYOUT)
    parts = [float(part.split()[-2 if "GiB" in part else -1]) for part in memory_line(prediction).split(" · ")]
    assert sum(parts) == pytest.approx(prediction.device_bytes / 2**30, rel=0.02)


def test_layout_line() -> None:
    wanted = "pipeline 4 (1f1b) × data 2 × tensor 2, ZeRO-1, microbatch 1, recompute selective"
    assert layout_line(LAYOUT) == wanted


def test_the_best_plan_has_it(result: SearchResult, cost_model: CostModel) -> None:
    tensor = result.best[0].layout.tensor
    assert explain_choice(result, cost_model, f"mesh.tensor={tensor}") == [
        f"tensor = {tensor} is what the best plan has."
    ]


def test_what_a_choice_costs(result: SearchResult, cost_model: CostModel) -> None:
    tensor = 4 if result.best[0].layout.tensor != 4 else 8
    lines = explain_choice(result, cost_model, f"tensor={tensor}")
    assert all(f"tensor = {tensor}" in line or "Smallest changes" in line for line in lines)
    assert any("slower than the best plan's" in line for line in lines)
    assert not any("faster than the best plan's" in line for line in lines)


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("context_scheme=ulysses", "× context "), ("scheme=2d", "tensor 4"), ("sequence=true", "tensor "),
        ("schedule=zbv", "pipeline "), ("expert_exchange=all_gather", "× expert "),
    ],
)  # fmt: skip
def test_a_choice_of_ranks_that_the_best_plan_lacks_is_answered_by_plans_that_have_them(
    question: str, shown: str
) -> None:
    experts = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024} if "expert" in question else {}
    small, near = profile_of_sizes(replace(SIZES, num_layers=4, **experts)), parse_cluster_spec("1x4xh100")
    space, cost_model = space_of(small, near, global_batch_size=16), CostModel(small, near)
    by_data = replace(space, tensors=(1,), contexts=(1,), experts=(1,), pipelines=(1,))
    best = search(small, near, global_batch_size=16, space=by_data, cost_model=cost_model, top=1)
    alone, *others = explain_choice(replace(best, space=space), cost_model, question)
    assert "has no effect with mesh." in alone
    assert shown in others[0]
    assert "the best plan's" in others[0]


def test_what_does_not_fit(result: SearchResult, cost_model: CostModel) -> None:
    small = replace(result.cluster, nodes=tuple(_shrunk(node) for node in result.cluster.nodes))
    tight = CostModel(result.profile, small)
    found = search(result.profile, small, global_batch_size=32, space=result.space, cost_model=tight, top=1)
    lines = explain_choice(found, tight, "pipeline=1, tensor=1, zero=0, recompute=none")
    assert "GiB too much" in lines[0]


def _shrunk(node: Node) -> Node:
    return replace(node, devices=replace(node.devices, memory_bytes=30_000_000_000))


def test_what_cannot_be(result: SearchResult, cost_model: CostModel) -> None:
    lines = explain_choice(result, cost_model, "tensor=3")
    assert lines[0].startswith("tensor = 3 cannot be changed alone: tensor = 3 does not divide")


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("tensro=8", r"tensro, which is no setting of a plan. Did you mean tensor\?"),
        ("tensor", r'"tensor" has no value. Write for example "tensor=8"'),
        ("tensor=many", 'tensor cannot be "many". Use a whole number above 0'),
        ("recompute=ful", r'recompute cannot be "ful". Did you mean full\?'),
        ("", "the question is empty"),
    ],
)
def test_bad_questions(result: SearchResult, cost_model: CostModel, question: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        explain_choice(result, cost_model, question)


def test_next_changes(result: SearchResult, cost_model: CostModel) -> None:
    changes = next_changes(result, cost_model)
    ratios = [change.tokens_ratio for change in changes]
    assert ratios == sorted(ratios, reverse=True)
    assert {"a global batch of 64 samples", "twice the bandwidth of network"} <= {change.what for change in changes}
    assert all(ratio > 0.999 for ratio in ratios), "none of these can hurt"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(tmp_path: Path, cost_model: CostModel, cluster: Cluster, name: str) -> None:
    path = tmp_path / f"{name}.svg"
    draw(name, path, cost_model.predict(LAYOUT, spans=True), LAYOUT, cluster)
    assert path.read_text().count("<path") > 10
    with pytest.raises(PlanError, match="cannot be drawn to"):
        draw(name, tmp_path / "absent" / "x.png", cost_model.predict(LAYOUT, spans=True), LAYOUT, cluster)
