"""`weft doctor` sees what is wrong with a machine, and leaves alone one that is well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli import build_app
from weft.config.cluster import Cluster, Devices, Node, dump_cluster, parse_cluster_spec, table_links
from weft.watch.doctor import MachineCheck, check_cluster, check_machine
from weft.watch.doctor.machine import (
    judge_clock,
    judge_clock_set,
    judge_cores,
    judge_descriptors,
    judge_devices,
    judge_disk,
    judge_engine,
    judge_loopback,
    judge_memory,
    judge_ports,
    judge_shared_memory,
    judge_versions,
)

GIB = 1 << 30
HERE = Path()


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (judge_versions("0.1.0", "2.10.1", "3.11.7"), "torch>=2.11,<2.14"),
        (judge_versions("0.1.0", "2.14.0", "3.11.7"), "torch>=2.11,<2.14"),
        (judge_versions("0.1.0", "", "3.11.7"), "pip install"),
        (judge_cores(2, 2, 3.9, None), "about 2 of them"),
        (judge_cores(4, 8, 0.1, "16"), "OMP_NUM_THREADS=16"),
        (judge_memory(8 * GIB, 3 * GIB, 8), "at most 3 processes"),
        (judge_shared_memory(64 << 20, 64 << 20, 8), "--shm-size=2g"),
        (judge_shared_memory(8 * GIB, 1 << 20, 4), "something fills /dev/shm"),
        (judge_shared_memory(0, 0, 4), 'compute.backend = "gloo"'),
        (judge_devices(8, "h100", "2.13.0+cpu"), "built for CPUs"),
        (judge_loopback(None, "Permission denied"), "ip link set lo up"),
        (judge_loopback(5e-3), "slow"),
        (judge_ports(60000, 60999, 990), "ip_local_port_range"),
        (judge_descriptors(256, 4096), "ulimit -n 1024"),
        (judge_descriptors(256, 256), "administrator"),
        (judge_clock(-5_000, 5e-8), "clocksource"),
        (judge_clock(10, 3e-6), "tsc"),
        (judge_disk("disk", HERE, 10**8, 1e9), "remove old runs"),
        (judge_disk("disk", HERE, 10**12, 2e6), "run.save_every"),
    ],
)
def test_what_is_wrong_is_said_with_its_change(check: MachineCheck, said: str) -> None:
    assert check.state == "change"
    assert said in f"{check.value} {check.change}"


def test_a_machine_that_is_well_is_left_alone() -> None:
    checks = (
        judge_versions("0.1.0", "2.13.0+cpu", "3.12.1"), judge_engine(True), judge_cores(8, 8, 0.3, "4"),
        judge_memory(64 * GIB, 60 * GIB, 8), judge_shared_memory(32 * GIB, 32 * GIB, 8),
        judge_devices(0, "cpu", "2.13.0+cpu"),
        judge_devices(8, "h100", "2.13.0+cu128"), judge_loopback(2e-5), judge_ports(32768, 60999, 40),
        judge_descriptors(1024, 4096), judge_descriptors(-1, -1), judge_clock(20, 5e-8), judge_clock_set(0),
        judge_disk("disk", HERE, 10**12, 1e9),
    )  # fmt: skip
    assert [check for check in checks if check.state != "ok"] == []
    assert {judge_engine(False).state, judge_clock_set(5).state} == {"note"}


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    checks = check_machine(tmp_path / "not" / "made")
    assert len({check.what for check in checks}) == len(checks) == 14
    assert all(check.value for check in checks)
    assert all(check.change for check in checks if check.state != "ok")
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_file_is_compared_with_the_machine_and_the_table() -> None:
    machine = parse_cluster_spec("1x8xh100")
    assert {check.state for check in check_cluster(machine, machine)} == {"ok"}
    assert {check.state for check in check_cluster(parse_cluster_spec("4x8xh100"), machine)} == {"ok"}
    (other,) = [check for check in check_cluster(parse_cluster_spec("1x4xa100"), machine) if check.state != "ok"]
    assert "weft probe" in other.change


@pytest.mark.parametrize(("factor", "is_wrong"), [(0.02, True), (0.3, True), (0.9, False), (1.5, False), (20.0, True)])
def test_a_wrong_peak_is_seen(factor: float, is_wrong: bool) -> None:
    machine = parse_cluster_spec("1x8xh100")
    (node,) = machine.nodes
    peaks = {"bf16": factor * node.devices.peak_flops["bf16"]}
    devices = replace(node.devices, peak_flops=peaks, measured_flops={"bf16": 0.6 * 989e12})
    checks = check_cluster(replace(machine, nodes=(replace(node, devices=devices),)), machine)
    wrong = [check for check in checks if check.state == "change"]
    assert len(wrong) == is_wrong
    assert all("peak_flops.bf16 = " in check.change for check in wrong)


def test_a_slow_link_is_seen() -> None:
    machine = parse_cluster_spec("2x8xh100")
    inner, outer = machine.links
    slow = replace(machine, links=(inner, replace(outer, bandwidth_bytes_per_second=1.25e9)))
    (wrong,) = [check for check in check_cluster(slow, machine) if check.state == "change"]
    assert wrong.what == "link network"
    assert "40 times slower" in wrong.change


def test_the_command_prints_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = Devices(kind="cpu", count=999, memory_bytes=GIB, peak_flops={"fp32": 1e11})
    links = table_links("cpu", 1, 999)
    strange = Cluster(nodes=(Node(cores=999, memory_bytes=999 * GIB, devices=devices),), links=links)
    path = tmp_path / "cluster.toml"
    path.write_text(dump_cluster(strange))
    app = build_app()
    status = app(["doctor", "--cluster", str(path)], exit_on_error=False, result_action="return_value")
    printed = capsys.readouterr().out
    assert status == 1
    assert "change  cluster file" in printed
    assert "999 cores" in printed
    assert "to change." in printed
    app(["doctor", "--json"], exit_on_error=False, result_action="return_value")
    assert json.loads(capsys.readouterr().out)[0]["what"] == "versions"
