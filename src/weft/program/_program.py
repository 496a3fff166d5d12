"""Composes what every technique says of a rank's sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.outline import ModelShare, Outline, RankSend, When
from weft.plan import Plan
from weft.program._compare import Traffic
from weft.recipe import Recipe
from weft.techniques.buckets import program as buckets
from weft.techniques.data import program as data
from weft.techniques.fused_loss import program as fused_loss
from weft.techniques.pipeline import program as pipeline
from weft.techniques.tensor import program as tensor
from weft.techniques.zero import program as zero


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank sends in a step."""

    sends: tuple[RankSend, ...]
    unpredicted: tuple[str, ...] = ()
    """What else is sent that no technique predicts yet, or that only data decide: a sentence each."""

    def traffic(self, *occasions: When, phases: Collection[str] = ("gradients", "agreement", "update")) -> Traffic:
        """Return how often each operation goes over each axis with how many bytes in a step of these `occasions`
        (`always` is one of every step)."""
        found: Traffic = Counter()
        for send in self.sends:
            if send.phase in phases and (send.when == "always" or send.when in occasions):
                found[send.axis, send.operation, send.size_bytes] += send.count
        return found


def program_of(
    recipe: Recipe,
    plan: Plan,
    outline: Outline,
    rank: int = 0,
    *,
    labels: Sequence[int] | None = None,
    on_cores: bool = True,
) -> RankProgram:
    """Return the program of `rank` of a plan's world.

    `labels` are how many count in each microbatch of the rank's step, which the data decide; by default all do.
    `on_cores`: ranks compute on a CPU.
    """
    share = ModelShare(outline=outline, recipe=recipe, plan=plan, rank=rank, labels=labels, on_cores=on_cores)
    return RankProgram(tuple(_sends(share)), tuple(_unpredicted(share)))


def _unpredicted(share: ModelShare) -> Iterator[str]:
    """Name what the program leaves out."""
    data, optimizer = share.plan.data_parallel, share.recipe.optimizer
    if data.compresses and share.plan.mesh.data > 1:
        yield f"what {data.compression_setting} sends in place of gradients: a codec's exchanges are not predicted yet"
    if data.replicas_step_alone:
        yield "the sums of weights at the end of a round of local steps: they are not predicted yet"
    if optimizer.name not in ("adamw", "sgd") and share.plan.mesh.world_size > 1:
        yield f"the sums over whole parameters that {optimizer.name} makes: they are not predicted yet"
    tables = [held.name for held in share.held if held.parameter.is_sparse]
    if tables and share.plan.mesh.world_size > 1:
        yield f"rows of {', '.join(tables)}: how many a step names, its samples decide"


def _sends(share: ModelShare) -> Iterator[RankSend]:
    yield from tensor.sends(share)
    yield from data.statistics(share)
    yield from fused_loss.sends(share)
    yield from pipeline.sends(share)
    members = [held for held in share.held if not held.parameter.is_sparse]
    if zero.shards_weights(share):
        yield from zero.sends(share)
        members = [held for held in members if held.name in zero.kept_out(share)]
    yield from buckets.sends(share, members)
    yield from data.agreement(share)
    yield from data.flags(share)
