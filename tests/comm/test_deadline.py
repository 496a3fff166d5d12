"""One setting says how long ranks wait for one another, in every group and by whatever means."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.comm.device import BackendKind
from weft.comm.mesh import GroupView, Mesh
from weft.comm.messages import Messenger
from weft.comm.selector import ChosenCollectives
from weft.comm.shared_memory import shared_memory_group
from weft.config.plan import COLLECTIVE_TIMEOUT_SECONDS, ComputePlan, MeshPlan, parse_plan
from weft.errors import PlanError
from weft.run.launch import RankInfo, initialise_distributed

SECONDS = 7.5


def _seconds_of(view: GroupView) -> set[float]:
    """How long a group waits, in what it does by Gloo, over memory and by messages."""
    assert view.group is not None
    gloo: Any = view.group._get_backend(torch.device("cpu"))
    found = {gloo.options._timeout.total_seconds(), view.timeout_seconds}
    shared = shared_memory_group(view.group)
    if shared is not None:
        found.add(shared.seconds)
        return found
    with Messenger(view) as messenger, ChosenCollectives(view) as carrier:
        found |= {messenger._timeout_seconds}
        assert carrier._messenger is None
    return found


def _of_the_mesh() -> set[float]:
    mesh = Mesh(MeshPlan(replicate=2, pipeline=2), torch.device("cpu"), timeout_seconds=SECONDS)
    assert mesh.within_replica()["shard"].timeout_seconds == SECONDS
    own = mesh.create_group([[0, 1], [2, 3]], "own")
    return _seconds_of(own).union(*(_seconds_of(mesh[name]) for name in ("replicate", "pipeline")))


@pytest.mark.parametrize("backend", ["gloo", "cpu:weft"])
def test_every_group_of_the_mesh_waits_as_long(ranks: RankPool, backend: str) -> None:
    assert ranks.run(4, _of_the_mesh, backend=backend) == [{SECONDS}] * 4


def _default_group(folder: str, backend: BackendKind) -> set[float]:
    """One rank comes later than the deadline allows, which counts only when all have come."""
    rank_info = RankInfo(dist.get_rank(), 2, dist.get_rank(), 2, f"{folder}/store")
    dist.destroy_process_group()
    if rank_info.rank:
        time.sleep(2.3)
    with initialise_distributed("cpu", rank_info, timeout_seconds=2.0, backend=backend):
        shared = shared_memory_group(dist.group.WORLD)
        gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return {gloo.options._timeout.total_seconds(), 2.0 if shared is None else shared.seconds}


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_the_default_group_waits_as_long_once_all_have_come(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    assert ranks.run(2, _default_group, str(tmp_path), backend) == [{2.0}] * 2


def test_the_setting_is_checked() -> None:
    assert parse_plan("").compute.collective_timeout_seconds == COLLECTIVE_TIMEOUT_SECONDS == 600
    assert parse_plan("[compute]\ncollective_timeout_seconds = 30").compute.collective_timeout_seconds == 30
    with pytest.raises(PlanError, match=r"line 2: compute\.collective_timeout is not a setting\. Did you mean col"):
        parse_plan("[compute]\ncollective_timeout = 30")
    for seconds, why in (
        (0.0, "must be a finite number above 0"),
        (1e12, "must be at least 0.1 and at most 2592000"),
    ):
        with pytest.raises(PlanError, match=rf"collective_timeout_seconds = .* {why}"):
            ComputePlan(collective_timeout_seconds=seconds)
