"""A job of a real Slurm that is requeued while it trains: the same command goes on, and no step is lost."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_kit import HostJob, write_recipe
from slurm import Slurm, slurm

pytestmark = [pytest.mark.needs_slurm]
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --requeue --open-mode=append --output=out
export PYTHONPATH={path} CUDA_VISIBLE_DEVICES=
srun --kill-on-bad-exit=0 {python} -m weft.cli train recipe.toml --plan plan.toml --nodes 2 --run-folder run \\
    --network 127.0.0.0/8 --processes-per-node 1 --prove never
"""


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def test_a_requeued_job_goes_on_without_losing_a_step(engine: Slurm, tmp_path: Path) -> None:
    job = HostJob(write_recipe(tmp_path, steps=400), tmp_path / "run", "folder", "2", tmp_path / "plan.toml")
    job.plan.write_text("[mesh]\nreplicate = 2\n")
    (tmp_path / "job.sh").write_text(SCRIPT.format(path=os.pathsep.join(sys.path), python=sys.executable))
    number = engine.ask("sbatch", "--parsable", "job.sh", folder=tmp_path)
    job.wait_for_step(40, seconds=90)
    engine.ask("scontrol", "requeue", number)
    while engine.ask("squeue", "-h", "-o", "%T") != "PENDING":
        time.sleep(0.2)
    done = job.num_steps
    engine.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
    job.wait_for_step(done + 1, seconds=90)
    while engine.ask("squeue", "-h"):
        time.sleep(0.2)
    steps = [each["step"] for each in job.events("step")]
    assert steps == list(range(1, 401))
    said = (tmp_path / "out").read_text()
    assert said.count("Exited with exit code 75") == 2
    assert "done      loss" in said
