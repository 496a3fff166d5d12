"""The devices that this process may use of this machine, found without torch."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from weft.config.cluster._devices import find_kind, table_devices, table_links
from weft.config.cluster._links import LinkTier
from weft.config.cluster._parts import Devices, Node

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 control groups write no limit as a number near 2⁶³."""

# fp32 operations per cycle and core: two fused multiply-adds on vectors of 16, 8 and 4.
_FLOPS_PER_CYCLE = (("avx512f", 64), ("fma", 32), ("asimd", 16))
# bf16: matrix tiles of 16 × 16 × 32 in 16 cycles; dot products of pairs on vectors of 16 and 4.
_BF16_PER_CYCLE = (("amx_bf16", 1024), ("avx512_bf16", 128), ("bf16", 32))
_EMULATED_BF16 = 0.24
"""Share of the fp32 rate that is left where no instruction multiplies bf16: 24 of 100 GFLOP/s (Xeon 2.5 GHz with
AVX-512, 2026-11)."""
_EMULATED_FP16_FLOPS = 1e9
"""torch has no fast fp16 products on CPUs (torch 2.13)."""


def detect_machine() -> tuple[Node, tuple[LinkTier, ...]]:
    """Return this machine as a node and its links; its name is left out, so that descriptions can be shared."""
    cores, memory = available_cores(), available_memory_bytes()
    devices = _accelerators() or _core_devices(cores, memory)
    node = Node(cores=cores, memory_bytes=memory, devices=devices)
    return node, table_links(devices.kind, 1, devices.count)


def available_cores() -> int:
    """Return the cores that this process may run on: its affinity, and its share where a control group limits it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [limit for folder in _cgroup_folders("cpu") if (limit := _cpu_limit(folder)) is not None]
    return max(1, min([cores, *(math.ceil(share) for share in shares)]))


def available_memory_bytes() -> int:
    """Return the memory of the machine, or the least limit of the control groups that this process is in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(folder / name) for folder in _cgroup_folders("memory") for name in _MEMORY_FILES]
    return min([total, *(limit for limit in limits if limit is not None and 0 < limit < _UNLIMITED)])


_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups and all groups around them, of both versions."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / group.lstrip("/")
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(root):
                break
            yield parent


def _cpu_limit(folder: Path) -> float | None:
    """Return how many cores' time a control group may use."""
    both = _text(folder / "cpu.max").split()
    if len(both) == 2 and both[0].isdigit():
        return int(both[0]) / int(both[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _core_devices(cores: int, memory: int) -> Devices:
    """Return one device per core, with its share of the memory and the peak that its instruction set allows."""
    devices = table_devices("cpu", cores, memory // cores)
    information = _text(Path("/proc/cpuinfo"))
    frequency = re.search(r"^cpu MHz\s*:\s*([\d.]+)", information, re.MULTILINE)
    flags = set(re.findall(r"\w+", "".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", information, re.MULTILINE)[:1])))
    per_cycle = next((flops for flag, flops in _FLOPS_PER_CYCLE if flag in flags), None)
    if frequency is None or per_cycle is None:
        return devices
    single = float(frequency.group(1)) * 1e6 * per_cycle
    peaks = {"fp64": single / 2, "fp32": single}
    cycles = float(frequency.group(1)) * 1e6
    native = next((cycles * flops for flag, flops in _BF16_PER_CYCLE if flag in flags), None)
    peaks["bf16"] = native if native is not None else _EMULATED_BF16 * single
    peaks["fp16"] = _EMULATED_FP16_FLOPS
    return Devices(kind="cpu", count=cores, memory_bytes=devices.memory_bytes, peak_flops=peaks)


def _accelerators() -> Devices | None:
    """Return the NVIDIA devices that CUDA would show this process; all are taken to be like the smallest one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return read_accelerators(output, os.environ.get("CUDA_VISIBLE_DEVICES"))


def read_accelerators(listing: str, visible: str | None) -> Devices | None:
    """Return the devices in nvidia-smi's `name, mebibytes` lines; `visible` is CUDA_VISIBLE_DEVICES."""
    rows = [line.rsplit(",", 1) for line in listing.splitlines() if "," in line]
    accelerators = [(row[0].strip(), int(row[1])) for row in rows if row[1].strip().isdigit()]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        chosen = names[: names.index("-1")] if "-1" in names else [name for name in names if name]
        indices = [int(name) for name in chosen if name.isdigit() and int(name) < len(accelerators)]
        accelerators = (
            [accelerators[index] for index in indices] if len(indices) == len(chosen) else accelerators[: len(chosen)]
        )
    if not accelerators:
        return None
    name, mebibytes = min(accelerators, key=lambda row: row[1])
    kind = find_kind(name)
    if kind is not None:
        return table_devices(kind, len(accelerators), mebibytes << 20)
    unknown = "_".join(re.findall(r"[a-z0-9]+", name.lower()))
    return Devices(kind=unknown, count=len(accelerators), memory_bytes=mebibytes << 20)
