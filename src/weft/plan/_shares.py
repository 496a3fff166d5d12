"""How a global batch falls into microbatches."""

from __future__ import annotations

from weft.plan._plan import MicrobatchPlan


def even_shares(microbatches: int, data_ranks: int) -> tuple[int, ...]:
    """Return microbatches per data rank, as equal as can be, the larger shares first: 32 over 3 is 11, 11, 10."""
    each, more = divmod(microbatches, data_ranks)
    return tuple(each + (rank < more) for rank in range(data_ranks))


def as_per_step(shares: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return shares as `per_step` spells them: one number when they are equal."""
    return shares[0] if len(set(shares)) == 1 else shares


def split_batch(global_batch_size: int, data_ranks: int, largest: int) -> MicrobatchPlan | None:
    """Return the microbatches that keep the global batch exactly; None when there are more data ranks than samples.

    The busiest rank gets as few samples as can be; among such splits the microbatch is the largest up to `largest`.
    """
    if data_ranks > global_batch_size:
        return None
    best: tuple[int, int] | None = None
    for size in range(1, min(largest, global_batch_size // data_ranks) + 1):
        if global_batch_size % size == 0:
            busiest = even_shares(global_batch_size // size, data_ranks)[0] * size
            best = min(best, (busiest, -size)) if best is not None else (busiest, -size)
    if best is None:
        return None
    size = -best[1]
    return MicrobatchPlan(size=size, per_step=as_per_step(even_shares(global_batch_size // size, data_ranks)))
