"""Scripts in the way of Accelerate's public examples run with their import changed: with the peer's losses on one
process, and with one process's under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from players import numbers, play
from pool import RankPool

from weft.config.plan import DataParallelPlan, MeshPlan, Plan


def plan_for(replicate: int = 1, shard: int = 1, zero: int = 0, tensor: int = 1) -> Plan:
    mesh = MeshPlan(replicate=replicate, shard=shard, tensor=tensor)
    return Plan(mesh=mesh, data_parallel=DataParallelPlan(zero=zero))  # type: ignore[arg-type]


PLANS = {
    "2 ranks": plan_for(2),
    "4 ranks": plan_for(4),
    "zero-3": plan_for(shard=2, zero=3),
    "tensor": plan_for(tensor=2),
}
WHOLE = {"zero-3", "tensor"}
SCRIPTS = {
    "autoregressive_accumulation": set[str](),
    "checkpointing": set[str](),
    "cross_validation": set[str](),
    "cv_complete": set[str](),
    "deepspeed_plugin": {"tensor"},
    "early_stopping": set[str](),
    "fsdp_plugin": {"tensor"},
    "gradient_accumulation": set[str](),
    "lora": set[str](),
    "manual_accumulation": set[str](),
    "memory": set[str](),
    "mixed_precision": {"tensor"},
    "multi_process_metrics": set[str](),
    "nlp_complete": set[str](),
    "profiler": set[str](),
    "schedule_free": WHOLE,
    "scheduled": set[str](),
    "tracking": set[str](),
    "uneven_tokens": set[str](),
}
"""Script → settings that its loop does not allow: a plan of its own, an optimizer that looks at whole parameters, no
layers that could be split in pairs."""
PEERLESS = {"deepspeed_plugin"}
"""Those that the peer runs with a library that is not installed here."""
NOISE = {"mixed_precision": 2e-3}
"""bf16 rounds what two ranks add up otherwise than one: measured 4e-4."""


def played(ranks: RankPool, folder: Any, name: str, world: int, **settings: Any) -> list[str]:
    folder.mkdir()
    return ranks.run(world, play, name, False, {"folder": str(folder), **settings})[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(ranks: RankPool, tmp_path: Any, name: str) -> None:
    alone = played(ranks, tmp_path / "1 rank", name, 1)
    if name not in PEERLESS:
        peers = ranks.run(1, play, name, True, {})[0]
        assert len(peers) == len(alone)
        assert [line for line in peers if line not in alone] == [] or name == "checkpointing"
    expected = torch.tensor(numbers(alone), dtype=torch.float64)
    for setting in [each for each in PLANS if each not in SCRIPTS[name]]:
        plan = PLANS[setting]
        found = played(ranks, tmp_path / setting, name, plan.mesh.world_size, plan=plan)
        tolerance = NOISE.get(name, 5e-6)
        given = torch.tensor(numbers(found), dtype=torch.float64)
        off = (given - expected).abs() / expected.abs().clamp(min=1.0)
        assert len(given) == len(expected)
        assert float(off.max()) < tolerance, setting


def test_a_save_in_mid_pass_goes_on_as_if_nothing_had_been(ranks: RankPool, tmp_path: Any) -> None:
    """The peer draws another order there: its loader does not know where it was."""
    for world, setting in ((1, None), (2, "zero-3"), (2, "2 ranks")):
        more = {} if setting is None else {"plan": PLANS[setting]}
        lines = played(ranks, tmp_path / f"{world} {setting}", "checkpointing", world, **more)
        losses = [line for line in lines if line.startswith("loss")]
        assert losses[8:12] == losses[12:16]
        assert any("['checkpoint_1', 'checkpoint_2']" in line for line in lines)


def test_processes_that_step_by_themselves_average_their_weights(ranks: RankPool, tmp_path: Any) -> None:
    alone = played(ranks, tmp_path / "1 rank", "local_sgd", 1)
    assert alone == ranks.run(1, play, "local_sgd", True, {})[0]
    found = numbers(played(ranks, tmp_path / "2 ranks", "local_sgd", 2))
    assert len(found) == 3
    assert found != numbers(alone)
    assert found[2] < found[0]
