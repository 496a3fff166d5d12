"""Whether a layout exists for a model on a cluster: every problem with its numbers and the computed change."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.cluster import Cluster
from weft.config.plan import AXES, EXPERT_LENDERS
from weft.model.profile import Profile
from weft.techniques.context.limits import heads_problem, length_problem, mixed_problem
from weft.techniques.context.token_runs import exchanging_ranks
from weft.techniques.cost_terms import Layout
from weft.techniques.data.contract import whole_batch_problem
from weft.techniques.pipeline.schedules import chunk_limits
from weft.techniques.registry import problems as technique_problems
from weft.techniques.tensor.cost import layout_problems

_PADDED = ("vocabulary_size",)
"""Sizes that need not divide: vocabularies are padded, and pricing the padding would change less than a thousandth."""
_REPLICATED = ("num_kv_heads",)
"""Sizes of which ranks may hold copies when there are fewer than ranks."""


def check_layout(profile: Profile, cluster: Cluster, layout: Layout) -> list[str]:
    """Return what stands against a layout, one message per problem; an empty list when it can be priced."""
    return [
        *_check_sizes(layout),
        *_check_world(cluster, layout),
        *technique_problems(layout, on_cores=not cluster.has_accelerators),
        *_check_tensor(profile, layout),
        *_check_pipeline(profile, layout),
        *_check_rest(profile, layout),
        *_check_whole_batch(profile, layout),
    ]


def _check_sizes(layout: Layout) -> Iterator[str]:
    for name in (*AXES, "chunks", "microbatch_size", "microbatches"):
        if getattr(layout, name) < 1:
            yield f"{name} = {getattr(layout, name)} is too small. Use 1 or more."
    if sorted(layout.order) != sorted(AXES):
        yield f"order = {list(layout.order)} must name each of {', '.join(AXES)} once."


def _check_world(cluster: Cluster, layout: Layout) -> Iterator[str]:
    world, devices = layout.world_size, cluster.num_devices
    if cluster.has_accelerators and world > devices:
        rest = max(1, world // layout.data)
        fix = f"Use data = {devices // rest}" if devices >= rest else f"Use at least {rest} devices"
        yield f"world = {world} is more than the cluster's {devices} devices. {fix}."


def _check_tensor(profile: Profile, layout: Layout) -> Iterator[str]:
    tensor = layout.tensor
    if tensor > 1 and not profile.divisible:
        yield f"tensor = {tensor}: nothing is known of how to split a {profile.name}. Use tensor = 1."
    if layout.tensor_scheme != "1d" and tensor > 1:
        yield from layout_problems(profile, layout)
        return
    wrong = {
        name: size
        for name, size in profile.divisible
        if name not in _PADDED and size % tensor and not (name in _REPLICATED and tensor % size == 0)
    }
    if wrong:
        sizes = [size for name, size in profile.divisible if name not in (*_PADDED, *_REPLICATED)]
        fits = [ranks for ranks in range(1, tensor + 1) if not any(size % ranks for size in sizes)]
        listed = ", ".join(f"{name} = {size}" for name, size in wrong.items())
        yield f"tensor = {tensor} does not divide {listed}. Use {fits[-1]}."


def _check_pipeline(profile: Profile, layout: Layout) -> Iterator[str]:
    blocks, stages = len(profile.blocks), layout.num_stages
    if layout.pipeline == 1:
        if layout.chunks > 1:
            yield f"chunks = {layout.chunks} needs a pipeline. Use chunks = 1, or pipeline = 2 or more."
        return
    least, most = chunk_limits(layout.schedule)
    if layout.chunks < least or (most is not None and layout.chunks > most):
        yield f'chunks = {layout.chunks} does not fit schedule = "{layout.schedule}". Use chunks = {least}.'
    if layout.cuts is None:
        if stages > blocks:
            yield (
                f"pipeline = {layout.pipeline} × chunks = {layout.chunks} makes {stages} stages of {blocks} blocks. "
                f"Use {blocks // layout.chunks or 1} or fewer ranks."
            )
        return
    if len(layout.cuts) != stages - 1:
        yield f"cuts has {len(layout.cuts)} places, and {stages} stages have {stages - 1}. Leave it out to cut by cost."
    elif list(layout.cuts) != sorted(layout.cuts) or layout.cuts[0] < 0 or layout.cuts[-1] > blocks:
        yield f"cuts = {list(layout.cuts)} must rise, within 0 and {blocks}. Leave it out to cut by cost."


def _check_rest(profile: Profile, layout: Layout) -> Iterator[str]:
    ranks = layout.expert_room
    if layout.expert > 1 and not profile.num_experts:
        yield f"expert = {layout.expert}: a {profile.name} has no experts. Use expert = 1."
    elif layout.expert > 1 and profile.num_experts % layout.expert:
        fits = max(size for size in range(1, layout.expert) if profile.num_experts % size == 0)
        yield f"expert = {layout.expert} does not divide {profile.num_experts} experts. Use {fits}."
    elif ranks % layout.expert and (ranks * layout.tensor) % layout.expert:
        fits = max(size for size in range(1, layout.expert) if ranks % size == 0 and profile.num_experts % size == 0)
        yield (
            f"expert = {layout.expert} does not divide the {' × '.join(EXPERT_LENDERS)} = {ranks} ranks that it "
            f"borrows from. Use {fits}."
        )
    if layout.context > 1 and profile.sequence_length % layout.context:
        fits = max(size for size in range(1, layout.context) if profile.sequence_length % size == 0)
        yield f"context = {layout.context} does not divide sequence_length = {profile.sequence_length}. Use {fits}."
    if layout.context > 1 and (problem := _length_problem(profile, layout)):
        yield f"context = {layout.context} {problem} Use fewer."
    swapped = layout.context > 1 and layout.context_scheme == "ulysses" and profile.attention_heads
    if swapped and (problem := heads_problem(swapped[0], tensor=layout.tensor, ranks=layout.context)):
        yield f'context = {layout.context} {problem} Use scheme "ring".'
    if layout.context > 1 and layout.context_scheme == "usp" and (problem := _mixed_problem(profile, layout)):
        yield f'context = {layout.context} {problem} Use scheme "ring".'
    if layout.context > 1 and profile.sequence_length == 1:
        yield f"context = {layout.context}: samples of a {profile.name} are no sequences. Use context = 1."
    if isinstance(layout.recompute, tuple) and len(layout.recompute) != len(profile.blocks):
        yield f"recompute has {len(layout.recompute)} words for {len(profile.blocks)} blocks. Give one word for all."


def _mixed_problem(profile: Profile, layout: Layout) -> str:
    heads, among = profile.attention_heads, layout.context_ulysses
    if not exchanging_ranks(layout.context, layout.context, layout.context):
        return "has no groups of neighbours, as usp needs."
    return mixed_problem(heads, tensor=layout.tensor, ranks=layout.context, exchanging=among)


def _length_problem(profile: Profile, layout: Layout) -> str:
    length, sequence = profile.sequence_length, layout.sequence_parallel
    if length == 1:
        return ""  # no sequence at all, which has words of its own
    return length_problem(length, ranks=layout.context, tensor=layout.tensor, sequence=sequence)


def _check_whole_batch(profile: Profile, layout: Layout) -> Iterator[str]:
    if profile.facts.per_sample_loss:
        return
    path, problem = whole_batch_problem(
        ranks=layout.data,
        is_split=layout.microbatches > 1,
        pipeline=layout.pipeline,
        no_gathering=profile.facts.why_not("gathered_loss"),
    )
    if path == ("mesh",):
        yield f"data = {layout.data} {problem} Use 1."
    elif path == ("mesh", "pipeline"):
        yield f"pipeline = {layout.pipeline} {problem} Use 1, or one data rank."
    elif path:
        size = layout.microbatch_size * layout.microbatches
        yield f"microbatches = {layout.microbatches} {problem} Use size = {size}, or more data ranks."
