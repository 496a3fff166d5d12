"""Buckets of gradients: which algorithms and precisions of their collectives can be run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.techniques.buckets.settings import BucketSettings
from weft.techniques.contract import Technique

if TYPE_CHECKING:
    from weft.config.cluster import Collective


@final
class Buckets(Technique):
    """Gradients that are reduced together, beside backward."""

    name = "buckets"
    part = BucketSettings

    def sends(self, plan: Plan) -> bool:
        return True

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        data = plan.data_parallel
        if data.algorithm == "auto":
            return
        start = f"plan.data_parallel.algorithm = {format_value(data.algorithm)} cannot be run"
        if plan.compute.device == "cuda":
            yield f'{start} with compute.device = "cuda": on CUDA NCCL chooses. Use "auto".'
        elif data.compresses:
            yield f'{start} with {data.compression_setting}, which has its own. Use "auto".'
        elif data.shards_weights and plan.mesh.shard * plan.mesh.context > 1:
            yield f'{start} with zero = 3, where torch gathers and reduces the weights itself. Use "auto", or zero = 2.'
        elif data.algorithm != "measured":
            yield from _unknown(start, plan)

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        data = plan.data_parallel
        if data.reduces_narrow and plan.compute.precision == "bf16":
            yield 'plan.data_parallel.reduce_precision = "compute": the script sums gradients in fp32. Use "fp32".'
        if data.algorithm != "auto":
            named = f'plan.data_parallel.algorithm = "{data.algorithm}"'
            yield f'{named}: the script sums by the process group\'s own collectives. Use "auto".'


def _unknown(start: str, plan: Plan) -> Iterator[str]:
    """What a named algorithm does not do of what a stage of ZeRO sends."""
    from weft.comm.algorithms import parse_choices, stand_in

    data = plan.data_parallel
    used: tuple[Collective, ...] = ("reduce_scatter", "all_gather") if data.shards_states else ("all_reduce",)
    for name in parse_choices(data.algorithm).names:
        missing = next((collective for collective in used if stand_in(name, collective) is None), None)
        if missing is not None:
            yield f"{start} with {data.zero_setting}: {name} does no {missing}. Use ring, direct or halving_doubling."
            return
