"""Speed of a training, its share of the measured peak, and the time that is left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from weft.comm.device import synchronize
from weft.events import RateEvent

_CPU_SIZE = 512
_ACCELERATOR_SIZE = 4096
_WINDOW_STEPS = 64


class MeasuredPeak(NamedTuple):
    """FLOP/s of matrix products."""

    flops: float
    """FLOP/s by the clock on the wall."""
    alone_flops: float
    """FLOP/s by the processor time of this process's threads: what it had reached without others on its cores."""


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> MeasuredPeak:
    """Measure square matrix products on this rank's threads or device, as they are set now.

    Call it on all ranks at once, right after a barrier, and sum the results over the ranks.  Ranks that share cores (or
    a GPU) then share them in the probe as they do in training.  One rank alone with all cores would measure a peak that
    the plan's threads can never reach; alone with its own threads, one that eight ranks on two cores would count eight
    times.  The mean over `seconds` counts, not the best product, for the same reason: a core taken away is not there.

    Products are 512 × 512 on the CPU (they fit a core's cache) and 4096 × 4096 on accelerators (long against a launch).
    """
    size = _CPU_SIZE if device.type == "cpu" else _ACCELERATOR_SIZE
    left = torch.full((size, size), 1.0 / size, device=device, dtype=dtype)
    right = torch.ones((size, size), device=device, dtype=dtype)
    out = torch.empty_like(left)
    batch = 1 if device.type == "cpu" else 16
    for _ in range(2):  # the first call loads the library and picks a kernel
        torch.mm(left, right, out=out)
    synchronize(device)
    products, start, used = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(batch):
            torch.mm(left, right, out=out)
        synchronize(device)
        products += batch
    flops = products * 2 * size**3 / elapsed
    used = time.process_time() - used
    is_cpu = device.type == "cpu" and used > 0
    return MeasuredPeak(flops, max(flops, flops * elapsed * torch.get_num_threads() / used) if is_cpu else flops)


@dataclass(slots=True, kw_only=True)
class ThroughputMeter:
    """Counts on rank 0 what all ranks do."""

    flops_per_sample: float
    """Forward and backward of one sample without recomputation; 0 when unknown."""
    peak_flops: float | None
    """Peak of all ranks together; None when not measured.  Raised to what was seen where training is faster than the
    probe: something else ran on the machine while it was measured."""
    _samples: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=_WINDOW_STEPS), init=False)

    def add(self, *, seconds: float, samples: int, tokens: int | None = None) -> None:
        """Count one step of all ranks.  `seconds` is the whole step by the wall, waiting for data included."""
        self._samples += samples
        self._tokens += tokens or 0
        self._seconds += seconds
        self._recent.append(seconds)

    def read(self, *, step: int, num_steps: int, remaining_steps: int | None = None) -> RateEvent:
        """Return the rates of the steps since the last reading, and start anew.  Needs at least one in between.

        Args:
            step: finished by now, `num_steps` of them since the last reading.
            remaining_steps: of the run, where that is known.
        """
        assert self._seconds > 0, "no step since the last reading"
        flops = self.flops_per_sample * self._samples / self._seconds if self.flops_per_sample else None
        # A share above 1 would mean that the measurement was disturbed, so the peak follows what training reaches.
        if flops and self.peak_flops:
            self.peak_flops = max(self.peak_flops, flops)
        rates = RateEvent(
            step=step,
            num_steps=num_steps,
            samples_per_second=self._samples / self._seconds,
            tokens_per_second=self._tokens / self._seconds if self._tokens else None,
            flops_per_second=flops,
            peak_share=flops / self.peak_flops if flops and self.peak_flops else None,
            remaining_seconds=None if remaining_steps is None else self.remaining_seconds(remaining_steps),
        )
        self._samples, self._tokens, self._seconds = 0, 0, 0.0
        return rates

    def remaining_seconds(self, steps: int) -> float | None:
        """Return the time that `steps` more steps need by the steps of late; None before the first.

        A trimmed mean over the last 64 steps: a first step that compiles or one evaluation does not move it, a lasting
        change of pace does.
        """
        if not self._recent:
            return None
        # A fifth of the steps is cut off at either end: compilation, evaluation and saves are rare and long.
        ordered = sorted(self._recent)
        trim = len(ordered) // 5 if len(ordered) > 2 else 0
        kept = ordered[trim : len(ordered) - trim] if trim else ordered[: max(1, len(ordered) - 1)]
        return statistics.fmean(kept) * steps
