"""Settings of gradient buckets: their sizes, the algorithm of their collectives, the precision of their sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from weft.config.document import Rules
from weft.config.settings import setting
from weft.errors import CollectiveError, PlanError

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
