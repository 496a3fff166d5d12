"""A bit that flips in one replica: the vote names the rank, and the run goes on from a save that all agreed on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from shrink_kit import events, recipe_of, train, write_corpus

import weft
from weft.config.recipe import OnFailure
from weft.errors import CollectiveError, ReplicaError, WeftError
from weft.run.checkpoint import Peers
from weft.run.engine.replicas import ReplicaCheck
from weft.run.launch.launcher import ForkServer
from weft.techniques.core import CheckpointShard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_flipped_bit_names_its_rank_and_costs_the_steps_since_the_last_save(
    corpus: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = weft.Plan.ddp(replicate=3)
    (tmp_path / "alone").mkdir()
    expected = train(recipe_of(corpus, tmp_path / "alone"), tmp_path / "alone", fork_server, plan).losses
    recipe = recipe_of(corpus, tmp_path, fault={"fault": "flip", "rank": 1, "step": 8})
    result = train(recipe, tmp_path, fork_server, plan)
    assert result.losses == expected
    (generation,) = events(tmp_path, "generation")
    assert (generation["failure"], generation["rank"]) == ("replicas", 1)
    assert generation["cause"].startswith("ReplicaError: after step ")
    assert "its weights differ from those of 2 other replicas, which agree" in generation["cause"]
    assert generation["restored_step"] <= 7


def test_two_replicas_can_only_say_that_they_differ(corpus: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    stop = OnFailure(replicas="stop")
    recipe = recipe_of(corpus, tmp_path, fault={"fault": "flip", "rank": 1, "step": 8}, on_failure=stop)
    with pytest.raises(
        ReplicaError, match=r'(?s)ranks 0 and 1, which are replicas, differ.*run.on_failure.replicas = "stop"'
    ):
        train(recipe, tmp_path, fork_server, weft.Plan.ddp(replicate=2))


def peers_of(world: int) -> list[Peers]:
    """Ranks that are threads."""
    barrier, rows = threading.Barrier(world), [list[int]()] * world

    def minimum_of(rank: int) -> Callable[[list[int]], list[int]]:
        def minimum(values: list[int]) -> list[int]:
            rows[rank] = values
            barrier.wait()
            least = [min(column) for column in zip(*rows, strict=True)]
            barrier.wait()
            return least

        return minimum

    return [Peers(rank, world, minimum_of(rank)) for rank in range(world)]


def outcomes(parts: list[list[CheckpointShard]]) -> list[WeftError | None]:
    """What each rank's check raises."""

    def check(peers: Peers, shards: list[CheckpointShard]) -> WeftError | None:
        replicas = ReplicaCheck(peers, torch.device("cpu"))
        try:
            for step in (1, 2):
                replicas.check(step, shards)
        except WeftError as error:
            return error
        return None

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(check, peers_of(len(parts)), parts))


def shard(values: torch.Tensor, name: str = "model/weight", start: int = 0) -> CheckpointShard:
    return CheckpointShard(name=name, shape=torch.Size([1000]), tensor=values.clone(), start=start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_any_bit_of_any_replica_is_found(dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(1000, generator=draw).to(dtype)
    parts = [[shard(values)] for _ in range(4)]
    assert outcomes(parts) == [None] * 4
    wrong, at = (int(torch.randint(high, (1,), generator=draw)) for high in (4, 1000 * dtype.itemsize))
    parts[wrong][0].tensor.view(torch.uint8)[at] ^= 1 << int(torch.randint(8, (1,), generator=draw))
    errors = outcomes(parts)
    assert [type(error) for error in errors] == [
        ReplicaError if rank == wrong else CollectiveError for rank in range(4)
    ]
    assert all(f"rank {wrong}" in str(error) for rank, error in enumerate(errors) if rank != wrong)


def test_only_ranks_that_hold_the_same_elements_are_compared() -> None:
    zeros, ones = torch.zeros(500), torch.ones(500)
    # Two replicas of two shards: ranks 0 and 2, and 1 and 3.
    parts = [[shard(zeros)], [shard(ones, start=500)], [shard(zeros)], [shard(ones, start=500)]]
    assert outcomes(parts) == [None] * 4
    parts[3][0].tensor[7] = 2.0
    errors = outcomes(parts)
    assert all("ranks 1 and 3, which are replicas, differ" in str(errors[rank]) for rank in (1, 3))
    # Shards of one copy have no replicas, and states of plans are each rank's own.
    assert outcomes([[shard(zeros)], [shard(ones, start=500)]]) == [None] * 2
    own = "compression/residual/weight"
    assert outcomes([[shard(zeros), shard(zeros, own)], [shard(zeros), shard(ones, own)]]) == [None] * 2
