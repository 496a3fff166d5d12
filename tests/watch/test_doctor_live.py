"""`weft doctor RUN` names what is wrong with real trainings, in which faults of drawn sizes are planted on drawn ranks,
and accuses no run that is well, however busy its machine is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trained_runs import DIGITS, EXPERTS, SLOW, TrainedRun, said_of, slow_disk, stopped_in_part

from weft.config.cluster import Cluster, dump_cluster, known_machine
from weft.run.launch.launcher import ForkServer

SEEDS = (1, 2, 3)
MACHINE = "busy_machine"
"""The kind of what a machine did to a run, which may stand beside everything."""


def kinds_of(said: list[dict[str, Any]]) -> set[str]:
    return {one["kind"] for one in said} - {MACHINE}


def one_of(said: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The finding of a kind, or the first one; where there is none, everything that is said."""
    found = [one for one in said if one["kind"] == kind]
    assert found, "\n".join(f"{one['kind']}: {one['title']} {one['evidence']}" for one in said)
    return found[0]


def _two_threads_per_core(folder: Path, draw: np.random.Generator) -> tuple[TrainedRun, str, int | None]:
    return TrainedRun(folder=folder, threads=int(draw.choice([2, 3])), steps=25), "busy_cores", None


def _tiny_microbatches(folder: Path, draw: np.random.Generator) -> tuple[TrainedRun, str, int | None]:
    number, tokens = int(draw.choice([8, 16])), int(draw.choice([8, 16, 32]))
    return (
        TrainedRun(folder=folder, batch=2 * number, size=1, per_step=number, tokens=tokens),
        "tiny_microbatches",
        None,
    )


def _unbalanced_cut(folder: Path, draw: np.random.Generator) -> tuple[TrainedRun, str, int | None]:
    layers, at_end = int(draw.choice([6, 8])), bool(draw.random() < 0.5)
    cuts = f"[pipeline_parallel]\ncuts = [{layers - 1 if at_end else 1}]"
    sizes = {"layers": layers, "hidden": 64, "tokens": 64, "batch": 8, "size": 4, "per_step": 2}
    return TrainedRun(folder=folder, mesh={"pipeline": 2}, more=cuts, **sizes), "unequal_stages", 0 if at_end else 1


def _growing_memory(folder: Path, draw: np.random.Generator) -> tuple[TrainedRun, str, int | None]:
    rank, leak = int(draw.integers(2)), int(draw.uniform(5e5, 4e6))
    run = TrainedRun(folder=folder, model=SLOW, pause=0.02, leak=leak, leaks=rank, steps=60)
    return run, "growing_memory", rank


def _one_expert(folder: Path, draw: np.random.Generator) -> tuple[TrainedRun, str, int | None]:
    """Tokens that are all alike choose alike."""
    corpus = folder.with_name("corpus")
    corpus.mkdir()
    (corpus / "all.txt").write_text(f"{'ab'[int(draw.integers(2))]} " * 50_000)
    experts = int(draw.choice([4, 8]))
    run = TrainedRun(
        folder=folder, model=EXPERTS, experts=experts, choices=int(draw.choice([1, 2])), source=str(corpus)
    )
    return run, "one_expert", None


FAULTS = (_two_threads_per_core, _tiny_microbatches, _unbalanced_cut, _growing_memory, _one_expert)
Fault = Callable[[Path, np.random.Generator], tuple[TrainedRun, str, int | None]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(tmp_path: Path, fork_server: ForkServer, fault: Fault, seed: int) -> None:
    run, kind, rank = fault(tmp_path / "run", np.random.default_rng(seed))
    said = said_of(run.train(fork_server))
    finding = one_of(said, kind)
    assert rank is None or rank in finding["ranks"], finding
    # What it takes from the system to grow takes time, too: the rank that does so is slower than its peers.
    follows = {"slow_rank"} if kind == "growing_memory" else set[str]()
    assert kinds_of(said) - follows == {kind}, said
    assert all(one["ranks"] == [rank] for one in said if one["kind"] in follows)
    assert finding["evidence"]
    assert finding["next"]
    if kind == "busy_cores":
        assert "compute.threads_per_rank = 1" in finding["next"]
    if kind == "unequal_stages":
        assert "out of the plan" in finding["next"]


# ── the machine, as a file has it ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """A run that is well, and permits bf16."""
    run = TrainedRun(folder=tmp_path_factory.mktemp("plain") / "run", hidden=64, precisions='"fp32", "bf16"')
    return run.train(fork_server)


def _written(folder: Path, **flops: float) -> str:
    """A cluster file of this machine, whose peaks are those given, as factors of that in fp32."""
    machine = known_machine().cluster
    (node,) = machine.nodes
    base = node.devices.peak_flops["fp32"]
    peaks = {precision: factor * base for precision, factor in flops.items()}
    devices = replace(node.devices, peak_flops=peaks, measured_flops={}, measured=None)
    path = folder / "cluster.toml"
    path.write_text(dump_cluster(Cluster(nodes=(replace(node, devices=devices),), links=machine.links)))
    return str(path)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_peak_is_named(tmp_path: Path, plain_run: Path, seed: int) -> None:
    factor = float(np.random.default_rng(seed).uniform(8, 20)) ** (-1 if seed % 2 else 1)
    said = said_of(plain_run, "--cluster", _written(tmp_path, fp32=factor))
    assert ("more" if factor < 1 else "less") in one_of(said, "wrong_peak")["title"]
    assert kinds_of(said) == {"wrong_peak"}


@pytest.mark.parametrize("seed", SEEDS)
def test_bf16_is_advised_where_the_machine_is_faster_in_it(tmp_path: Path, plain_run: Path, seed: int) -> None:
    factor = float(np.random.default_rng(seed).uniform(2, 12))
    said = said_of(plain_run, "--cluster", _written(tmp_path, fp32=1.0, bf16=factor))
    assert 'compute.precision = "bf16"' in one_of(said, "unused_precision")["next"]
    assert kinds_of(said) == {"unused_precision"}
    assert kinds_of(said_of(plain_run, "--cluster", _written(tmp_path, fp32=1.0, bf16=1 / factor))) == set()


# ── ranks, storage, and the learning rate ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
def test_a_throttled_rank_is_named(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rank, share = int(draw.integers(2)), float(draw.uniform(0.4, 0.7))
    run = TrainedRun(folder=tmp_path / "run", hidden=64, tokens=64, steps=120)
    with stopped_in_part(run.folder, rank, share):
        said = said_of(run.train(fork_server))
    if any(one["kind"] == MACHINE and one["share"] > 0.6 for one in said):
        pytest.skip("other programs leave ranks less than the throttle does: it slows none of them")
    assert one_of(said, "throttled_rank")["ranks"] == [rank]
    assert kinds_of(said) == {"throttled_rank"}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_input_that_starves_is_named(tmp_path: Path, seed: int) -> None:
    seconds = float(np.random.default_rng(seed).uniform(0.005, 0.03))
    script = str(Path(__file__).with_name("starved_script.py"))
    command = [sys.executable, "-m", "weft.cli", "launch", "-n", "2", script, str(seconds), "40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    said = said_of(run)
    finding = one_of(said, "slow_input")
    assert 2 * seconds < finding["seconds"] < 40 * seconds
    assert kinds_of(said) == {"slow_input"}


@pytest.mark.needs_root
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_disk_is_named(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    draw = np.random.default_rng(seed)
    with slow_disk(tmp_path, float(draw.uniform(2e6, 8e6))) as folder:
        every = int(draw.choice([5, 6, 8]))
        run = TrainedRun(folder=folder / "run", hidden=128, vocabulary=4096, save_every=every)
        said = said_of(run.train(fork_server))
    assert "run.save_every = " in one_of(said, "slow_saves")["next"]
    assert kinds_of(said) == {"slow_saves"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rate_that_did_not_follow_the_batch_is_named(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    factor = int(np.random.default_rng(seed).choice([8, 16]))
    sizes: dict[str, Any] = {"model": DIGITS, "source": "digits", "hidden": 32, "rate": 3e-4, "steps": 60}
    small = TrainedRun(folder=tmp_path / "small", batch=16, size=8, **sizes | {"steps": 160})
    large = TrainedRun(folder=tmp_path / "large", batch=16 * factor, size=8 * factor, **sizes)
    assert kinds_of(said_of(small.train(fork_server))) == set()
    said = said_of(large.train(fork_server))
    assert "base_batch_size = 16" in one_of(said, "unscaled_rate")["next"]
    assert kinds_of(said) == {"unscaled_rate"}


# ── runs that are well ───────────────────────────────────────────────────────────────────────────────────────────────

WELL: dict[str, dict[str, Any]] = {
    "data 1": {"mesh": {}, "size": 8},
    "data 2": {},
    "zero 2": {"zero": 2},
    "zero 3": {"mesh": {"shard": 2}, "zero": 3},
    "tensor 2": {"mesh": {"tensor": 2}, "size": 8},
    "pipeline 2": {"mesh": {"pipeline": 2}, "layers": 6, "tokens": 64, "batch": 16, "size": 2, "per_step": 8},
    "experts": {"mesh": {"shard": 2, "expert": 2}, "model": EXPERTS, "experts": 4, "choices": 2},
    "digits": {"model": DIGITS, "source": "digits", "batch": 64, "size": 32, "steps": 60},
    # As with accelerators: ranks wait most of the time, and do not take the processors from one another.
    "data 4": {"mesh": {"replicate": 4}, "model": SLOW, "pause": 0.08, "size": 2},
}


@pytest.mark.parametrize("plan", WELL)
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, fork_server: ForkServer, plan: str) -> None:
    draw = np.random.default_rng(list(WELL).index(plan))
    sizes: dict[str, Any] = {"hidden": int(draw.choice([64, 96])), "tokens": int(draw.choice([32, 64])), "steps": 40}
    run = TrainedRun(folder=tmp_path / "run", **sizes | WELL[plan])
    said = [one for one in said_of(run.train(fork_server)) if one["kind"] != MACHINE]
    assert said == []
