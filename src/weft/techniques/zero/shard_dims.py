"""Which dim of a parameter ZeRO-3 cuts.  No torch."""

from __future__ import annotations

from collections.abc import Sequence


def dim_of_shards(shape: Sequence[int], ranks: int, *, is_expert: bool) -> int | None:
    """Return the dim along which `ranks` ranks share out what each would hold of a parameter; None: it stays whole.

    Rows, padded where they do not divide.  Of experts a rank has few, so that padding could be more than they are:
    where ranks do not divide them, matrices are cut, and what does not divide either is whole unless there are more
    experts than ranks.
    """
    if not shape:
        return None
    if not is_expert or shape[0] % ranks == 0:
        return 0
    if len(shape) > 1 and shape[1] % ranks == 0:
        return 1
    return 0 if shape[0] > ranks else None
