"""What replicas send at the end of a round of local steps: their masters, which they average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.techniques.local_steps.contract import LocalSteps
from weft.techniques.send_trace import ModelShare, RankSend


def sends(share: ModelShare, masters: Iterable[tuple[str, int]]) -> Iterator[RankSend]:
    """Yield one all-reduce for each of this rank's masters, given by name and elements."""
    if not share.sums_apart or share.plan.mesh.replicate == 1:
        return
    for name, elements in masters:
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
