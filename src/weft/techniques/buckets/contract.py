"""Buckets of gradients: their sizes, the algorithm of their collectives, the precision of their sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, final

from weft.config.document import Rules, spell
from weft.config.settings import setting
from weft.errors import CollectiveError, PlanError
from weft.techniques.contract import Technique

if TYPE_CHECKING:
    from weft.config.cluster import Collective
    from weft.config.plan import Plan

_RULES = Rules(PlanError)
FIRST_BUCKET_BYTES = 1_048_576


@dataclass(frozen=True, kw_only=True)
class BucketSettings:
    """The part of `data_parallel` that is about buckets."""

    algorithm: str = setting("auto", space="algorithms")
    """Algorithm of the reductions and gathers, by the bytes of a bucket: one name, or a list such as
    `tree:0-32K;direct:32K-8M;ring:8M-max`, in which an entry without sizes takes the rest.  Algorithms that know
    all-reduces only do a reduce-scatter as one, and leave gathers to direct messages.  Messages go over Gloo, and what
    no algorithm is named for over what `compute.backend` says.  `measured`: what `weft comm explain` found here; then
    runs are equal bit for bit only while that stays."""
    bucket_bytes: int = setting(26_214_400, space="bucket_bytes", asked=("bucket_bytes",))
    """Gradients that are reduced together."""
    first_bucket_bytes: int = setting(FIRST_BUCKET_BYTES, space="first_bucket_bytes")
    """The same, for the bucket that is ready first."""

    @property
    def bucket_limits(self) -> tuple[int, int]:
        """Bytes at which the bucket that is ready first is sent, and all others."""
        return min(self.first_bucket_bytes, self.bucket_bytes), self.bucket_bytes

    @property
    def is_first_given(self) -> bool:
        """Whether the first bucket has another size than usual."""
        return self.first_bucket_bytes != FIRST_BUCKET_BYTES

    def priced_limits(self) -> dict[str, int]:
        """Return the sizes as a layout has them: a first bucket like the others is no smaller one, and the default says
        so of every size."""
        first = self.first_bucket_bytes
        return {"first_bucket_bytes": max(first, FIRST_BUCKET_BYTES) if first >= self.bucket_bytes else first}

    def with_small_buckets(self, most: int) -> Self:
        """Return the same with buckets of at most so many bytes, the first one a quarter of that."""
        small = min(self.bucket_bytes, most)
        return replace(self, bucket_bytes=small, first_bucket_bytes=min(self.first_bucket_bytes, small // 4))

    def check_settings(self) -> None:
        _RULES.at_least(self, 1, "bucket_bytes", "first_bucket_bytes")
        if self.first_bucket_bytes > self.bucket_bytes and self.first_bucket_bytes != FIRST_BUCKET_BYTES:
            raise _RULES.refuse(self, "first_bucket_bytes", f"is more than bucket_bytes = {self.bucket_bytes:_}.")
        if self.algorithm not in ("auto", "measured"):
            from weft.comm.algorithms import parse_choices  # a quarter of the time that importing a plan would take

            try:
                parse_choices(self.algorithm)
            except CollectiveError as error:
                raise _RULES.refuse(self, "algorithm", str(error)) from None


@dataclass(frozen=True, kw_only=True)
class ReducePrecisionSettings:
    """The part of `data_parallel` that is about the precision of sums."""

    reduce_precision: Literal["fp32", "compute"] = "fp32"
    """Precision in which gradients are kept and summed when compute is bf16 or fp16."""

    @property
    def reduces_narrow(self) -> bool:
        """Whether gradients are kept and summed in the precision that computes them."""
        return self.reduce_precision == "compute"


@final
class Buckets(Technique):
    """Gradients that are reduced together, beside backward."""

    name = "buckets"
    part = BucketSettings

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        data = plan.data_parallel
        if data.algorithm == "auto":
            return
        start = f"plan.data_parallel.algorithm = {spell(data.algorithm)} cannot be run"
        if plan.compute.device == "cuda":
            yield f'{start} with compute.device = "cuda": on CUDA NCCL chooses. Use "auto".'
        elif data.compresses:
            yield f'{start} with {data.compression_setting}, which has its own. Use "auto".'
        elif data.shards_weights and plan.mesh.shard * plan.mesh.context > 1:
            yield f'{start} with zero = 3, where torch gathers and reduces the weights itself. Use "auto", or zero = 2.'
        elif data.algorithm != "measured":
            yield from _unknown(start, plan)

    def unwritten(self, plan: Plan) -> Iterator[str]:
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
