"""Peaks of devices, from their makers' tables.  Peaks are dense: without structured sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.cluster._links import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What a maker says of one part, and of the usual node around it."""

    memory_gibibytes: int
    """Memory as sold: the label says GB and means GiB (a driver shows 79.6 GiB of an H100 of 80 "GB")."""
    memory_gigabytes_per_second: float
    teraflops: Mapping[str, float]
    """Precision → data-sheet peak."""
    measured_teraflops: Mapping[str, float] = field(default_factory=dict[str, float])
    """Precision → best matrix product that anyone measured on it (stas00/ml-engineering, accelerator benchmarks)."""
    scale_up_gigabytes_per_second: float
    """One way, of one device, inside its scale-up domain."""
    scale_up: Topology = "switch"
    scale_up_domain: int = 1
    """Devices that scale-up links join even where nodes are smaller: 72 in an NVL72 rack, a pod of TPUs."""
    torus_axes: int = 0
    in_network: bool = False
    """Whether its scale-up switches add up what passes through them (NVLink SHARP)."""
    scale_out_gigabytes_per_second: float
    """One way, of one device's share of the node's network cards."""
    words: tuple[str, ...]
    """All of them stand in the driver's name for it."""
    source: str


_H100 = {"fp64": 34.0, "fp32": 67.0, "tf32": 494.7, "bf16": 989.0, "fp16": 989.0, "fp8": 1979.0}
_A100 = {"fp64": 9.7, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_GB200 = {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "fp4": 10000.0}
_SXM = "NVIDIA {} SXM datasheet (its figures with sparsity halved); {}"

_VOLTA_TO_HOPPER: Mapping[str, DeviceKind] = {
    "v100": DeviceKind(
        memory_gibibytes=32,
        memory_gigabytes_per_second=900,
        teraflops={"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        scale_up_gigabytes_per_second=150,
        # A hybrid cube mesh: a pair has one or two of a device's six links, a ring of eight has all.
        scale_up="fully_connected",
        scale_out_gigabytes_per_second=6.25,
        words=("v100",),
        source="NVIDIA V100 SXM2 datasheet; DGX-1: 4 × 100 Gb/s",
    ),
    "v100-16gb": DeviceKind(
        memory_gibibytes=16,
        memory_gigabytes_per_second=900,
        teraflops={"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        scale_up_gigabytes_per_second=150,
        scale_up="fully_connected",
        scale_out_gigabytes_per_second=6.25,
        words=("v100", "16gb"),
        source="NVIDIA V100 SXM2 datasheet; DGX-1: 4 × 100 Gb/s",
    ),
    "a100": DeviceKind(
        memory_gibibytes=80,
        memory_gigabytes_per_second=2039,
        teraflops=_A100,
        measured_teraflops={"bf16": 271},
        scale_up_gigabytes_per_second=300,
        scale_out_gigabytes_per_second=25,
        words=("a100",),
        source="NVIDIA A100 80GB SXM datasheet; DGX A100: 8 × 200 Gb/s",
    ),
    "a100-40gb": DeviceKind(
        memory_gibibytes=40,
        memory_gigabytes_per_second=1555,
        teraflops=_A100,
        measured_teraflops={"bf16": 271},
        scale_up_gigabytes_per_second=300,
        scale_out_gigabytes_per_second=25,
        words=("a100", "40gb"),
        source="NVIDIA A100 40GB SXM datasheet; DGX A100: 8 × 200 Gb/s; measured peak of the 80 GB part",
    ),
    "a800": DeviceKind(
        memory_gibibytes=80,
        memory_gigabytes_per_second=2039,
        teraflops=_A100,
        scale_up_gigabytes_per_second=200,
        scale_out_gigabytes_per_second=25,
        words=("a800",),
        source="NVIDIA A800 80GB SXM: an A100 with 400 GB/s of NVLink, both ways",
    ),
    "h100": DeviceKind(
        memory_gibibytes=80,
        memory_gigabytes_per_second=3350,
        teraflops=_H100,
        measured_teraflops={"bf16": 795, "fp8": 1403},
        scale_up_gigabytes_per_second=450,
        in_network=True,
        scale_out_gigabytes_per_second=50,
        words=("h100",),
        source=_SXM.format("H100", "DGX H100: 8 × 400 Gb/s"),
    ),
    "h100-pcie": DeviceKind(
        memory_gibibytes=80,
        memory_gigabytes_per_second=2000,
        teraflops={"fp64": 26, "fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513},
        scale_up_gigabytes_per_second=64,
        scale_out_gigabytes_per_second=25,
        words=("h100", "pcie"),
        source="NVIDIA H100 PCIe datasheet; without bridges: PCIe 5 ×16; one 400 Gb/s card for two devices",
    ),
    "h100-96gb": DeviceKind(
        memory_gibibytes=96,
        memory_gigabytes_per_second=2400,
        teraflops=_H100,
        scale_up_gigabytes_per_second=450,
        in_network=True,
        scale_out_gigabytes_per_second=50,
        words=("h100", "hbm2e"),
        source="H100 SXM with 96 GB of HBM2e (500 W, 2.4 TB/s) as its users publish it; other figures of the H100 SXM",
    ),
    "h800": DeviceKind(
        memory_gibibytes=80,
        memory_gigabytes_per_second=3350,
        teraflops={**_H100, "fp64": 1.0},
        scale_up_gigabytes_per_second=200,
        scale_out_gigabytes_per_second=50,
        words=("h800",),
        source="NVIDIA H800 SXM: an H100 with 400 GB/s of NVLink, both ways",
    ),
    "h200": DeviceKind(
        memory_gibibytes=141,
        memory_gigabytes_per_second=4800,
        teraflops=_H100,
        measured_teraflops={"fp8": 1453},
        scale_up_gigabytes_per_second=450,
        in_network=True,
        scale_out_gigabytes_per_second=50,
        words=("h200",),
        source=_SXM.format("H200", "DGX H200: 8 × 400 Gb/s"),
    ),
    "gh200": DeviceKind(
        memory_gibibytes=96,
        memory_gigabytes_per_second=4000,
        teraflops=_H100,
        measured_teraflops={"bf16": 829},
        scale_up_gigabytes_per_second=450,
        # Nodes of four without a switch: each pair has a third of a device's links.
        scale_up="fully_connected",
        scale_out_gigabytes_per_second=25,
        words=("gh200",),
        source="NVIDIA GH200 datasheet (96 GB of HBM3); quad nodes with 4 × 200 Gb/s",
    ),
}

_BLACKWELL: Mapping[str, DeviceKind] = {
    "b200": DeviceKind(
        memory_gibibytes=180,
        memory_gigabytes_per_second=8000,
        teraflops={"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000},
        measured_teraflops={"bf16": 1745, "fp8": 3432},
        scale_up_gigabytes_per_second=900,
        in_network=True,
        scale_out_gigabytes_per_second=50,
        words=("b200",),
        source="NVIDIA HGX B200 datasheet, an eighth of the board; DGX B200: 8 × 400 Gb/s",
    ),
    "b300": DeviceKind(
        memory_gibibytes=288,
        memory_gigabytes_per_second=8000,
        teraflops={"fp64": 1.2, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 13500},
        measured_teraflops={"bf16": 1769},
        scale_up_gigabytes_per_second=900,
        in_network=True,
        scale_out_gigabytes_per_second=100,
        words=("b300",),
        source="NVIDIA HGX B300 datasheet, an eighth of the board; DGX B300: 8 × 800 Gb/s",
    ),
    "gb200": DeviceKind(
        memory_gibibytes=186,
        memory_gigabytes_per_second=8000,
        teraflops=_GB200,
        measured_teraflops={"bf16": 1822, "fp8": 3616},
        scale_up_gigabytes_per_second=900,
        scale_up_domain=72,
        in_network=True,
        scale_out_gigabytes_per_second=50,
        words=("gb200",),
        source="NVIDIA GB200 NVL72 datasheet, a 72nd of the rack; 400 Gb/s per device",
    ),
    "gb300": DeviceKind(
        memory_gibibytes=288,
        memory_gigabytes_per_second=8000,
        teraflops={**_GB200, "fp64": 1.4, "fp4": 15000.0},
        scale_up_gigabytes_per_second=900,
        scale_up_domain=72,
        in_network=True,
        scale_out_gigabytes_per_second=100,
        words=("gb300",),
        source="NVIDIA GB300 NVL72 datasheet, a 72nd of the rack; 800 Gb/s per device",
    ),
}

_PCIE: Mapping[str, DeviceKind] = {
    "l40s": DeviceKind(
        memory_gibibytes=48,
        memory_gigabytes_per_second=864,
        teraflops={"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
        scale_up_gigabytes_per_second=32,
        scale_out_gigabytes_per_second=12.5,
        words=("l40s",),
        source="NVIDIA L40S datasheet; PCIe 4 ×16; usual nodes of 4 with 2 × 200 Gb/s",
    ),
    "rtx-2080": DeviceKind(
        memory_gibibytes=8,
        memory_gigabytes_per_second=448,
        teraflops={"fp32": 10.1, "fp16": 40.3},
        scale_up_gigabytes_per_second=16,
        scale_out_gigabytes_per_second=1.25,
        words=("rtx", "2080"),
        source="NVIDIA Turing white paper (fp16 summed in fp32); PCIe 3 ×16; 10 Gb/s assumed",
    ),
    "rtx-3090": DeviceKind(
        memory_gibibytes=24,
        memory_gigabytes_per_second=936,
        teraflops={"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
        scale_up_gigabytes_per_second=32,
        scale_out_gigabytes_per_second=1.25,
        words=("rtx", "3090"),
        source="NVIDIA GA102 white paper (fp16 summed in fp32); PCIe 4 ×16; 10 Gb/s assumed",
    ),
    "titan-rtx": DeviceKind(
        memory_gibibytes=24,
        memory_gigabytes_per_second=672,
        teraflops={"fp32": 16.3, "fp16": 130.5},
        scale_up_gigabytes_per_second=16,
        scale_out_gigabytes_per_second=1.25,
        words=("titan", "rtx"),
        source="NVIDIA Titan RTX datasheet; PCIe 3 ×16; 10 Gb/s assumed",
    ),
}

_AMD: Mapping[str, DeviceKind] = {
    "mi300x": DeviceKind(
        memory_gibibytes=192,
        memory_gigabytes_per_second=5300,
        teraflops={"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "bf16": 1307, "fp16": 1307, "fp8": 2610},
        measured_teraflops={"bf16": 668},
        scale_up_gigabytes_per_second=448,
        scale_up="fully_connected",
        scale_out_gigabytes_per_second=50,
        words=("mi300x",),
        source="AMD Instinct MI300X datasheet; usual nodes of 8 with 8 × 400 Gb/s; 64 GB/s to each peer",
    ),
    "mi325x": DeviceKind(
        memory_gibibytes=256,
        memory_gigabytes_per_second=6000,
        teraflops={"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "bf16": 1307, "fp16": 1307, "fp8": 2614},
        measured_teraflops={"bf16": 785},
        scale_up_gigabytes_per_second=448,
        scale_up="fully_connected",
        scale_out_gigabytes_per_second=50,
        words=("mi325x",),
        source="AMD Instinct MI325X datasheet; usual nodes of 8 with 8 × 400 Gb/s",
    ),
    "mi355x": DeviceKind(
        memory_gibibytes=288,
        memory_gigabytes_per_second=8000,
        teraflops={"fp64": 78.6, "fp32": 157.3, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000},
        measured_teraflops={"bf16": 1565},
        scale_up_gigabytes_per_second=535,
        scale_up="fully_connected",
        scale_out_gigabytes_per_second=50,
        words=("mi355x",),
        source="AMD Instinct MI355X datasheet; usual nodes of 8 with 8 × 400 Gb/s",
    ),
}

_TPU: Mapping[str, DeviceKind] = {
    "tpu-v3": DeviceKind(
        memory_gibibytes=32,
        memory_gigabytes_per_second=900,
        teraflops={"bf16": 123},
        scale_up_gigabytes_per_second=328,
        scale_up="torus",
        scale_up_domain=1024,
        torus_axes=2,
        scale_out_gigabytes_per_second=3.125,
        words=("tpu", "v3"),
        source="Jouppi et al., CACM 63(7), 2020: a chip of two cores, four links of 656 Gb/s; network assumed 100 Gb/s",
    ),
    "tpu-v4": DeviceKind(
        memory_gibibytes=32,
        memory_gigabytes_per_second=1228,
        teraflops={"bf16": 275},
        scale_up_gigabytes_per_second=300,
        scale_up="torus",
        scale_up_domain=4096,
        torus_axes=3,
        scale_out_gigabytes_per_second=6.25,
        words=("tpu", "v4"),
        source="Jouppi et al., ISCA 2023, table 4: six links of 50 GB/s; network 50 Gb/s per chip assumed",
    ),
    "tpu-v5e": DeviceKind(
        memory_gibibytes=16,
        memory_gigabytes_per_second=819,
        teraflops={"bf16": 197},
        scale_up_gigabytes_per_second=200,
        scale_up="torus",
        scale_up_domain=256,
        torus_axes=2,
        scale_out_gigabytes_per_second=6.25,
        words=("tpu", "v5e"),
        source="Google Cloud TPU v5e documentation: 1600 Gb/s between chips; network 50 Gb/s per chip assumed",
    ),
    "tpu-v5p": DeviceKind(
        memory_gibibytes=95,
        memory_gigabytes_per_second=2765,
        teraflops={"bf16": 459},
        scale_up_gigabytes_per_second=600,
        scale_up="torus",
        scale_up_domain=8960,
        torus_axes=3,
        scale_out_gigabytes_per_second=6.25,
        words=("tpu", "v5p"),
        source="Google Cloud TPU v5p documentation: 1200 GB/s between chips, both ways; network 50 Gb/s per chip",
    ),
    "tpu-v6e": DeviceKind(
        memory_gibibytes=32,
        memory_gigabytes_per_second=1640,
        teraflops={"bf16": 918},
        scale_up_gigabytes_per_second=360,
        scale_up="torus",
        scale_up_domain=256,
        torus_axes=2,
        scale_out_gigabytes_per_second=12.5,
        words=("tpu", "v6e"),
        source="Google Cloud TPU v6e documentation; 180 GB/s per axis (MaxText); network 100 Gb/s per chip",
    ),
}

DEVICES: Mapping[str, DeviceKind] = {**_VOLTA_TO_HOPPER, **_BLACKWELL, **_AMD, **_PCIE, **_TPU}

ALIASES: Mapping[str, str] = {
    "v100-32gb": "v100",
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
}
"""Longer names of kinds in the table."""
