"""The pool of ranks itself: results by rank, errors with their rank, replacement of dead and hung ranks."""

from __future__ import annotations

import os
import time

import pool
import pytest
import torch
import torch.distributed as dist

from weft.errors import PlanError


def _sum(offset: int) -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_world_size(), value.item()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise PlanError("tensor = 3 does not divide 8")
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def _change_environment() -> None:
    os.environ["WEFT_TEST"] = "1"


@pytest.mark.parametrize("world", [1, 2, 8])
def test_results_come_by_rank(ranks: pool.RankPool, world: int) -> None:
    expected = float(sum(range(world)) + 3 * world)
    assert ranks.run(world, _sum, 3) == [(world, expected)] * world


def test_error_keeps_its_type_and_names_its_rank(ranks: pool.RankPool) -> None:
    with pytest.raises(PlanError, match="tensor = 3 does not divide 8") as caught:
        ranks.run(2, _fail_on_one)
    assert "on rank 1 of 2" in caught.value.__notes__[0]
    assert ranks.run(2, _sum, 0) == [(2, 1.0)] * 2


def test_dead_rank_is_reported_and_replaced(ranks: pool.RankPool) -> None:
    with pytest.raises(pool.RankError, match="rank 1 died with exit code 7"):
        ranks.run(2, _die)
    assert ranks.run(2, _sum, 0) == [(2, 1.0)] * 2


def test_hung_rank_is_reported_and_replaced(ranks: pool.RankPool) -> None:
    with pytest.raises(pool.RankError, match="rank 1 hung"):
        ranks.run(2, _hang, timeout=1)
    assert ranks.run(2, _sum, 0) == [(2, 1.0)] * 2


def test_changed_environment_is_an_error(ranks: pool.RankPool) -> None:
    with pytest.raises(pool.RankError, match="WEFT_TEST"):
        ranks.run(1, _change_environment)
