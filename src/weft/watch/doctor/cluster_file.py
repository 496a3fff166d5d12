"""Whether a cluster file says of this machine, its devices and its links what can be."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.cluster import DEVICES, Cluster, Devices, LinkTier, Node, table_links
from weft.formatting import format_bytes, format_memory, format_number, format_seconds
from weft.watch.doctor.machine import MachineCheck, wrong

_ROUNDING = 1.05
"""A peak that was measured may lie above the stated one by so much: clocks are boosted, and times are rounded."""
_FAR = 2.0
"""Factor between a figure and the table's from which one of the two is wrong."""
_LEAST_OF_TABLE = 0.4
"""Share of the table's bandwidth below which a link is slow; 0.6 to 0.9 of it is what collectives reach."""
_MOST_LATENCY = 10.0


def check_cluster(cluster: Cluster, machine: Cluster) -> list[MachineCheck]:
    """Compare a cluster file with this machine and with the table of devices.  Called by `weft doctor --cluster`."""
    checks = [_place(cluster, machine)]
    for node in cluster.nodes:
        checks += _peaks(node)
    checks += _links(cluster)
    return checks


def _place(cluster: Cluster, machine: Cluster) -> MachineCheck:
    """Say which node of the file this machine is."""
    (here,) = machine.nodes
    what = "cluster file"
    for node in cluster.nodes:
        if _is_like(node, here):
            return MachineCheck(what=what, value=f"{cluster.summary}; this machine is one like {node.name}")
    stated = " or ".join(_text(node) for node in cluster.nodes)
    several = cluster.num_nodes > 1
    return MachineCheck(
        what=what,
        value=f"it has {stated}; this machine has {_text(here)}",
        # A head node of a large cluster need not be one of those that compute.
        state="note" if several else "change",
        change="this machine is none of its nodes." if several else "measure this machine: weft probe --output FILE",
    )


def _is_like(node: Node, here: Node) -> bool:
    of_file, own = node.devices, here.devices
    sizes = (node.memory_bytes / here.memory_bytes, of_file.memory_bytes / own.memory_bytes)
    return (
        of_file.kind == own.kind
        and of_file.count == own.count
        and node.cores <= here.cores
        and all(0.5 <= size <= 1.1 for size in sizes)
    )


def _text(node: Node) -> str:
    devices = node.devices
    accelerators = (
        "" if devices.kind == "cpu" else f", {devices.count} {devices.kind} of {format_memory(devices.memory_bytes)}"
    )
    return f"{node.cores} cores, {format_memory(node.memory_bytes)}{accelerators}"


def _peaks(node: Node) -> Iterator[MachineCheck]:
    """Yield what is wrong with the peaks of a node's devices: by them weft train says the share of the peak."""
    devices = node.devices
    what = f"peak of {node.name}"
    far_off = list(_wrong_peaks(devices))
    for precision, why, use in far_off:
        yield wrong(what, why, f"every share of the peak is wrong by it. Set peak_flops.{precision} = {use:.3g}")
    if not devices.peak_flops:
        yield wrong(what, "not stated", "plans cannot be priced: measure by weft probe, or state peak_flops.")
    elif not far_off:
        stated = ", ".join(f"{name} {_flops(flops)}" for name, flops in sorted(devices.peak_flops.items()))
        yield MachineCheck(what=what, value=f"{stated} per device")


def _wrong_peaks(devices: Devices) -> Iterator[tuple[str, str, float]]:
    """Yield precision, what is wrong with its peak, and the one to use."""
    part = DEVICES.get(devices.kind)
    for precision, peak in sorted(devices.peak_flops.items()):
        measured = devices.measured_flops.get(precision)
        table = None if part is None else part.teraflops.get(precision, 0.0) * 1e12 or None
        if measured is not None and measured > _ROUNDING * peak:
            yield precision, f"{precision} {_flops(peak)} is stated, and {_flops(measured)} was measured", measured
        elif table is not None and not 1 / _FAR < peak / table < _FAR:
            yield precision, f"{precision} {_flops(peak)} is stated, and a {devices.kind} has {_flops(table)}", table


def _links(cluster: Cluster) -> Iterator[MachineCheck]:
    """Yield each tier beside the table's of the same reach."""
    node = cluster.nodes[0]
    table = table_links(node.devices.kind, cluster.num_nodes, node.devices.count)
    for index, tier in enumerate(cluster.links):
        usual = table[min(index, len(table) - 1)] if table else None
        yield judge_link(tier, usual)
    if not cluster.links and cluster.num_devices > 1:
        yield wrong("links", "none are stated", "plans cannot be priced: measure by weft probe on all nodes.")


def judge_link(tier: LinkTier, usual: LinkTier | None) -> MachineCheck:
    """Judge a tier beside what devices of this kind usually have; None: not known."""
    speed, latency = tier.bandwidth_bytes_per_second, tier.latency_seconds
    value = f"{format_bytes(speed)}/s, {format_seconds(latency, 2)}" + (
        f"; usual are {format_bytes(usual.bandwidth_bytes_per_second)}/s, {format_seconds(usual.latency_seconds, 2)}"
        if usual is not None
        else ""
    )
    what = f"link {tier.name}"
    if usual is None:
        return MachineCheck(what=what, value=value)
    least = _LEAST_OF_TABLE * (1 - usual.spread) * usual.bandwidth_bytes_per_second
    if speed < least:
        return wrong(
            what,
            value,
            f"that is {format_number(usual.bandwidth_bytes_per_second / speed, 2)} times slower."
            " Look which interface is used, at its cable, and at what else sends; then weft probe"
            " again.",
        )
    if latency > _MOST_LATENCY * usual.latency_seconds:
        return wrong(what, value, "messages take long to begin. Look at the interface, and at busy cores.")
    return MachineCheck(what=what, value=value)


def _flops(value: float) -> str:
    return f"{format_number(value / 1e12)} TFLOP/s" if value >= 1e11 else f"{format_number(value / 1e9)} GFLOP/s"
