"""Scripts for Fabric of which the import alone is changed: Fabric's own losses, and one process's on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fabric_scripts
import pytest
from fabric_scripts import NAMES, run
from pool import RankPool

from weft.config.plan import DataParallelPlan, MeshPlan, Plan

TENSOR = Plan(mesh=MeshPlan(tensor=2), data_parallel=DataParallelPlan(zero=0))
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "chosen-2": (2, {}),
    "ddp-4": (4, {"strategy": "ddp"}),
    "zero-3-2": (2, {"strategy": "fsdp"}),
    "zero-2-4": (4, {"strategy": "deepspeed_stage_2"}),
    "tensor-2": (2, {"plan": TENSOR}),
}
HALF = ("gan", "language_model")
Returned = dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    return fabric_scripts.peers(tmp_path_factory.mktemp("peers"))


@pytest.mark.parametrize("name", NAMES)
def test_one_process_gives_the_losses_of_fabric(ranks: RankPool, peers: Returned, name: str, tmp_path: Path) -> None:
    """In single precision, where a clipped gradient is rounded once less, in double, and under autocast."""
    (single,) = ranks.run(1, run, name, str(tmp_path))
    assert single == pytest.approx(peers[name]["single"], rel=1e-6)
    (double,) = ranks.run(1, run, name, str(tmp_path / "double"), exact=True)
    assert double == pytest.approx(peers[name]["double"], rel=1e-12)
    if name in HALF:
        (half,) = ranks.run(1, run, name, str(tmp_path / "half"), precision="bf16-mixed")
        assert half == pytest.approx(peers[name]["half"], rel=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_the_losses_of_one_process(
    ranks: RankPool, peers: Returned, name: str, setting: str, tmp_path: Path
) -> None:
    number, options = SETTINGS[setting]
    for found in ranks.run(number, run, name, str(tmp_path), exact=True, **options):
        assert found == pytest.approx(peers[name]["double"], rel=1e-10)
