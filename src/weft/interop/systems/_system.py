"""The contract of another training system, which has one module each, and the parts that several share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from weft.config.plan import AXES
from weft.interop.systems._contract import Emission, SystemJob
from weft.interop.systems._facts import SystemFacts, facts_of
from weft.model.profile import ModelSizes
from weft.planning.search import Space
from weft.techniques.registry import unsupported_by_others

LAYERED = "a plain decoder of tokens"


class System:
    """A training system at a named version."""

    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]]
    """Those that are emitted."""

    @property
    def facts(self) -> SystemFacts:
        """The recorded version, arguments and checks."""
        return facts_of(self.name)

    def spaces(self, sizes: ModelSizes, space: Space) -> tuple[Space, ...]:
        """Return parts of a space that together are what the system can do with a model; empty where it cannot train
        the model at all."""
        if any(self.lacks(sizes)):
            return ()
        parts = [narrowed(space, precisions=self.precisions, **values) for values in self.parts(sizes, space)]
        return tuple(dict.fromkeys(part for part in parts if part is not None))

    def parts(self, sizes: ModelSizes, space: Space) -> Iterator[Mapping[str, Any]]:
        """Yield the same as values of the space that it is narrowed to (`narrowed`)."""
        raise NotImplementedError

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        """Yield what the system has no words for in a model."""
        raise NotImplementedError

    def refusals(self, job: SystemJob) -> Iterator[str]:
        """Yield why the system cannot train a model under a layout."""
        yield from self.lacks(job.sizes)
        yield from layout_refusals(job)
        yield from optimizer_refusals(job)
        if job.layout.precision not in self.precisions:
            *others, last = self.precisions
            yield f"{job.layout.precision}: emitted are {', '.join(others)} and {last}"
        yield from self.layout_lacks(job)

    def layout_lacks(self, job: SystemJob) -> Iterator[str]:
        """Yield the reasons that are its own, beside those of its model and those of all systems."""
        raise NotImplementedError

    def emission(self, job: SystemJob) -> Emission:
        """Return the command of a job without refusals."""
        raise NotImplementedError

    def check(self, emission: Emission, job: SystemJob) -> Iterator[str]:
        """Yield what the recorded arguments and checks of the system say against a command."""
        raise NotImplementedError


def narrowed(space: Space, **changes: Any) -> Space | None:
    """Return a space with only those values of a tuple that both allow; None where nothing is left of one.

    What all of these systems have in common is set here too: equal shares of the batch, axes in their usual order,
    gradients summed as they are, blocks recomputed alike.
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
    return replace(space, even_shares=True, per_block_recompute=False)


def layout_refusals(job: SystemJob) -> Iterator[str]:
    """Yield the properties of a layout that no system supports."""
    layout = job.layout
    if layout.tensor_scheme != "1d":
        yield f"tensor scheme {layout.tensor_scheme}: it splits matrices in one dimension"
    yield from unsupported_by_others(layout)
    if layout.reduced_by != "auto":
        yield f"reductions by {layout.algorithm}: NCCL chooses there"
    if job.global_batch_size != layout.microbatch_size * layout.microbatches * layout.data or job.shares:
        yield "unequal shares of the batch"
    # Their launchers start equally many ranks on every node.
    if job.nodes > 1 and layout.world_size % job.devices_per_node:
        yield f"{layout.world_size} ranks on nodes of {job.devices_per_node}: they must fill whole nodes"
    if layout.order != AXES and _reorders(job):
        yield f"axes on the hardware in the order {', '.join(layout.order)}: its order is {', '.join(AXES)}"


def _reorders(job: SystemJob) -> bool:
    """Whether the order of the axes that are used differs from the usual one."""
    layout = job.layout
    used = [axis for axis in layout.order if getattr(layout, axis) > 1]
    return used != [axis for axis in AXES if axis in used]


def model_lacks(sizes: ModelSizes) -> Iterator[str]:
    """Yield the properties of a model that no system can express."""
    if not sizes.causal or sizes.head != "vocabulary":
        yield f"attention or a head that make it no {LAYERED}"
    if sizes.patch_values or sizes.class_token or sizes.token_types:
        yield "patches, class tokens or segments"


def optimizer_refusals(job: SystemJob) -> Iterator[str]:
    if job.optimizer.name != "adamw":
        yield f"the optimizer {job.optimizer.name}: AdamW alone is emitted"
    if job.optimizer.average_decay is not None:
        yield "an average of the weights"
    if job.optimizer.groups:
        yield "settings for groups of parameters"


def torchrun(job: SystemJob) -> tuple[str, ...]:
    """Words that start the ranks of every node."""
    words = ["torchrun", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.per_node)]
    if job.nodes > 1:
        words += ["--node-rank", "$NODE_RANK", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "$HEAD_NODE:29500", "--rdzv-id", "weft"]
    return tuple(words)


def place_notes(job: SystemJob) -> Iterator[str]:
    if job.nodes > 1:
        yield f"$HEAD_NODE: the first of the {job.nodes} nodes; $NODE_RANK: 0 to {job.nodes - 1}, another on every node"


def rate_notes(job: SystemJob) -> Iterator[str]:
    if not job.optimizer.is_constant_rate:
        yield f"the learning rate is constant here; yours: {job.optimizer.schedule_line}"
