"""What a recorded run teaches the planner, and which runs teach nothing."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from recorded_runs import MadeUpRun

from weft.api import train
from weft.config.cluster import Cluster, known_machine, parse_cluster, parse_cluster_spec
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, dump_plan
from weft.config.recipe import parse_recipe
from weft.model.description import profile_of
from weft.model.profile import Profile
from weft.planning.learned import RecordedRun, keep_run, learned_here
from weft.planning.price import CostModel
from weft.techniques.cost_terms import DATASHEET, Layout
from weft.watch.learning import run_to_learn
from weft.watch.run_record import RunRecord

if TYPE_CHECKING:
    from weft.run.launch.launcher import ForkServer

CLUSTER = """
[[nodes]]
cores = {cores}
memory_bytes = 25_000_000_000
[nodes.devices]
kind = "cpu"
count = {cores}
memory_bytes = 12_000_000_000
peak_flops = {{ fp32 = 1e11 }}
"""


@pytest.fixture
def profile() -> Profile:
    return profile_of(
        parse_recipe(
            '[model]\nreference = "decoder"\nnum_layers = 2\nhidden_size = 128\nnum_heads = 4\n'
            "sequence_length = 128\n[batch]\nglobal_batch_size = 16\n[run]\nsteps = 40\n"
        )
    )


def machine(cores: int) -> Cluster:
    return parse_cluster(CLUSTER.format(cores=cores))


def recorded(folder: Path, *, steps: int = 60, away: float = 0.0, data: int = 2, **compute: Any) -> RunRecord:
    plan = Plan(
        mesh=MeshPlan(replicate=data), data_parallel=DataParallelPlan(zero=1),
        microbatch=MicrobatchPlan(size=16 // data, per_step=1),
        compute=ComputePlan(precision="fp32", **{"threads_per_rank": 1, **compute}),
    )  # fmt: skip
    run = MadeUpRun(folder=folder, data=data, seed=3, plan=dump_plan(plan), away=away)
    run.add(steps)
    return RunRecord(folder)


def learned(record: RunRecord, profile: Profile, cores: int = 2) -> RecordedRun:
    run = run_to_learn(record, profile, machine(cores))
    assert isinstance(run, RecordedRun), run
    return run


def test_the_parts_of_a_step_are_what_was_recorded(profile: Profile, tmp_path: Path) -> None:
    run = learned(recorded(tmp_path / "run"), profile)
    assert run.measured.computing == pytest.approx(0.061, rel=0.03)
    assert run.measured.communication == pytest.approx(0.0054, rel=0.15)
    assert run.measured.optimizer == pytest.approx(0.0086, rel=0.05)
    assert run.measured.other == pytest.approx(0.003, rel=0.1)
    assert run.measured.step == pytest.approx(0.078, rel=0.03)
    assert (run.steps, run.precision, run.cores, run.descheduled) == (27, "fp32", 1.0, 0.0)
    assert (run.model, run.plan) == ("decoder, 1.48 M parameters", "data 2, ZeRO-1")
    assert run.priced.products > run.priced.plain > 0
    assert run.problem == ""


def test_time_that_other_work_took_is_none_of_the_machine(profile: Profile, tmp_path: Path) -> None:
    quiet = learned(recorded(tmp_path / "quiet"), profile)
    busy = learned(recorded(tmp_path / "busy", away=0.6), profile)
    assert busy.measured.step == pytest.approx(quiet.measured.step, rel=0.02)
    assert busy.measured.computing == pytest.approx(quiet.measured.computing, rel=0.02)


def test_a_run_corrects_the_next_prediction(profile: Profile, tmp_path: Path) -> None:
    run = learned(recorded(tmp_path / "run"), profile)
    keep_run(run, machine(2), tmp_path / "cache")
    known = learned_here(machine(2), tmp_path / "cache")
    layout = Layout(microbatch_size=8, microbatches=1, replicate=2, precision="fp32", zero=1)
    calibration = known.calibration(DATASHEET)
    predicted = CostModel(profile, machine(2), calibration=calibration).predict(layout, exact=True).step_seconds
    assert abs(math.log(predicted / run.measured.step)) < 0.5 * abs(math.log(run.priced.step / run.measured.step))


@pytest.mark.parametrize(
    ("why", "run", "cores"),
    [
        ("4 ranks shared 2 cores", {"data": 4}, 2),
        ("its ranks had 1 threads, and prices take 2", {}, 4),
        ("its blocks were compiled", {"compile": True}, 2),
        ("it has 6 steps beside the first ones", {"steps": 11}, 2),
    ],
)
def test_runs_that_say_nothing_of_prices(
    why: str, run: dict[str, Any], cores: int, profile: Profile, tmp_path: Path
) -> None:
    reason = run_to_learn(recorded(tmp_path / "run", **run), profile, machine(cores))
    assert isinstance(reason, str)
    assert why in reason


def test_a_run_beside_other_work_says_so(profile: Profile, tmp_path: Path) -> None:
    """Of eleven steady steps every second is disturbed, and none is left out."""
    reason = run_to_learn(recorded(tmp_path / "run", steps=18, away=0.9), profile, machine(2))
    assert isinstance(reason, str)
    assert reason.startswith("other work took ")
    assert reason.endswith("above 35 %")


def test_a_run_without_telemetry_or_on_an_accelerator_teaches_nothing(profile: Profile, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2)
    run.end()
    assert run_to_learn(RunRecord(tmp_path / "run"), profile, machine(2)) == "it was not recorded"
    assert "only runs on the cores" in str(
        run_to_learn(RunRecord(tmp_path / "run"), profile, parse_cluster_spec("8xh100"))
    )


def test_a_training_says_what_it_taught_or_why_it_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fork_server: ForkServer
) -> None:
    recipe = parse_recipe(
        '[model]\nreference = "mlp"\nnum_layers = 2\ninput_size = 64\nhidden_size = 64\nnum_classes = 10\n[data]\n'
        'train = [{ source = "synthetic" }]\n[batch]\nglobal_batch_size = 16\n[run]\nsteps = 40\n'
    )
    plan = Plan(compute=ComputePlan(threads_per_rank=known_machine().cluster.num_cores))
    plan = replace(plan, microbatch=MicrobatchPlan(size=16, per_step=1))
    train(recipe, plan, folder=tmp_path / "run", prove="never", fork_server=fork_server)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("learned "))
    cluster = known_machine().cluster
    kept = learned_here(cluster).num_runs
    if line.startswith("learned   nothing: other work took "):  # this machine is busy
        assert kept == 0
    else:
        assert line.endswith("predictions are corrected by 1 run now")
        assert kept == 1
        assert learned_here(cluster).source.startswith(os.environ["XDG_CACHE_HOME"])
