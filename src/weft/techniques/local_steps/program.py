"""What replicas send at the end of a round of local steps: their masters, which they average."""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.techniques.buckets.program import buckets_of, masters_of, own_region
from weft.techniques.local_steps.contract import LocalSteps
from weft.techniques.send_trace import ModelShare, RankSend


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield one all-reduce for each of this rank's masters."""
    if share.plan.mesh.replicate == 1:
        return
    for name, elements in _masters(share):
        if elements:  # none of a parameter with fewer rows than ranks
            yield RankSend(
                operation="all_reduce",
                axis="replicate",
                size_bytes=elements * share.master_bytes,
                when="round",
                phase="update",
                technique=LocalSteps.name,
                reason=f"average of replicas, {name}",
            )


def _masters(share: ModelShare) -> Iterator[tuple[str, int]]:
    """Yield name and elements of each storage of masters: a bucket has one under its first parameter's name."""
    masters = masters_of(share)
    yield from ((parameter.name, math.prod(shape)) for parameter, shape in masters.cut)
    yield from ((parameter.name, parameter.num_elements) for parameter in masters.tables)
    for bucket in buckets_of(share, masters.in_buckets):
        start, stop = own_region(share, bucket)
        yield masters.in_buckets[bucket.places[0]].name, stop - start
