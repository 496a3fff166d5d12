"""`weft probe`: what it measures, how ranks agree, and the cluster that it writes."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pool
import pytest
import torch
import torch.distributed as dist

from weft.comm.algorithms import table_from_json
from weft.config.cluster import (
    AttentionSpeed,
    BlockTime,
    CollectiveTime,
    MatrixSpeed,
    Measured,
    MemorySpeed,
    Node,
    dump_cluster,
    load_cluster,
    parse_cluster,
    parse_cluster_spec,
)
from weft.config.document import typed
from weft.errors import ClusterError
from weft.planning.price import choose_algorithm
from weft.run.launch import RankInfo
from weft.run.probe import probe
from weft.run.probe._choices import worlds_of
from weft.run.probe._devices import Concurrency, number_of_figures
from weft.run.probe._links import KINDS, line_of, number_of_times, peers_of
from weft.run.probe._probe import cluster_of
from weft.run.probe._rank import Findings, probe_rank, settings_of, unsteady
from weft.run.probe._timing import Timing, slowest, summarise
from weft.techniques.cost_terms import Layout, Network

CPU = torch.device("cpu")


def test_settings_begin_with_what_training_uses() -> None:
    assert settings_of(CPU, 4, 2) == [Concurrency(2, 1), Concurrency(1, 2), Concurrency(4, 1), Concurrency(1, 1)]
    assert settings_of(CPU, 1, 4) == [Concurrency(1, 4), Concurrency(1, 1), Concurrency(1, 2)]
    assert settings_of(CPU, 8, 8)[:2] == [Concurrency(8, 1), Concurrency(1, 8)]
    assert set(settings_of(CPU, 8, 8)) >= {Concurrency(2, 4), Concurrency(4, 2), Concurrency(1, 4)}
    assert settings_of(torch.device("cuda", 0), 8, 128) == [Concurrency(8, 1), Concurrency(1, 1)]
    assert settings_of(torch.device("cuda", 0), 1, 128) == [Concurrency(1, 1)]


def test_peers_inside_and_between_nodes() -> None:
    alone = peers_of(RankInfo(0, 4, 0, 4))
    assert [(p.reach, p.groups) for p in alone] == [
        ("inside", ((0, 1),)),
        ("inside", ((0, 1), (2, 3))),
        ("inside", ((0, 1, 2, 3),)),
    ]
    pairs = peers_of(RankInfo(0, 6, 0, 2))
    assert [(p.reach, p.groups) for p in pairs] == [
        ("inside", ((0, 1), (2, 3), (4, 5))),  # on all nodes at once: they share nothing
        ("between", ((0, 2),)),
        ("between", ((0, 2), (1, 3))),
        ("between", ((0, 2, 4),)),
        ("between", ((0, 2, 4), (1, 3, 5))),
    ]
    assert peers_of(RankInfo(0, 1, 0, 1)) == []


def test_worlds_whose_choices_are_measured() -> None:
    assert worlds_of(RankInfo(0, 4, 0, 4)) == [(0, 1), (0, 1, 2, 3)]
    assert worlds_of(RankInfo(0, 6, 0, 3)) == [(0, 1), (0, 1, 2), (0, 1, 2, 3, 4, 5)]
    assert worlds_of(RankInfo(0, 2, 0, 1)) == [(0, 1)]
    assert worlds_of(RankInfo(0, 1, 0, 1)) == []


def test_median_and_spread() -> None:
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 0.5)
    assert slowest([Timing(1.0, 0.1)]) == [(1.0, 0.1)]


def _slowest() -> list[tuple[float, float]]:
    rank = dist.get_rank()
    return [tuple(timing) for timing in slowest([Timing(rank, 0.1 * rank), Timing(5.0 - rank, 0.5)])]


def test_the_slowest_rank_counts(ranks: pool.RankPool) -> None:
    assert ranks.run(3, _slowest) == [[(2.0, 0.2), (5.0, 0.5)]] * 3


def _probe() -> dict[str, object]:
    said: list[str] = []
    rank, world = dist.get_rank(), dist.get_world_size()
    threads = torch.get_num_threads()
    results = probe_rank(
        RankInfo(rank, world, rank, world),
        cores=1 + rank,
        memory_bytes=4 << 30,
        budget_seconds=0.01,
        precisions=["fp32"],
        log=said.append,
    )
    assert torch.get_num_threads() == threads
    return {"found": dataclasses.asdict(results), "said": said}


def test_ranks_measure_together_and_agree(ranks: pool.RankPool) -> None:
    first, second = ranks.run(2, _probe, timeout=240)
    assert first["found"]["measured"] == second["found"]["measured"]
    assert first["found"]["links"] == second["found"]["links"]
    results = typed(Findings, first["found"])
    assert dataclasses.asdict(results) == first["found"]
    assert results.cores == 1  # of the node that has fewest
    assert results.measured.settings == ((1, 1), (2, 1))
    assert {row.kind for row in results.links["inside"]} == set(KINDS)
    assert len(results.links["inside"]) == number_of_times(RankInfo(0, 2, 0, 2), CPU)
    rows = [*results.measured.matrix, *results.measured.attention, *results.measured.memory]
    assert len(rows) + 2 * len(results.measured.blocks) + 2 == 2 * number_of_figures(CPU, ["fp32"])
    assert all(math.isfinite(row.seconds) and 0 < row.seconds < 60 for row in [*rows, *results.links["inside"]])
    assert 0 < results.measured.operator_seconds < 1e-2
    assert [line.split(":")[0] for line in first["said"]][:3] == [
        "1 rank x 1 thread",
        "2 ranks x 1 thread",
        "links inside a node",
    ]
    (text,) = results.tables
    table = table_from_json(text)
    assert table.members == 2
    assert [row.collective for row in table.rows] == ["all_reduce", "reduce_scatter", "all_gather"]
    assert first["said"][3].startswith("choices of 2 ranks: up to 1K, ")
    assert len(first["said"]) == 4 + (unsteady(results.measured) is not None)
    cluster = cluster_of(results, parse_cluster_spec("cpu").nodes[0])
    assert parse_cluster(dump_cluster(cluster)) == cluster
    assert cluster.is_predictable
    world = Network(cluster).groups(Layout(replicate=2)).world
    assert {choose_algorithm(kind, 1e6, world).algorithm for kind in KINDS} == {"measured"}


def findings(device: str = "cpu", ranks: int = 2, nodes: int = 1) -> Findings:
    settings = [(1, 2), (2, 1), (4, 1)] if device == "cpu" else [(ranks, 1), (1, 1)]
    each = {setting: {"ranks": setting[0], "threads": setting[1]} for setting in settings}
    links = [
        CollectiveTime(kind=kind, members=2, groups=groups, size_bytes=size, seconds=groups * (1e-4 + size / 1e9))
        for kind in KINDS
        for groups in (1, 2)
        for size in (1 << 12, 1 << 24)
    ]
    return Findings(
        device=device,
        cores=2,
        memory_bytes=8 << 30,
        num_nodes=nodes,
        ranks_per_node=ranks,
        measured=Measured(
            matrix=tuple(
                MatrixSpeed(precision=precision, m=512, n=512, k=512, seconds=seconds * setting[0], **each[setting])
                for setting in settings
                for precision, seconds in (("fp32", 1e-3), ("bf16", 5e-4))
            ),
            attention=tuple(
                AttentionSpeed(
                    precision="fp32",
                    samples=1,
                    heads=8,
                    tokens=256,
                    head_size=64,
                    backward=backward,
                    seconds=3e-3 if backward else 1e-3,
                    **each[setting],
                )
                for setting in settings
                for backward in (False, True)
            ),
            memory=tuple(
                MemorySpeed(work=work, elements=size, seconds=size * 1e-9 * setting[0], **each[setting])
                for setting in settings
                for work in ("add", "adamw")
                for size in (1 << 16, 1 << 24)
            ),
            blocks=tuple(
                BlockTime(
                    precision="fp32",
                    samples=4,
                    tokens=256,
                    hidden_size=512,
                    heads=8,
                    ffn_size=1536,
                    forward_seconds=0.1 * setting[0],
                    backward_seconds=0.2 * setting[0],
                    **each[setting],
                )
                for setting in settings
            ),
            operator_seconds=1e-6,
        ),
        links={"inside": links, "between": links if nodes > 1 else []},
        seconds=1.0,
    )


def test_the_cluster_of_a_machine_with_cores() -> None:
    cluster = cluster_of(findings(), parse_cluster_spec("2xcpu").nodes[0])
    devices = cluster.nodes[0].devices
    product = 2.0 * 512**3
    assert devices.count == 2
    assert devices.memory_bytes == 4 << 30
    assert devices.measured_flops["fp32"] == pytest.approx(product / 2e-3, rel=1e-3)  # of one core, while both work
    assert devices.peak_flops["bf16"] == devices.measured_flops["bf16"]
    assert devices.memory_bandwidth_bytes_per_second == pytest.approx(12 / 2e-9, rel=1e-3)
    (tier,) = cluster.links
    assert (tier.name, tier.devices) == ("memory", 2)
    assert tier.latency_seconds == pytest.approx(2e-4, rel=0.1)
    assert tier.bandwidth_bytes_per_second == pytest.approx(5e8, rel=0.01)
    assert parse_cluster(dump_cluster(cluster)) == cluster


def test_the_cluster_of_a_job_on_several_nodes() -> None:
    node = parse_cluster_spec("2xh100").nodes[0]
    cluster = cluster_of(findings("cuda", ranks=2, nodes=3), node)
    assert (cluster.num_nodes, cluster.num_devices) == (3, 6)
    assert [tier.devices for tier in cluster.links] == [2, 6]
    assert all(tier.measured for tier in cluster.links)
    assert cluster.nodes[0].devices.peak_flops["bf16"] == 989e12  # more than was measured
    assert cluster.nodes[0].devices.measured_flops["bf16"] == pytest.approx(2.0 * 512**3 / 1e-3, rel=1e-3)


def test_one_core_and_one_rank_need_no_links() -> None:
    only = dataclasses.replace(findings(), cores=1, links={})
    node: Node = parse_cluster_spec("cpu").nodes[0]
    assert cluster_of(dataclasses.replace(only, measured=findings().measured), node).links == ()


def test_a_line_through_sends() -> None:
    latency, speed, spread = line_of(findings().links["inside"])
    assert latency == pytest.approx(2 * (1e-4 + 4096e-9))
    assert speed == pytest.approx(1e9 / 2, rel=0.01)
    assert 0 < spread < 1


def test_a_busy_machine_is_noticed() -> None:
    quiet = findings().measured
    assert unsteady(quiet) is None
    shaken = dataclasses.replace(quiet, matrix=tuple(dataclasses.replace(row, spread=0.3) for row in quiet.matrix * 9))
    warning = unsteady(shaken)
    assert warning is not None
    assert "vary by more than 30%" in warning


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match='precision "int8" cannot be measured. Use fp64, fp32, bf16, fp16.'):
        probe(precisions=["int8"])
    weft = str(Path(sys.executable).with_name("weft"))
    for arguments, message in (
        (["--processes", "0"], "--processes 0 is too small: use 1 or more."),
        (["--seconds", "0"], "--seconds 0 must be above 0."),
        (["--output", str(tmp_path / "no" / "c.toml")], "Create it first."),
    ):
        done = subprocess.run([weft, "probe", *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr


def _uneven() -> None:
    rank_info = RankInfo(dist.get_rank(), 3, dist.get_rank() % 2, 2)
    probe_rank(rank_info, cores=1, memory_bytes=1, budget_seconds=0.01, precisions=["fp32"], log=print)


def test_uneven_nodes_are_refused(ranks: pool.RankPool) -> None:
    with pytest.raises(ClusterError, match="3 ranks on nodes of 2: weft probe measures nodes that have equally many"):
        ranks.run(3, _uneven)


def test_a_job_under_a_launcher_writes_one_file_and_keeps_its_choices(tmp_path: Path) -> None:
    weft = str(Path(sys.executable).with_name("weft"))
    command = ["probe", "--seconds", "0.01", "--precision", "fp32", "--output", str(tmp_path / "cluster.toml")]
    done = subprocess.run(
        [weft, "launch", "-n", "2", "-m", "weft.cli", *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("written to") == 1
    assert done.stderr.count("choices of 2 ranks kept in") == 1
    (kept,) = (tmp_path / ".cache" / "weft" / "collectives").iterdir()
    assert table_from_json(kept.read_text()).members == 2
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert cluster.nodes[0].devices.measured is not None
    assert cluster.links == () or cluster.links[0].measured
