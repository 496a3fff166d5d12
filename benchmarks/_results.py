"""What a benchmark keeps: machine, versions, raw samples and the figures made of them, as one JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure beside what was hoped for."""

    what: str
    measured: float
    goal: float
    better: str
    """`higher` or `lower`."""
    spread: tuple[float, float] | None = None
    """Lower and upper quartile of the samples behind `measured`."""
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.measured >= self.goal if self.better == "higher" else self.measured <= self.goal


def machine() -> dict[str, Any]:
    """The machine without its name: processor, cores, memory, and how busy it was with other work."""
    model = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, torch, Weft's commit, and the packages named, of this environment."""
    found = {"python": platform.python_version(), "weft_commit": _commit()}
    for package in ("torch", "numpy", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_result(
    name: str, *, goals: Sequence[Goal], samples: Mapping[str, Any], about: Mapping[str, Any], folder: Path = RESULTS
) -> Path:
    """Write `<name>.json`; `about` holds settings, machine, versions and notes."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **about,
        "goals": [{**asdict(goal), "reached": goal.reached} for goal in goals],
        "samples": samples,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    for goal in goals:
        print(goal_line(goal), flush=True)
    print(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}", flush=True)
    return path


def goal_line(goal: Goal) -> str:
    sign = "≥" if goal.better == "higher" else "≤"
    spread = "" if goal.spread is None else f" (quartiles {goal.spread[0]:.3g} to {goal.spread[1]:.3g})"
    verdict = "reached" if goal.reached else "MISSED"
    return f"{verdict:8s} {goal.what}: {goal.measured:.3g}{goal.unit}{spread}, goal {sign} {goal.goal:g}{goal.unit}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def log(text: str) -> None:
    """Say how far a benchmark is, on standard error."""
    print(text, file=sys.stderr, flush=True)
