"""Composes a rank's sends in a step from what every technique predicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.techniques.buckets import program as buckets
from weft.techniques.data import program as data
from weft.techniques.fused_loss import program as fused_loss
from weft.techniques.local_steps.program import sends as averages
from weft.techniques.pipeline import program as pipeline
from weft.techniques.send_trace import HeldParameter, ModelShare, Outline, Phase, RankSend, Shape, When
from weft.techniques.tensor import program as tensor
from weft.verify.program import _optimizer as optimizer
from weft.verify.program._compare import Traffic


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Sends of one rank in a step."""

    sends: tuple[RankSend, ...]

    def traffic(
        self,
        *occasions: When,
        phases: Collection[Phase] = ("gradients", "agreement", "update"),
        rows: Mapping[tuple[str, int], int] | None = None,
    ) -> Traffic:
        """Return how often each operation goes over each axis with how many bytes in a step of these `occasions`
        (`always` is one of every step).

        `rows` are how many there are, by table or mixture and number of the exchange (`RankSend.rows_of`); where it
        does not say so, no rows of a table are sent but their number, and to each expert equally many.
        """
        traffic: Traffic = Counter()
        for send in self.sends:
            if send.phase not in phases or (send.when != "always" and send.when not in occasions):
                continue
            times = 1 if send.rows_of is None else (rows or {}).get(send.rows_of, send.assumed_rows)
            if times or (times is not None and send.assumed_rows is not None):  # an exchange without rows is one
                traffic[send.axis, send.operation, times * send.size_bytes] += send.count
        return traffic


def occasions_of(recipe: Recipe, plan: Plan, step: int, *, is_first: bool, some_unused: bool) -> tuple[When, ...]:
    """Return the occasions on which a step, counted from 0, sends more than others.

    `is_first`: its process has taken none before.  `some_unused`: some parameter took no part on some rank.
    """
    chosen, occasions = plan.data_parallel, list[When]()
    if is_first:
        occasions.append("first")
    if some_unused:
        occasions.append("unused")
    if chosen.replicas_step_alone and chosen.ends_round(step, recipe.run.steps):
        occasions.append("round")
    if chosen.frozen_after is not None:
        occasions.append("warm_up" if step < chosen.frozen_after else "after_warm_up")
    return tuple(occasions)


def program_of(
    recipe: Recipe,
    plan: Plan,
    outline: Outline,
    rank: int = 0,
    *,
    labels: Sequence[int] | None = None,
    on_cores: bool = True,
    cuts_anywhere: bool = True,
    is_fingerprinted: bool = False,
    is_widened: bool = False,
) -> RankProgram:
    """Return the program of `rank` of a plan's world.

    `labels` are how many count in each microbatch of the rank's step, which the data decide; by default all do.
    `on_cores`: ranks compute on a CPU.  `cuts_anywhere`, `is_widened`: see `ModelShare`.  `is_fingerprinted`: ranks
    compare batches, as in a session.
    """
    share = ModelShare(
        outline=outline,
        recipe=recipe,
        plan=plan,
        rank=rank,
        labels=labels,
        on_cores=on_cores,
        cuts_anywhere=cuts_anywhere,
        is_widened=is_widened,
    )
    return RankProgram(tuple(_sends(share, is_fingerprinted)))


def _sends(share: ModelShare, is_fingerprinted: bool) -> Iterator[RankSend]:
    yield from tensor.sends(share)
    if share.plan.mesh.context > 1:
        from weft.techniques.context import program as context  # as few ranks as that have it load it

        yield from context.sends(share)
    if share.plan.mesh.expert > 1:
        from weft.techniques.expert import program as expert  # as few ranks as that have it load it

        yield from expert.sends(share)
    yield from data.statistics(share)
    yield from data.samples(share)
    yield from data.auxiliary(share)
    yield from fused_loss.sends(share)
    yield from pipeline.sends(share)
    tables = [parameter for parameter in share.held if parameter.parameter.is_sparse]
    kept_out = {parameter.name for parameter in tables}
    members = [parameter for parameter in share.held if parameter.name not in kept_out]
    cut: list[tuple[HeldParameter, Shape]] = []
    if share.plan.data_parallel.shards_weights and share.shards > 1:
        from weft.techniques.zero import program as zero  # as above

        yield from zero.sends(share)
        kept_out = zero.kept_out(share)
        cut = [
            (parameter, zero.shard_shape(share, parameter)) for parameter in members if parameter.name not in kept_out
        ]
        members = [parameter for parameter in members if parameter.name in kept_out]
    yield from data.rows(share, tables)
    yield from buckets.sends(share, members)
    yield from data.agreement(share, is_fingerprinted=is_fingerprinted)
    yield from data.flags(share)
    yield from data.routing(share)
    yield from _update(share, cut, members, tables)


def _update(
    share: ModelShare,
    cut: Sequence[tuple[HeldParameter, Shape]],
    members: Sequence[HeldParameter],
    tables: Sequence[HeldParameter],
) -> Iterator[RankSend]:
    """Yield the sends of averages and optimizers, over parameters that ZeRO-3 has cut, buckets, and tables."""
    masters = [(parameter.name, math.prod(shape)) for parameter, shape in cut]
    masters += [(parameter.name, parameter.num_elements) for parameter in tables]
    here: list[tuple[HeldParameter, Shape]] = [(parameter, shape) for parameter, shape in cut if math.prod(shape)]
    axes = {"shard": share.shards} if cut else {}
    for bucket in buckets.buckets_of(share, members):
        axis, ranks, index = share.summing_of(is_expert=bucket.key.is_expert)
        start, stop = bucket.regions[index if len(bucket.regions) > 1 else 0]
        bucket_members = [members[place] for place in bucket.places]
        masters.append((bucket_members[0].name, stop - start))
        offsets = zip(bucket_members, bucket.offsets, strict=True)
        here += [(member, member.shape) for member, offset in offsets if start <= offset < stop]
        if share.plan.data_parallel.bucket_stage > 0 and ranks > 1 and ranks not in axes.values():
            axes[axis] = ranks
    yield from averages(share, masters)
    yield from optimizer.sends(share, axes, here, "shard" if cut else "")
