"""A session whose plan sets a short deadline: a rank that is stopped is named soon, and so is one that died."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.errors import CollectiveError, PlanError

SECONDS = 1.0
PLAN = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=2, per_step=1))


def _loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def _leave_the_pools_group(port: int) -> None:
    """Let the session make the default group itself, as under torchrun."""
    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2, "MASTER_PORT": port}
    dist.destroy_process_group()
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _be_stopped(folder: str, port: int, plan: Plan, seconds: float | None) -> None:
    _leave_the_pools_group(port)
    model = nn.Linear(4, 4)
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    with weft.session(plan=plan, folder=folder, quiet=True, collective_timeout_seconds=seconds) as session:
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=_loss)
        assert session.rank_failure is None
        batch = next(iter(state.batches()))
        state.step(batch)
        if session.rank == 1:
            (Path(folder) / "victim").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        begun = time.monotonic()
        try:
            state.step(batch)
        except CollectiveError as error:
            (Path(folder) / "survivor").write_text(f"{time.monotonic() - begun:.3f} {error}")
        os.kill(int((Path(folder) / "victim").read_text()), signal.SIGKILL)
        raise CollectiveError("seen")


@pytest.mark.parametrize("by_argument", [False, True], ids=["plan", "argument"])
def test_a_stopped_rank_is_named_at_the_deadline(ranks: RankPool, tmp_path: Path, by_argument: bool) -> None:
    compute = replace(PLAN.compute, collective_timeout_seconds=600.0 if by_argument else SECONDS)
    plan = replace(PLAN, compute=compute)
    with pytest.raises((RankError, CollectiveError)):
        ranks.run(2, _be_stopped, str(tmp_path), _free_port(), plan, SECONDS if by_argument else None, timeout=30)
    seconds, _, text = (tmp_path / "survivor").read_text().partition(" ")
    assert "was not finished in 1 s: rank 1 has not come" in text
    assert SECONDS <= float(seconds) < 30


def test_an_impossible_deadline_is_refused_before_anything_is_joined() -> None:
    with pytest.raises(PlanError, match="collective_timeout_seconds = -1"), weft.session(collective_timeout_seconds=-1):
        pass
