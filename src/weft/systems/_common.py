"""What several systems share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.plan import AXES
from weft.profile import ModelSizes
from weft.search import Space
from weft.systems._contract import Job
from weft.techniques.registry import elsewhere

LAYERED = "a plain decoder of tokens"


def narrowed(space: Space, **changes: Any) -> Space | None:
    """Return a space with only those values of a tuple that both allow; None where nothing is left of one.

    What all of these systems have in common is set here too: equal shares of the batch, axes in their usual
    order, gradients summed as they are.
    """
    usual: dict[str, Any] = {
        "tensor_schemes": ("1d",),
        "compressions": ("none",),
        "algorithms": ("auto",),
        "orders": (AXES,),
    }
    for name, values in {**usual, **changes}.items():
        if isinstance(values, tuple):
            mine = getattr(space, name)
            kept = values if mine is None else tuple(value for value in mine if value in values)
            if not kept:
                return None
            space = replace(space, **{name: kept})
        else:
            space = replace(space, **{name: values})
    return replace(space, even_shares=True, fewer_devices=space.fewer_devices)


def joined(*spaces: Space | None) -> tuple[Space, ...]:
    """The spaces that hold anything, each once."""
    return tuple(dict.fromkeys(space for space in spaces if space is not None))


def layout_refusals(job: Job) -> Iterator[str]:
    """What none of the systems can do."""
    layout = job.layout
    if layout.tensor_scheme != "1d":
        yield f"tensor scheme {layout.tensor_scheme}: it splits matrices in one dimension"
    yield from elsewhere(layout)
    if layout.reduced_by != "auto":
        yield f"reductions by {layout.algorithm}: NCCL chooses there"
    if job.global_batch_size != layout.microbatch_size * layout.microbatches * layout.data or job.shares:
        yield "unequal shares of the batch"
    if job.nodes > 1 and layout.world_size % job.devices_per_node:
        yield f"{layout.world_size} ranks on nodes of {job.devices_per_node}: they must fill whole nodes"
    if layout.order != AXES and _reorders(job):
        yield f"axes on the hardware in the order {', '.join(layout.order)}: its order is {', '.join(AXES)}"


def _reorders(job: Job) -> bool:
    """Whether the order of the axes that are used differs from the usual one."""
    layout = job.layout
    used = [axis for axis in layout.order if getattr(layout, axis) > 1]
    return used != [axis for axis in AXES if axis in used]


def model_lacks(sizes: ModelSizes) -> Iterator[str]:
    """What none of the systems has words for."""
    if not sizes.causal or sizes.head != "vocabulary":
        yield f"attention or a head that make it no {LAYERED}"
    if sizes.patch_values or sizes.class_token or sizes.token_types:
        yield "patches, class tokens or segments"


def optimizer_refusals(job: Job) -> Iterator[str]:
    if job.optimizer.name != "adamw":
        yield f"the optimizer {job.optimizer.name}: AdamW alone is emitted"
    if job.optimizer.average_decay is not None:
        yield "an average of the weights"
    if job.optimizer.groups:
        yield "settings for groups of parameters"


def torchrun(job: Job) -> tuple[str, ...]:
    """Words that start the ranks of every node."""
    words = ["torchrun", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.per_node)]
    if job.nodes > 1:
        words += ["--node-rank", "$NODE_RANK", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "$HEAD_NODE:29500", "--rdzv-id", "weft"]
    return tuple(words)


def place_notes(job: Job) -> Iterator[str]:
    if job.nodes > 1:
        yield f"$HEAD_NODE: the first of the {job.nodes} nodes; $NODE_RANK: 0 to {job.nodes - 1}, another on every node"
