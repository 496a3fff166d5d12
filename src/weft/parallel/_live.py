"""A gradient bucket on its way through a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from weft.comm import Collectives, Wait, nothing_to_wait_for
from weft.parallel._shard import Shard
from weft.parallel.buckets import Bucket

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CompressedReduction


@dataclass(slots=True, kw_only=True)
class LiveBucket:
    """A bucket with its storages and where it stands in the step."""

    bucket: Bucket
    collectives: Collectives
    """Over the ranks that reduce it."""
    weights: Tensor
    master: Tensor
    shard: Shard
    gradients: Tensor | None = None
    kept: Tensor | None
    """ZeRO-2: this rank's region of the summed gradients, all that outlives backward."""
    reduction: CompressedReduction | None
    """None: gradients travel as they are."""
    pending: set[int] = field(default_factory=set[int])
    """Members whose last gradient of this round is still to come."""
    adopted: set[int] = field(default_factory=set[int])
    """Members whose `.grad` is a view of `gradients`."""
    wait: Wait = nothing_to_wait_for
    launched: bool = False
    settled: bool = False
    arrival: Wait | None = None
    """Of the gather under way, if there is one."""
    away: Sequence[Tensor] = ()
    """What the members' parameters will be again when it has ended."""

    def advance(self) -> None:
        """Start the second exchange of a compressed bucket: its first had the time that the next bucket took to
        fill."""
        if self.reduction is not None:
            self.reduction.advance()

    def send_away(self) -> None:
        """Leave the members' parameters without elements until their weights arrive."""
        self.away = [member.parameter.data for member in self.bucket.members]
        nothing = self.weights[:0]
        for member in self.bucket.members:
            member.parameter.data = nothing
