"""Where a device's time goes in a step: kernels by name and the gaps between them, from a trace by torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weft.comm.device import synchronize

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_KEPT = 40
"""Kernels that are kept, the longest first; the others as one sum."""
_NAME_LENGTH = 110


def kernels_of(step: Callable[[int], float], device: torch.device, first: int, steps: int = 3) -> dict[str, Any]:
    """Run `steps` steps under the profiler.  All times are milliseconds per step.

    `busy`: some kernel ran; `idle`: between the first kernel's begin and the last one's end, none did.
    `kernels`: (name, times per step, milliseconds per step), overlapping ones each in full.
    `gaps`: the longest idle times as (milliseconds, the kernel before, the kernel after), of one step each.
    """
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(first, first + steps):
            step(index)
        synchronize(device)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summed([event for event in events if event.get("cat") in _ON_DEVICE], steps)


def summed(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Sum a trace's events on the device (`ts` and `dur` in microseconds); see `kernels_of`."""
    events = sorted(events, key=lambda event: event["ts"])
    taken: defaultdict[str, list[float]] = defaultdict(list)
    gaps: list[tuple[float, str, str]] = []
    end, last, busy = (events[0]["ts"], "", 0.0) if events else (0.0, "", 0.0)
    for event in events:
        name, begin, stop = event["name"][:_NAME_LENGTH], event["ts"], event["ts"] + event["dur"]
        taken[name].append(event["dur"])
        if begin > end:
            gaps.append((begin - end, last, name))
        busy += max(0.0, stop - max(begin, end))
        if stop > end:
            end, last = stop, name
    ordered = sorted(taken.items(), key=lambda item: -sum(item[1]))
    per_step = 1e-3 / steps
    return {
        "busy": busy * per_step,
        "idle": sum(gap for gap, *_ in gaps) * per_step,
        "kernels": [(name, len(each) / steps, sum(each) * per_step) for name, each in ordered[:_KEPT]],
        "others": sum(sum(each) for _, each in ordered[_KEPT:]) * per_step,
        "gaps": [(gap * 1e-3, before, after) for gap, before, after in sorted(gaps, reverse=True)[:20]],
    }
