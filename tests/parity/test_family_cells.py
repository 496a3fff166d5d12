"""Every family that has a file, under drawn plans: the gradients, losses and weights of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import cells
import pytest
from parity_run import joined, judge, run_rank
from pool import RankPool
from small_families import TYPES, small_model

from weft.config.plan import Plan
from weft.model.families import families
from weft.verify.numerics import one_process

STEPS = 2
ALONE = one_process(cells.plan())
PLANS: dict[str, Plan] = {
    "data": cells.plan(shard=2, zero=1, micro=3),
    "zero3": cells.plan(shard=2, zero=3, micro=2, recompute="selective"),
    "tensor": cells.plan(tensor=2, micro=6),
    "sequence": cells.plan(tensor=2, sequence=True, micro=4, recompute="full"),
    "pipeline": cells.plan(pipeline=2, micro=3),
    "interleaved": cells.plan(pipeline=2, schedule="interleaved_1f1b", chunks=2, micro=2),
    "all": cells.plan(pipeline=2, tensor=2, sequence=True, micro=4),
    "data and tensor": cells.plan(shard=2, tensor=2, zero=2, micro=2),
}
"""One plan or more for every axis."""
NO_TENSOR = {"deepseek_v3"}
"""Families of which no layer is split."""
IN_MATRIX = {config["model_type"] for config in cells.HF_CONFIGS.values()}
FIRST = {family.model_types[0] for family in families()} - IN_MATRIX
"""Families that no cell of the matrix shows: they have every plan."""


def drawn() -> Iterator[tuple[str, str]]:
    """Every plan of a family outside the matrix, two of its further types, and one more of what the matrix shows."""
    for kind in TYPES:
        count = len(PLANS) if kind in FIRST else 1 if kind in IN_MATRIX else 2
        for name in random.Random(kind).sample([*PLANS], count):
            if kind not in NO_TENSOR or PLANS[name].mesh.tensor == 1:
                yield kind, name


@pytest.mark.parametrize(("kind", "name"), list(drawn()))
def test_equals_one_process(ranks: RankPool, kind: str, name: str, tmp_path: Path) -> None:
    seed = sorted(PLANS).index(name)
    recipe, plan = cells.recipe_of(small_model(kind, seed, tmp_path), "fp64"), PLANS[name]
    wanted = joined(ranks.run(1, run_rank, recipe, ALONE, STEPS), ALONE)
    found = joined(ranks.run(plan.mesh.world_size, run_rank, recipe, plan, STEPS), plan)
    assert judge(wanted, found, None).failures("fp64") == []
