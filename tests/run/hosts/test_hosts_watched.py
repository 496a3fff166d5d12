"""A training on several fake machines is watched: ranks of every host are named, and losing the record costs nothing.

The losses are those of one process that records nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import machines
import numpy as np
import pytest
from hosts_kit import HostJob, job_on_machines, write_recipe
from machines import Machine

import weft
from weft.run.hosts.signed import JobSecret
from weft.run.launch.launcher import ForkServer
from weft.watch.run_record import RunRecord
from weft.watch.store import FILE_NAME, TelemetryReader, has_telemetry, telemetry_files
from weft.watch.verdicts import judge
from weft.watch.views import page_of

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_etcd]

T = TypeVar("T")
STEPS, PAUSE = 160, 0.08


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    folder = tmp_path_factory.mktemp("one")
    recipe = write_recipe(folder, steps=STEPS, pause=0.0, telemetry=False)
    keywords: dict[str, Any] = {"folder": folder / "run", "fork_server": fork_server, "prove": "never", "quiet": True}
    found = list(weft.train(recipe, weft.Plan.ddp(replicate=1), **keywords).losses)
    assert not has_telemetry(folder / "run")
    return found


def seconds_until(look: Callable[[], T | None], most: float, job: HostJob) -> tuple[float, T]:
    began = time.monotonic()
    while time.monotonic() < began + most:
        if (found := look()) is not None:
            return time.monotonic() - began, found
        time.sleep(0.1)
    raise AssertionError(f"not seen in {most} s; the training is at step {job.num_steps}")


def start_all(job: HostJob, hosts: list[Machine]) -> None:
    job.start(hosts[0])
    job.wait_for(("hosts     ",), hosts[0])  # it leads
    for host in hosts[1:]:
        job.start(host)
    names = [host.name for host in hosts[1:]]
    job.wait_for((f"{len(hosts)} hosts: ", *(f"{name} has come" for name in names)), hosts[0])


def all_ranks_are_read(job: HostJob, number: int) -> RunRecord | None:
    """The record, once steps of so many ranks are in it."""
    if not has_telemetry(job.run):
        return None
    record = RunRecord(job.run)
    walls = record.window.column("wall")
    if record.num_ranks == number and len(walls) > 2 and walls.shape[1] == number and not np.isnan(walls[-3:]).any():
        return record
    record.close()
    return None


def test_ranks_of_every_host_are_named_and_a_lost_leader_leaves_a_gap(tmp_path: Path, losses: list[float]) -> None:
    options: dict[str, Any] = {"plan": "[mesh]\nreplicate = 3\n", "steps": STEPS, "pause": PAUSE, "slow_host": "node2"}
    with job_on_machines(3, tmp_path, rendezvous="etcd", nodes="2..3", **options) as (job, hosts):
        start_all(job, hosts)
        job.wait_for_step(1, seconds=90)
        read_after, record = seconds_until(lambda: all_ranks_are_read(job, 3), 90, job)
        slow = next(rank for rank, about in enumerate(record.facts.ranks) if about["host"] == "node2")

        def slow_rank_is_named() -> str | None:
            record.refresh()
            first = judge(record.window, record.facts)[0]
            return first.title if first.kind == "slow_rank" and first.ranks == (slow,) else None

        named_after, title = seconds_until(slow_rank_is_named, 20, job)
        assert f"Rank {slow} on host node2" in title
        page = page_of(record, "overview")
        assert any(f"Rank {slow} on host node2" in str(block) for block in page["blocks"])
        assert "compared with the collector's, to ± " in str(page["blocks"])

        stopped = next(rank for rank, about in enumerate(record.facts.ranks) if about["host"] == "node1")
        pid = record.live[stopped]["pid"]
        hosts[1].start(["kill", "-STOP", str(pid)]).wait(10)
        with closing(TelemetryReader(job.run)) as reader:
            hung_after, hang = seconds_until(
                lambda: next((one for one in reader.verdicts() if one["kind"] == "hang"), None), 30, job
            )

            def stacks() -> list[str] | None:
                texts = [state.get("stack", "") for rank, state in reader.live().items() if rank != stopped]
                return texts if len(texts) == 2 and all(texts) else None

            stacks_after, texts = seconds_until(stacks, 20, job)
        assert hang["ranks"] == [stopped]
        assert f"Rank {stopped} on host node1 is stopped (SIGSTOP)" in hang["title"]
        assert hang["axis"] == "data"
        assert all("/torch/distributed/" in text or "/weft/comm/" in text for text in texts)
        hosts[1].start(["kill", "-CONT", str(pid)]).wait(10)

        job.wait_for_step(job.num_steps + 10)
        hosts[0].crash()
        for host in hosts[1:]:
            assert job.wait(host, seconds=240) == 0, job.said(host)
        record.close()
        seconds = (read_after + named_after, hung_after, hung_after + stacks_after)
        print("seconds to the slow rank, to the hang, to the stacks:", *(f"{value:.1f}" for value in seconds))
        assert seconds[0] < 5
        assert max(seconds[1:]) < 15
        assert job.losses() == pytest.approx(losses, rel=2e-4)
        assert [path.name for path in telemetry_files(job.run)] == [FILE_NAME, "telemetry-2.sqlite"]
        with closing(RunRecord(job.run)) as record:
            assert not record.problem
            assert record.steps[-1].step == STEPS
            assert {about["host"] for about in record.facts.ranks} == {"node1", "node2"}
            assert [facts.number for facts in record.generations] == sorted(
                facts.number for facts in record.generations
            )
            assert not np.isnan(record.window.column("wall")[2:-1]).any()
            (gap,) = [gap for gap in record.gaps if "telemetry-2.sqlite" in gap.reason]
            assert gap.step > 0
            assert "telemetry-2.sqlite, by host node" in str(page_of(record, "overview")["blocks"])


@contextmanager
def small_disk(folder: Path) -> Generator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def test_a_full_disk_of_the_collector_is_a_gap(tmp_path: Path, losses: list[float]) -> None:
    """The file of the telemetry lies on a disk of its own, which is full for a while."""
    options: dict[str, Any] = {"plan": "[mesh]\nreplicate = 2\n", "steps": STEPS, "pause": PAUSE}
    with (
        small_disk(tmp_path / "disk") as disk,
        job_on_machines(2, tmp_path, rendezvous="folder", nodes="2", **options) as (job, hosts),
    ):
        job.run.mkdir(mode=0o700)
        JobSecret.of_folder(job.run)  # makes it a run's folder
        (job.run / FILE_NAME).symlink_to(disk / FILE_NAME)
        start_all(job, hosts)
        seconds_until(lambda: all_ranks_are_read(job, 2), 90, job)
        filler = disk / "filler"
        fill(filler)
        full_from = job.num_steps
        job.wait_for_step(full_from + 40)
        filler.unlink()
        assert [job.wait(host, seconds=240) for host in hosts] == [0, 0]
        assert job.losses() == pytest.approx(losses, rel=2e-4)
        with closing(RunRecord(job.run)) as record:
            assert record.steps[-1].step == STEPS, "recorded again once there was room"
            gaps = [gap for gap in record.gaps if "could not be written" in gap.reason]
            assert sum(gap.steps for gap in gaps) >= 10
            assert len(record.steps) + sum(gap.steps for gap in gaps) == STEPS
            assert "disk is full" in str(page_of(record, "overview")["blocks"])


def test_torchrun_on_two_hosts_is_recorded_whole(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "watch" / "slow_script.py"
    with machines.machines(2, tmp_path / "machines") as hosts:
        words = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "1"]
        words += ["--master-addr", hosts[0].address, "--master-port", "29511"]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "eth0"}
        started = [
            host.start(
                [*words, "--node-rank", str(index), str(script), "1", "forward", "0.03", "120"],
                folder=tmp_path, environment=environment,
            )
            for index, host in enumerate(hosts)
        ]  # fmt: skip
        said = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    (run,) = (tmp_path / "runs").iterdir()
    with closing(RunRecord(run)) as record:
        assert [about["host"] for about in record.facts.ranks] == ["node0", "node1"]
        assert record.facts.clock_error_seconds is not None
        assert record.steps[-1].step == 120
        assert not np.isnan(record.window.column("wall")).any()
        assert record.gaps == []
        assert "Rank 1 on host node1" in judge(record.window, record.facts)[0].title
