"""Time what several ranks do at the same moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.comm.device import synchronize

_FEWEST, _MOST = 3, 2000


class Timing(NamedTuple):
    """The time of one run of a piece of work."""

    seconds: float
    """Median."""
    spread: float
    """Half of the distance from the first to the third quartile, as a share of the median."""


def time_runs(work: Callable[[], object], device: torch.device, seconds: float) -> Timing:
    """Repeat `work` for `seconds`, at least three times, after runs that do not count: two, or a long one."""
    begin = time.perf_counter()
    for _ in range(2):
        work()
        synchronize(device)
        if time.perf_counter() - begin > seconds:
            break
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _FEWEST or (time.perf_counter() < end and len(times) < _MOST):
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return summarise(times)


def summarise(times: Sequence[float]) -> Timing:
    """Median and spread."""
    middle = statistics.median(times)
    first, _, third = statistics.quantiles(times, n=4)
    return Timing(middle, (third - first) / 2 / middle)


def slowest(timings: Sequence[Timing]) -> list[Timing]:
    """Return, for each timing, that of the rank where it took longest.  Call on all ranks of the job; ranks that did
    not take part give zeros."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(timings)
    flat = torch.tensor([list(timing) for timing in timings], dtype=torch.float64)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    stacked = torch.stack(gathered)
    ranks = stacked[:, :, 0].argmax(dim=0)
    return [Timing(*stacked[int(rank), index].tolist()) for index, rank in enumerate(ranks)]
