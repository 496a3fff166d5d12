"""Rates, shares of a measured peak, and time left."""

from __future__ import annotations

import pytest
import torch

from weft.run.engine import ThroughputMeter
from weft.run.engine._throughput import measure_peak_flops


def test_rates_are_of_the_steps_since_the_last_reading() -> None:
    meter = ThroughputMeter(flops_per_sample=1e9, peak_flops=1e10)
    meter.add(seconds=1.0, samples=4, tokens=400)
    meter.add(seconds=3.0, samples=4, tokens=400)
    first = meter.read(step=2, num_steps=2)
    assert first.samples_per_second == 2
    assert first.tokens_per_second == 200
    assert first.flops_per_second == 2e9
    assert first.peak_share == pytest.approx(0.2)
    meter.add(seconds=1.0, samples=4, tokens=400)
    assert meter.read(step=2, num_steps=2).tokens_per_second == 400


def test_what_is_unknown_is_none() -> None:
    meter = ThroughputMeter(flops_per_sample=0.0, peak_flops=None)
    assert meter.remaining_seconds(10) is None
    meter.add(seconds=0.5, samples=4)
    reading = meter.read(step=2, num_steps=2)
    assert (reading.tokens_per_second, reading.flops_per_second, reading.peak_share) == (None, None, None)
    assert reading.samples_per_second == 8


def test_one_slow_step_does_not_move_the_time_left_and_a_new_pace_does() -> None:
    meter = ThroughputMeter(flops_per_sample=0.0, peak_flops=None)
    meter.add(seconds=60.0, samples=1)
    assert meter.remaining_seconds(2) == 120
    meter.add(seconds=1.0, samples=1)
    assert meter.remaining_seconds(2) == 2
    for _ in range(9):
        meter.add(seconds=1.0, samples=1)
    assert meter.remaining_seconds(100) == pytest.approx(100)
    for _ in range(64):
        meter.add(seconds=2.0, samples=1)
    assert meter.remaining_seconds(100) == pytest.approx(200)


def test_the_peak_is_measured() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peak = measure_peak_flops(torch.device("cpu"), torch.float32, seconds=0.1).flops
    finally:
        torch.set_num_threads(threads)
    assert 1e8 < peak < 1e13


def test_no_share_of_the_peak_is_above_one():
    """The probe ran while something else used the machine; the peak becomes what training reached."""
    meter = ThroughputMeter(flops_per_sample=1e9, peak_flops=1e9)
    shares: list[float | None] = []
    for seconds in (0.5, 0.25, 0.5):
        meter.add(seconds=seconds, samples=1)
        shares.append(meter.read(step=2, num_steps=2).peak_share)
    assert shares == [1.0, 1.0, 0.5]
    assert meter.peak_flops == 4e9
