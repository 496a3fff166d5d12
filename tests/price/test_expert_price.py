"""Experts that are shared out are not priced slower for the number of tokens that each happens to get."""

from __future__ import annotations

import random
from dataclasses import replace

from weft.cluster import parse_cluster_spec
from weft.price import FITTED, Layout, Pricer
from weft.profile import KNOWN_MODELS, profile_of_sizes


def test_expert_parallelism_costs_no_alignment() -> None:
    """Beside balanced loads, whole experts on one rank have larger products: shapes lose no more than without."""
    draw = random.Random(11)
    pricer = Pricer(
        profile_of_sizes(KNOWN_MODELS["mixtral-8x7b"].sizes, 4096),
        parse_cluster_spec("4x8xh100"),
        calibration=replace(FITTED, expert_imbalance=1.0013),
    )
    for _ in range(6):
        layout = Layout(shard=32, zero=1, microbatch_size=draw.choice((1, 2, 3, 4)), microbatches=4)
        without = pricer.time(layout)
        for expert in (2, 4, 8):
            shared = pricer.time(replace(layout, expert=expert))
            assert shared.matrix_shapes < 1.1 * without.matrix_shapes
            assert shared.total < 1.15 * without.total
