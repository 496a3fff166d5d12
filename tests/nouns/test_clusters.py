"""This machine, and machines that are only named."""

from __future__ import annotations

import os

from weft.cluster import DEVICES, Cluster, Devices, Node, parse_cluster_spec
from weft.cluster import _detect as detection


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
    assert cluster.device_memory_bytes == 80 * 10**9
    assert cluster.summary == "4 hosts, 512 cores, 8,192 GB, 32 h100 of 80 GB"
    assert cluster.is_predictable
    assert parse_cluster_spec("h200").num_devices == 1
    assert parse_cluster_spec("mi300x").kinds == ("mi300x",)
    assert parse_cluster_spec("2x8xmi300x").num_devices == 16
    assert parse_cluster_spec("2x16xcpu").summary == "2 hosts, 32 cores, 128 GB, no accelerator"
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
