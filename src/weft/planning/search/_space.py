"""The space of a search: every value of every setting, stated, so that nothing else limits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from weft.config.cluster import Cluster
from weft.config.plan import Axis, Plan, Recompute
from weft.config.recipe import PermitRecipe
from weft.errors import PlanError
from weft.model.profile import Profile
from weft.techniques.context.settings import ContextScheme
from weft.techniques.cost_terms import PricedPrecision
from weft.techniques.expert.settings import ExpertExchange
from weft.techniques.offload.settings import Offload as Offload
from weft.techniques.pipeline.schedules import Schedule
from weft.techniques.tensor.settings import TensorScheme
from weft.techniques.zero.settings import ReduceEvery, Stage

_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations")
"""Offloads that a search tries by itself; combinations of them are only tried when asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values that search chooses among; it takes every combination that is valid.

    Fix a setting by giving one value: `replace(space, tensors=(8,))`.
    """

    pipelines: tuple[int, ...]
    tensors: tuple[int, ...]
    contexts: tuple[int, ...]
    experts: tuple[int, ...]
    datas: tuple[int, ...] | None = None
    """Data ranks.  None: by rule: as many as the devices allow, as few as make the busiest rank no busier, and as many
    as give all ranks equal shares."""
    fewer_devices: bool = False
    """Whether the rule may also leave half of the data ranks out, again and again: where devices cost money."""
    even_shares: bool = False
    """Whether all data ranks must have equally many microbatches: what most other systems demand."""
    node_size: int | None = None
    """Devices of a node, where only whole nodes may be used beyond the first; None: any number of devices."""
    replicas: bool = True
    """Whether ZeRO-3 may shard over fewer than all data ranks, and keep replicas."""
    microbatch_sizes: tuple[int, ...]
    gathers_samples: bool = False
    """Whether data ranks must gather their samples for the loss, which a pipeline's do not."""
    shares_within_stages: bool = True
    """Whether the stages of a pipeline can share a sequence over context ranks."""
    single_microbatch: bool = False
    """Whether the data ranks must have one microbatch each: statistics of the whole batch (BatchNorm)."""
    schedules: tuple[Schedule, ...] = tuple(sorted(_SCHEDULES, key=lambda name: name != "1f1b"))
    """The first is what stands where there is no pipeline."""
    chunks: tuple[int, ...] | None = None
    """Stages on each pipeline rank, for the schedules that leave it open.  None: every number the blocks allow."""
    zeros: tuple[int, ...] = get_args(Stage)
    shards: tuple[int, ...] | None = None
    """Ranks over which ZeRO-3 shards.  None: every divisor of the data ranks."""
    reductions: tuple[ReduceEvery, ...] | None = None
    """How often ZeRO-2 and 3 reduce gradients.  None: under ZeRO-3 what is best of once per step and every microbatch,
    under ZeRO-2 as is usual."""
    recomputes: tuple[Recompute, ...] = get_args(Recompute)
    """A choice that does not fit is also tried with some blocks of each stage computed again, as many as needed."""
    per_block_recompute: bool = True
    offloads: tuple[Offload, ...] = _OFFLOADS
    sequence_parallels: tuple[bool, ...] = (False, True)
    fused_losses: tuple[bool, ...] = (True,)
    precisions: tuple[PricedPrecision, ...] = ("bf16",)
    tensor_schemes: tuple[TensorScheme, ...] = get_args(TensorScheme)
    context_schemes: tuple[ContextScheme, ...] = get_args(ContextScheme)
    expert_exchanges: tuple[ExpertExchange, ...] = get_args(ExpertExchange)
    bucket_bytes: tuple[int, ...] | None = None
    """None: for every plan the size that its gradients, its links and its backward ask for
    (`weft.techniques.buckets.sizes`), and neighbours of it as long as they are better."""
    first_bucket_bytes: tuple[int, ...] | None = None
    """The first of them is taken, and no bucket is smaller.  None: the usual one, or less: it moves a step by less than
    the time in which it fills."""
    compressions: tuple[str, ...] = ("none",)
    algorithms: tuple[str, ...] = ("auto",)
    """Algorithms of the reductions and gathers over data ranks.  `auto` is what is done without a choice; between
    accelerators that is the cheapest, between cores of several nodes a hierarchy may be."""
    orders: tuple[tuple[Axis, ...], ...] | None = None
    """Orders of the axes on the hardware.  None: every order that lays some group on other links."""
    refuses: Callable[[Plan], str] | None = field(default=None, compare=False, repr=False)
    """Says why a plan cannot train what this is the space of, with the change to make; empty: it can.  What it refuses
    is not found.  None: every plan that can be priced is taken."""

    @property
    def usual_offload(self) -> Offload:
        """Return the offload of plans that fit without one: nothing, unless something must be."""
        return "none" if "none" in self.offloads else self.offloads[0]


def space_of(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    permit: PermitRecipe | None = None,
) -> Space:
    """Return everything that can be priced for a model on a cluster; of it `recipe_space` leaves what can be trained.

    Args:
        permit: what may be done to the numerics; None: bf16 where there are accelerators.  A compression is never
            chosen, also where it is permitted: the user gives it (`weft comm advise` says whether it would pay).
    """
    devices, blocks = cluster.num_devices, len(profile.blocks)
    length = profile.sequence_length
    facts, whole_batch = profile.facts, not profile.facts.per_sample_loss
    # A loss of the whole batch that ranks cannot gather leaves one data rank with one microbatch.
    stays_whole = whole_batch and "gathered_loss" in facts.limits
    can_recompute = "blocks" not in facts.limits and not facts.has_batch_norm
    return Space(
        pipelines=(1,) if facts.why_not("blocks", "pipeline") else tuple(range(1, min(blocks, devices) + 1)),
        tensors=_tensors(profile, devices),
        contexts=tuple(c for c in divisors(length) if c <= devices and (c == 1 or length % (2 * c) == 0)),
        experts=tuple(e for e in divisors(profile.num_experts) if e <= devices) if profile.num_experts else (1,),
        datas=(1,) if stays_whole else None,
        microbatch_sizes=(global_batch_size,) if stays_whole else divisors(global_batch_size),
        single_microbatch=bool(facts.has_batch_norm) or whole_batch,
        gathers_samples=whole_batch,
        shares_within_stages="sequence" not in facts.limits,
        precisions=_precisions(cluster, permit),
        recomputes=get_args(Recompute) if can_recompute else ("none",),
        per_block_recompute=can_recompute,
        sequence_parallels=(False,) if length == 1 or facts.why_not("blocks", "sequence") else (False, True),
        offloads=_OFFLOADS if cluster.has_accelerators else ("none",),
        fused_losses=(True, False) if profile.vocabulary_size else (True,),
        algorithms=_algorithms(cluster),
    )


def without_offload(space: Space) -> Space:
    """Return a space for cores, which have no other memory to offload to.

    Raises:
        PlanError: nothing but offloading is asked for.
    """
    if "none" not in space.offloads:
        raise PlanError(
            f'memory.offload = "{space.offloads[0]}" moves what a device holds to the memory of its host, and here the '
            'devices are the host\'s cores: nothing would get smaller. Use memory.offload = "none".'
        )
    return replace(space, offloads=("none",))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number above 0, rising."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(low + [number // n for n in reversed(low) if n * n != number])


def _tensors(profile: Profile, devices: int) -> tuple[int, ...]:
    """Sizes of the tensor axis that divide everything it must; 1 alone for a model without a split table."""
    if not profile.divisible:
        return (1,)
    # One axis size for all layers: it divides heads, widths and vocabulary alike.
    common = math.gcd(*(size for _, size in profile.divisible))
    return tuple(size for size in divisors(common) if size <= devices)


def _algorithms(cluster: Cluster) -> tuple[str, ...]:
    """NCCL chooses itself, and on one node nothing is faster than shared memory: a hierarchy is for nodes of several
    ranks."""
    if cluster.has_accelerators or cluster.num_nodes in (1, cluster.num_devices):
        return ("auto",)
    return ("auto", "hierarchical", "hierarchical+direct")


def _precisions(cluster: Cluster, permit: PermitRecipe | None) -> tuple[PricedPrecision, ...]:
    if permit is not None:
        return permit.precision
    return ("bf16",) if cluster.has_accelerators else ("fp32",)


def chunk_choices(space: Space, least: int, most: int | None, blocks_per_rank: int) -> Sequence[int]:
    """Return stages per rank that a schedule and the blocks allow."""
    highest = blocks_per_rank if most is None else min(most, blocks_per_rank)
    return [n for n in space.chunks or range(least, highest + 1) if least <= n <= highest]
