"""Where published systems cut a model into stages, where their rows do not say."""

from __future__ import annotations

from itertools import accumulate

from benchmarks.published._sources import FrameworkHistory
from weft.model.profile import Profile


def cuts_of(profile: Profile, history: FrameworkHistory, stages: int) -> tuple[int, ...] | None:
    """Return the first block of each later stage; None: by cost."""
    blocks = len(profile.blocks)
    if stages == 1:
        return None
    if history.name == "nanotron":
        return _by_thresholds(profile, stages)
    if history.name == "megatron-deepspeed-fp32":
        # DeepSpeed's `partition_uniform` over its layers: a cast, the embedding and a transposition stand before
        # the blocks, the head behind them; what is left over goes to the first stages.
        each, over = divmod(blocks + 4, stages)
        return tuple(each * stage + min(stage, over) - 3 for stage in range(1, stages))
    if blocks % stages == 0:
        return tuple(blocks // stages * stage for stage in range(1, stages))
    if (blocks + 2) % stages == 0:
        # Embedding and head count as a layer each: first and last stage have one block less.
        each = (blocks + 2) // stages
        return tuple(each * stage - 1 for stage in range(1, stages))
    return None


def _by_thresholds(profile: Profile, stages: int) -> tuple[int, ...]:
    """A stage ends with the part that passes its share of all matmul weights, the head's included (nanotron,
    `build_model`): early stages are the fuller ones."""
    costs = [float(sum(o.n * o.k for o in block.operators if o.kind == "matmul")) for block in profile.blocks]
    head = sum(operator.n * operator.k for operator in profile.tail.operators)
    reached = list(accumulate([*costs, head]))
    cuts: list[int] = []
    for index, cost in enumerate(reached[:-1]):
        if len(cuts) < stages - 1 and cost > reached[-1] * (len(cuts) + 1) / stages:
            cuts.append(index + 1)
    # What is left are stages of the head alone.
    return (*cuts, *[len(costs)] * (stages - 1 - len(cuts)))
