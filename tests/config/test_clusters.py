"""This machine, and machines that are only named."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest

from weft.config.cluster import (
    ALIASES,
    DEVICES,
    Cluster,
    CollectiveTime,
    Devices,
    Node,
    Topology,
    dump_cluster,
    find_kind,
    parse_cluster,
    parse_cluster_spec,
)
from weft.config.cluster import _detect as detection


def test_this_machine_is_described() -> None:
    cluster = Cluster.detect()
    assert cluster == Cluster.detect()
    assert cluster.num_nodes == 1
    assert 1 <= cluster.num_cores <= (os.cpu_count() or 1)
    assert 10**8 < cluster.nodes[0].memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert cluster.nodes[0].name == "node"  # the machine's own name stays out
    assert cluster.summary.startswith("1 host, ")
    assert cluster.is_runnable
    if not cluster.has_accelerators:
        assert cluster.num_devices == cluster.num_cores
        assert cluster.is_predictable


def test_what_the_driver_lists_is_found_in_the_table() -> None:
    listing = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n"
    devices = detection.read_accelerators(listing, None)
    assert devices is not None
    assert (devices.kind, devices.count, devices.memory_bytes) == ("h100", 2, 81559 << 20)
    assert devices.peak_flops["bf16"] == 989e12
    hidden = detection.read_accelerators(listing, "1")
    assert hidden is not None
    assert hidden.count == 1
    assert detection.read_accelerators(listing, "") is None
    assert detection.read_accelerators(listing, "-1") is None
    assert detection.read_accelerators("", None) is None
    unknown = detection.read_accelerators("NVIDIA GeForce RTX 4090, 24564\n", None)
    assert unknown is not None
    assert unknown.kind == "nvidia_geforce_rtx_4090"
    assert not Cluster(nodes=(Node(cores=1, memory_bytes=1, devices=unknown),)).is_predictable


def test_clusters_by_name() -> None:
    cluster = parse_cluster_spec("4x8xh100")
    assert (cluster.num_nodes, cluster.num_devices) == (4, 32)
    assert [tier.devices for tier in cluster.links] == [8, 32]
    assert cluster.device_memory_bytes == int(0.99 * 80 * 2**30)
    assert cluster.summary == "4 hosts, 512 cores, 8,192 GiB, 32 h100 of 79 GiB"
    assert cluster.is_predictable
    assert parse_cluster_spec("h200").num_devices == 1
    assert parse_cluster_spec("mi300x").kinds == ("mi300x",)
    assert parse_cluster_spec("2x8xmi300x").num_devices == 16
    assert parse_cluster_spec("2x16xcpu").summary == "2 hosts, 32 cores, 128 GiB, no accelerator"
    for kind in DEVICES:
        assert parse_cluster_spec(f"2x8x{kind}").is_predictable


def test_mixed_devices_are_predictable_but_not_runnable() -> None:
    cpu = Node(cores=2, memory_bytes=10, devices=Devices(kind="cpu", count=2, memory_bytes=5, peak_flops={"fp32": 1e9}))
    gpu = parse_cluster_spec("2xh100").nodes[0]
    links = parse_cluster_spec("2x2xh100").links
    mixed = Cluster(nodes=(cpu, gpu), links=links)
    assert mixed.is_predictable
    assert not mixed.is_runnable
    assert mixed.digest != Cluster(nodes=(gpu, cpu), links=links).digest


def test_every_part_says_where_its_figures_come_from() -> None:
    for kind, part in DEVICES.items():
        assert part.source
        assert find_kind(kind.replace("h100-96gb", "h100 hbm2e")) == kind
        for precision, best in part.measured_teraflops.items():
            assert best < part.teraflops[precision], f"{kind} cannot measure more than its peak"
        devices = parse_cluster_spec(f"2x8x{kind}").nodes[0].devices
        assert devices.peak_flops == {precision: peak * 1e12 for precision, peak in part.teraflops.items()}
    assert set(ALIASES.values()) <= set(DEVICES)
    assert not set(ALIASES) & set(DEVICES)


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("A100-80GB-SXM", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("H100-96GB-HBM2e (500W, 2.4TB/s)", "h100-96gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("GB200-NVL72", "gb200"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("TPU-v4", "tpu-v4"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_names_of_devices(label: str, kind: str | None) -> None:
    assert find_kind(label) == kind


def test_a_rack_of_72_is_one_tier() -> None:
    assert [tier.devices for tier in parse_cluster_spec("1389x72xgb200").links] == [72, 1389 * 72]
    assert [tier.devices for tier in parse_cluster_spec("18x4xgb200").links] == [72]
    assert [tier.devices for tier in parse_cluster_spec("40x4xgb200").links] == [72, 160]
    assert [tier.devices for tier in parse_cluster_spec("16x4xh100").links] == [4, 64]
    pod = parse_cluster_spec("16x4xtpu-v5p").links
    assert [(tier.topology, tier.shape) for tier in pod] == [("torus", (4, 4, 4))]
    for count in (7, 12, 24, 96, 1000):
        for axes in (2, 3):
            kind = "tpu-v5e" if axes == 2 else "tpu-v5p"
            tier = parse_cluster_spec(f"{count}x{kind}").links[0]
            assert math.prod(tier.shape) == count
            assert len(tier.shape) == axes


def test_unlike_and_part_failed_nodes() -> None:
    mixed = parse_cluster_spec("2x8xh100+4x8xa100")
    assert mixed.kinds == ("h100", "a100")
    assert mixed.num_devices == 48
    assert mixed.device_memory_bytes == int(0.99 * 80 * 2**30)
    assert [tier.bandwidth_bytes_per_second for tier in mixed.links] == [300e9, 25e9]
    assert not mixed.links[0].in_network
    failed = parse_cluster_spec("7x8xh100+1x6xh100")
    assert (failed.num_nodes, failed.num_devices) == (8, 62)
    assert [node.name for node in failed.nodes] == ["h100-1", "h100-2"]
    assert [tier.devices for tier in failed.links] == [8, 62]
    assert parse_cluster(dump_cluster(mixed)) == mixed


@pytest.mark.parametrize("topology", ["fully_connected", "ring", "double_ring", "tree", "torus", "rails"])
def test_topologies_are_read_back_equal(topology: Topology) -> None:
    cluster = parse_cluster_spec("4x8xh100")
    shape, ratio = ((4,), 1.0) if topology == "torus" else ((), 7.0 if topology == "tree" else 1.0)
    times = tuple(CollectiveTime(kind="broadcast", members=4, size_bytes=1 << k, seconds=0.5**k) for k in range(3))
    outer = replace(cluster.links[1], topology=topology, shape=shape, oversubscription=ratio, measured=times)
    changed = replace(cluster, links=(cluster.links[0], outer))
    assert parse_cluster(dump_cluster(changed)) == changed
    assert parse_cluster(dump_cluster(changed, everything=True)) == changed
    assert changed.digest != cluster.digest


def test_the_price_of_a_cluster_is_that_of_its_devices() -> None:
    cluster = parse_cluster_spec("2x8xh100")
    assert cluster.price_per_hour is None
    node = replace(cluster.nodes[0], devices=replace(cluster.nodes[0].devices, price_per_hour=2.5))
    priced = replace(cluster, nodes=(node,))
    assert priced.price_per_hour == 40.0
    assert parse_cluster(dump_cluster(priced)) == priced
