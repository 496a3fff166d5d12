"""How many microbatches' activations a pipeline rank holds at once: closed forms of what the schedules' orders say."""

from __future__ import annotations

from weft.plan import PricedSchedule


def in_flight(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, rank: int) -> tuple[int, ...]:
    """Return, for each of the rank's chunks, the microbatches whose activations wait at the fullest moment.

    Their sum is what `weft.plan.peak_activations` finds in the schedule's orders.
    """
    if pipeline == 1:
        return (1,) * chunks
    if schedule == "gpipe":
        return (microbatches,)
    if schedule in ("zbv", "dualpipev"):
        first = 2 * pipeline - rank - (1 if schedule == "zbv" else 0)
        return min(first, microbatches), min(rank + 1, microbatches)
    ahead = pipeline - 1 - rank
    if schedule == "interleaved_zero_bubble":
        # Weight passes that are put off keep their activations: as many as the rank's number.
        held = ahead + (chunks - 1) * pipeline + 1 + rank
    elif schedule == "zero_bubble_2p":
        held = 2 * pipeline - 1
    else:
        held = ahead * (1 if chunks == 1 else 2) + (chunks - 1) * pipeline + 1
    return _in_rounds(held, pipeline, chunks, microbatches)


def _in_rounds(held: int, pipeline: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Share passes out over chunks as interleaving does: `pipeline` microbatches of a chunk, then of the next."""
    if chunks == 1:
        return (min(held, microbatches),)
    whole, rest = divmod(held, pipeline * chunks)
    counts: list[int] = []
    for chunk in range(chunks):
        extra = min(pipeline, max(0, rest - chunk * pipeline))
        counts.append(min(whole * pipeline + extra, microbatches))
    return tuple(counts)
