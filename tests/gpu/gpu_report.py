"""What the suite for GPUs keeps: the machine, the date, and every result as it comes in."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def total_memory_bytes(device: torch.device) -> int:
    """Memory of the device, or of this host."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if hasattr(torch.accelerator, "get_memory_info"):
        return torch.accelerator.get_memory_info(device)[1]
    return torch.cuda.mem_get_info(device)[1]


def machine(device: torch.device) -> dict[str, Any]:
    """The device, its driver and the versions that matter; nothing that names the host."""
    found: dict[str, Any] = {
        "device": device.type,
        "memory_bytes": total_memory_bytes(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }
    if device.type == "cuda":
        from torch.cuda import nccl

        found |= {
            "name": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
            "cuda": torch.version.cuda,
            "nccl": list(nccl.version()),
        }
    return found


@dataclass(slots=True)
class Report:
    """Results by phase.  Written after each phase, so that a suite that is cut short leaves what it found."""

    device: torch.device
    budget_seconds: float
    folder: Path = RESULTS
    phases: dict[str, Any] = field(default_factory=dict[str, Any])
    failures: list[str] = field(default_factory=list[str])
    _started: float = field(default_factory=time.monotonic, init=False)
    _date: datetime = field(default_factory=lambda: datetime.now(UTC), init=False)

    @property
    def path(self) -> Path:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        return self.folder / f"gpu-{slug}-{self._date:%Y-%m-%d}.json"

    @property
    def seconds_left(self) -> float:
        return self.budget_seconds - (time.monotonic() - self._started)

    def add(self, phase: str, results: Mapping[str, Any], seconds: float) -> None:
        """Take up a phase and write the file."""
        self.phases[phase] = {**results, "seconds": round(seconds, 1)}
        self.write()

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "name": "gpu",
            "date": f"{self._date:%Y-%m-%d %H:%M} UTC",
            "machine": machine(self.device),
            "failures": self.failures,
            "phases": self.phases,
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
