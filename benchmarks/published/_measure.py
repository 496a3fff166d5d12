"""The measured step time of a row, in seconds, whatever the source prints."""

from __future__ import annotations

from benchmarks.published._models import trains_adapters_only
from benchmarks.published._rows import Row, Run
from benchmarks.published._sources import FlopConvention, history_of
from weft.config.cluster import Cluster
from weft.model.profile import Block, Profile
from weft.techniques.cost_terms import PricedPrecision

_TERA = 1e12


def forward_flops(profile: Profile, block: Block, convention: FlopConvention) -> float:
    """Return the FLOPs of one token's forward pass through a block, attention counted as the convention says."""
    total = 0.0
    for operator in block.operators:
        if operator.kind in ("matmul", "convolution"):
            total += 2.0 * operator.rows_per_token * operator.n * operator.k
        elif operator.kind == "attention" and convention != "linear":
            keys = float(profile.sequence_length)
            if convention == "causal" and operator.causal:
                keys /= 2
            total += 2.0 * keys * operator.heads * (operator.head_size + operator.value_head_size)
    return total


def step_flops(profile: Profile, run: Run, convention: FlopConvention, *, recomputed: bool = False) -> float | None:
    """Return the model FLOPs of a step of all devices; `recomputed` adds a second forward of the blocks.

    None where the batch is not given.
    """
    if run.global_batch is None:
        return None
    blocks = sum(forward_flops(profile, block, convention) for block in profile.blocks)
    ends = forward_flops(profile, profile.stem, convention) + forward_flops(profile, profile.tail, convention)
    passes = 2 if trains_adapters_only(run) else 3
    per_token = blocks * (passes + (1 if recomputed else 0)) + ends * passes
    return per_token * run.global_batch * profile.sequence_length


def measured_step(row: Row, profile: Profile, cluster: Cluster, precision: PricedPrecision) -> float | None:
    """Return the measured step in seconds: printed, or from tokens per second, or from FLOP/s, or from utilization."""
    run, measured = row.run, row.measured
    if measured.step_seconds is not None:
        return measured.step_seconds
    devices = cluster.num_devices
    if measured.tokens_per_second is not None:
        if run.global_batch is None:
            return None
        return run.global_batch * profile.sequence_length / (measured.tokens_per_second * devices)
    convention = history_of(run).flops
    if measured.model_teraflops is not None:
        flops, rate = step_flops(profile, run, convention), measured.model_teraflops * _TERA
    elif measured.hardware_teraflops is not None:
        flops = step_flops(profile, run, convention, recomputed=run.recompute == "full")
        rate = measured.hardware_teraflops * _TERA
    elif measured.utilization is not None:
        flops, rate = step_flops(profile, run, convention), measured.utilization * peak_flops(cluster, precision)
    else:
        return None
    return None if flops is None or not rate else flops / (rate * devices)


def peak_flops(cluster: Cluster, precision: PricedPrecision) -> float:
    """Return the data sheet's FLOP/s of the slowest device; a precision that it lacks runs as the next wider one."""
    wider = {"fp4": "fp8", "mxfp8": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "bf16", "tf32": "fp32"}
    slowest = float("inf")
    for node in cluster.nodes:
        name, peaks = str(precision), node.devices.peak_flops
        for _ in range(3):
            if name in peaks:
                break
            name = wider.get(name, name)
        slowest = min(slowest, peaks.get(name, min(peaks.values(), default=0.0)))
    return slowest
