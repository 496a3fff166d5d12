"""What local steps cost and hold, by the model of costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memories import memory_of

from weft.config.cluster import parse_cluster_spec
from weft.config.plan import DataParallelPlan, MeshPlan, Plan
from weft.model.profile import ModelSizes, profile_of_sizes
from weft.planning.price import CostModel
from weft.techniques.cost_terms import Layout
from weft.techniques.registry import extra_memory

SMALL = profile_of_sizes(
    ModelSizes(
        name="small", num_layers=8, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=8192,
        vocabulary_size=32_000, sequence_length=2048, tied=False,
    )
)  # fmt: skip
LAYOUTS = {
    0: Layout(replicate=16, zero=0, microbatches=2),
    1: Layout(replicate=2, shard=8, zero=1, microbatches=2),
    3: Layout(replicate=2, shard=8, zero=3, microbatches=2),
}


@pytest.mark.parametrize("zero", LAYOUTS)
def test_longer_rounds_cost_less(zero: int) -> None:
    """The average is paid once a round; what is left is the replica's own traffic."""
    cost_model = CostModel(SMALL, parse_cluster_spec("2x8xh100"))
    layout = LAYOUTS[zero]
    often, seldom, never = (
        cost_model.time(replace(layout, local_steps=steps)).data for steps in (10, 100, 1_000_000_000)
    )
    inside = cost_model.time(replace(layout, replicate=1)).data if layout.shard > 1 else 0.0
    assert never == pytest.approx(inside, rel=1e-3, abs=1e-6)
    assert often - never == pytest.approx(10 * (seldom - never), rel=1e-3)
    assert seldom < cost_model.time(layout).data


@pytest.mark.parametrize("zero", LAYOUTS)
def test_anchor_and_momentum_are_held_beside_the_optimizer(zero: int) -> None:
    layout = replace(LAYOUTS[zero], local_steps=10)
    cut = 1 if zero == 0 else layout.shard

    def optimizer(layout: Layout) -> float:
        return memory_of(SMALL, layout)[0].kinds.optimizer

    assert optimizer(layout) - optimizer(replace(layout, outer_momentum=0.0)) == pytest.approx(
        4 * SMALL.num_parameters / cut
    )
    assert optimizer(layout) == pytest.approx(
        optimizer(replace(layout, local_steps=0, replicate=1)) * (layout.master_bytes + 8) / layout.master_bytes
    )


def test_a_plan_says_it_to_the_prices() -> None:
    data = DataParallelPlan(zero=0, local_steps=50, outer_learning_rate=1.0, outer_momentum=0.0)
    layout = Layout.of(Plan(mesh=MeshPlan(replicate=4), data_parallel=data))
    assert (layout.local_steps, layout.outer_learning_rate, layout.outer_momentum) == (50, 1.0, 0.0)
    assert (layout.summing, extra_memory(layout).master_copies) == (1, 1)
