"""`weft doctor RUN` finds planted faults of drawn sizes on drawn ranks, and says nothing of runs that are well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faulty_runs import FaultyRun, cpu_cluster, healthy

from weft.cli import build_app
from weft.config.cluster import dump_cluster
from weft.watch.verdicts import RunVerdict

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, seed: int) -> None:
    assert healthy(tmp_path / "run", seed).findings() == []


def test_what_lies_beside_a_run_is_no_fault(tmp_path: Path) -> None:
    for name, content in (("bytes", b"\xff\xfe"), ("toml", b"[model]\n"), ("none", None)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "recipe.toml").write_bytes(content)
    assert healthy(tmp_path / "run", 1).findings() == []


def test_ranks_that_recorded_nothing_are_no_fault(tmp_path: Path) -> None:
    run = FaultyRun(folder=tmp_path)
    run.add(60, missing=frozenset({1, 2}))
    run.end()
    assert run.findings() == []


def test_stages_that_cannot_be_more_equal_are_no_fault(tmp_path: Path) -> None:
    slow = {(rank, "forward"): 0.016 for rank in (0, 1)}
    run = FaultyRun(folder=tmp_path, data=2, pipeline=2, slow=slow)
    run.add(60)
    run.end()
    assert [verdict.kind for verdict in run.case().record.verdicts] == ["unequal_stages"]
    assert run.findings() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_what_other_programs_took_is_no_fault_of_the_run(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lost, ranks = float(draw.uniform(0.015, 0.04)), tuple(map(int, draw.choice(4, int(draw.integers(1, 5)), False)))
    parts = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}
    slow = {(rank, phase): share * lost for rank in ranks for phase, share in parts.items()}
    run = FaultyRun(folder=tmp_path, slow=slow, lost=lost, without_core=ranks, others=float(draw.uniform(0.05, 0.1)))
    run.add(60)
    run.end()
    (finding,) = run.findings()
    assert finding.kind == "busy_machine"
    assert not finding.is_of_run, "the command's status is 0"
    assert finding.ranks == (() if len(ranks) == 4 else tuple(sorted(ranks)))


def _two_threads_per_core(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    return FaultyRun(folder=folder, threads=2, lost=float(draw.uniform(0.02, 0.05)),
                     without_core=(0, 1, 2, 3), cluster=cpu_cluster(2)), "busy_cores", None  # fmt: skip


def _throttled(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    rank, factor = int(draw.integers(4)), float(draw.uniform(0.4, 1.5))
    slow = {
        (rank, phase): factor * base for phase, base in (("forward", 0.02), ("backward", 0.04), ("optimizer", 0.008))
    }
    lost = sum(slow.values()) if draw.random() < 0.5 else 0.0
    return FaultyRun(folder=folder, slow=slow, lost=lost, without_core=(rank,)), "throttled_rank", rank


def _slow_phase(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    rank, phase = int(draw.integers(4)), str(draw.choice(["forward", "backward", "optimizer"]))
    return FaultyRun(folder=folder, slow={(rank, phase): float(draw.uniform(0.02, 0.05))}), "slow_rank", rank


def _unequal_cut(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    more = float(draw.uniform(0.01, 0.06))  # of the second stage, which has three of four blocks
    slow = {(rank, phase): more / 2 for rank in (2, 3) for phase in ("forward", "backward")}
    cuts = "[pipeline_parallel]\ncuts = [1]"
    return FaultyRun(folder=folder, data=2, pipeline=2, slow=slow, cuts=cuts), "unequal_stages", 2


def _slow_input(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    more = float(draw.uniform(0.02, 0.1))
    return FaultyRun(folder=folder, slow={(rank, "data_wait"): more for rank in range(4)}), "slow_input", None


def _slow_link(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    return FaultyRun(folder=folder, link=float(draw.uniform(0.05, 0.3))), "slow_link", None


def _tiny_microbatch(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    sizes = {"hidden": int(draw.choice([64, 128])), "tokens": int(draw.choice([32, 64])), "size": 1}
    return FaultyRun(folder=folder, batch=int(draw.choice([64, 128])), share=0.1, **sizes), "tiny_microbatches", None


def _fp32(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    cluster = cpu_cluster(bf16=float(draw.uniform(2, 12)))
    return FaultyRun(folder=folder, precisions='"fp32", "bf16"', cluster=cluster), "unused_precision", None


def _impossible_share(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    return FaultyRun(folder=folder, share=float(draw.uniform(1.3, 4))), "wrong_peak", None


def _stated_peak(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    factor = float(draw.uniform(4, 20)) ** float(draw.choice([-1, 1]))
    return FaultyRun(folder=folder, cluster=cpu_cluster(peak=1e11 * factor)), "wrong_peak", None


def _growing_memory(folder: Path, draw: np.random.Generator) -> tuple[FaultyRun, str, int | None]:
    rank = int(draw.integers(4))
    return FaultyRun(folder=folder, leak=float(draw.uniform(2e5, 5e6)), leaks=rank), "growing_memory", rank


FAULTS = (_two_threads_per_core, _throttled, _slow_phase, _unequal_cut, _slow_input, _slow_link, _tiny_microbatch,
          _fp32, _impossible_share, _stated_peak, _growing_memory)  # fmt: skip
Fault = Callable[[Path, np.random.Generator], tuple[FaultyRun, str, int | None]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, fault: Fault, seed: int) -> None:
    run, kind, rank = fault(tmp_path / "run", np.random.default_rng(seed))
    run.add(60)
    run.end()
    first = run.findings()[0]
    assert first.kind == kind, run.findings()
    assert rank is None or rank in first.ranks
    if kind == "unequal_stages":
        assert "out of the plan" in first.next
        assert first.promise
    if kind == "busy_cores":
        assert "compute.threads_per_rank = 1" in first.next
    assert first.next
    assert first.evidence


def _with_events(folder: Path, *events: dict[str, object], kind: str) -> RunVerdict:
    run = FaultyRun(folder=folder)
    run.add(60)
    for values in events:
        run.event(**values)  # type: ignore[arg-type]
    run.end()
    (finding,) = run.findings()
    assert finding.kind == kind
    return finding


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_disk_is_found_by_its_saves(tmp_path: Path, seed: int) -> None:
    waits = np.random.default_rng(seed).uniform(0.05, 2.0)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "weights").write_bytes(bytes(10**6))
    saves = [{"kind": "checkpoint", "step": step, "path": str(saved), "seconds": float(waits), "copy_seconds": 0.0,
              "problem": ""} for step in range(10, 61, 10)]  # fmt: skip
    finding = _with_events(tmp_path / "run", *saves, kind="slow_saves")
    wanted = int(finding.next.split("run.save_every = ")[1].split(",")[0])
    assert waits / (wanted * 0.08) < 0.011
    assert any("1 MB" in line for line in finding.evidence)


def test_saves_that_fail_or_never_reach_the_disk_are_found(tmp_path: Path) -> None:
    save = {"kind": "checkpoint", "path": "x", "seconds": 0.001, "copy_seconds": 3.0, "problem": ""}
    late = [save | {"step": step} for step in range(10, 61, 10)]
    assert "never reach the disk" in _with_events(tmp_path / "late", *late, kind="slow_saves").title
    failed = save | {"step": 20, "problem": "No space left on device"}
    assert "1 of 1" in _with_events(tmp_path / "failed", failed, kind="failed_saves").title


@pytest.mark.parametrize(("failure", "kind"), [("host_memory", "out_of_memory"), ("device_memory", "out_of_memory"),
                                               ("hang", "hang")])  # fmt: skip
def test_what_ended_a_generation_is_found(tmp_path: Path, failure: str, kind: str) -> None:
    rank = int(np.random.default_rng(5).integers(4))
    event = {"kind": "generation", "number": 2, "world_size": 4, "plan": "abc", "failure": failure, "rank": rank,
             "host": "host-1", "cause": "it ended", "failed_step": 31, "restored_step": 30}  # fmt: skip
    finding = _with_events(tmp_path, event, kind=kind)
    assert finding.ranks == (rank,)
    if kind == "out_of_memory":
        assert "microbatch.size = 4" in finding.next


@pytest.mark.parametrize("seed", SEEDS)
def test_an_expert_that_gets_all_tokens_is_found(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    number, choices = int(draw.choice([4, 8, 16])), int(draw.choice([1, 2]))
    most = int(draw.integers(number))
    run = FaultyRun(folder=tmp_path, experts=number, choices=choices)
    run.add(60)
    fair = draw.dirichlet(np.full(number, 50.0))
    run.event("step", step=60, load={"blocks.0.router": fair.tolist(), "blocks.1.router": fair.tolist()})
    run.end()
    assert run.findings() == []
    load = (1 - 0.95 / choices) * draw.dirichlet(np.full(number, 50.0))
    load[most] += 0.95 / choices - load[most]
    run.event("step", step=60, load={"blocks.0.router": fair.tolist(), "blocks.1.router": load.tolist()})
    run.event("step", step=61, load={"blocks.0.router": fair.tolist(), "blocks.1.router": load.tolist()})
    run.event("step", step=62, load={"blocks.0.router": fair.tolist(), "blocks.1.router": load.tolist()})
    (finding,) = run.findings()
    assert finding.title.startswith(f"Expert {most} of blocks.1.router")


def test_a_loss_that_rises_again_is_found(tmp_path: Path) -> None:
    run = FaultyRun(folder=tmp_path)
    run.add(80)
    rows = run.case().record.steps
    for row in rows[40:]:
        grown = (row.loss or 0.0) * (1 + 0.02 * (row.step - 40))
        run.writer._database.execute("UPDATE step SET loss = ? WHERE step = ?", (grown, row.step))
    run.end()
    (finding,) = run.findings()
    assert finding.kind == "diverging"
    assert "optimizer.learning_rate = 0.0001, and optimizer.warmup_steps = 50" in finding.next


def test_steps_without_a_finite_gradient_are_found(tmp_path: Path) -> None:
    run = FaultyRun(folder=tmp_path)
    run.add(60)
    run.writer._database.execute("UPDATE step SET skipped = 1, loss = NULL WHERE step % 5 = 0")
    run.end()
    assert [finding.kind for finding in run.findings()] == ["not_finite"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rate_that_did_not_follow_the_batch_is_found_by_a_run_beside_it(tmp_path: Path, seed: int) -> None:
    factor = int(np.random.default_rng(seed).choice([4, 8, 16]))
    small = FaultyRun(folder=tmp_path / "small", seed=seed, batch=32)
    large = FaultyRun(folder=tmp_path / "large", seed=seed, batch=32 * factor, size=8 * factor)
    for run in (small, large):
        run.add(200)
        run.end()
    assert small.findings() == []
    (finding,) = large.findings()
    assert finding.kind == "unscaled_rate"
    assert 'batch_scaling = "square_root" and base_batch_size = 32' in finding.next
    assert f"{3e-4 * factor**0.5:.2g}" in finding.next


def test_the_command_says_what_the_planner_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, _ = _tiny_microbatch(tmp_path / "run", np.random.default_rng(0))
    run.add(60)
    run.end()
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(dump_cluster(run.cluster))
    command = ["doctor", str(run.folder), "--cluster", str(cluster)]
    app = build_app()
    assert app([*command, "--fix"], exit_on_error=False, result_action="return_value") == 1
    printed = capsys.readouterr().out
    assert "run: 60 steps, " in printed
    assert "corrected by these steps, predicts" in printed
    assert "weft replan" in printed
    assert (run.folder / "better-plan.toml").is_file()
    app([*command, "--json"], exit_on_error=False, result_action="return_value")
    assert json.loads(capsys.readouterr().out)[0]["kind"] == "tiny_microbatches"
    empty = tmp_path / "well"
    healthy(empty, 1)
    assert app(["doctor", str(empty)], exit_on_error=False, result_action="return_value") == 0
    assert "Nothing is known to be wrong." in capsys.readouterr().out
