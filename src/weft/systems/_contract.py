"""What every other training system says of itself: one contract, one module per system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from weft.price import Layout
from weft.profile import ModelSizes
from weft.recipe import OptimizerRecipe
from weft.search import Space
from weft.systems._facts import Facts

DEFAULT_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model under a layout, as another system is to train it."""

    sizes: ModelSizes
    layout: Layout
    cuts: tuple[int, ...] = ()
    """First block of each later stage; empty without a pipeline."""
    shares: tuple[int, ...] = ()
    """Microbatches of each data rank where they differ; empty: all have `layout.microbatches`."""
    global_batch_size: int
    sequence_length: int
    devices_per_node: int
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    steps: int = DEFAULT_STEPS

    @property
    def nodes(self) -> int:
        """Nodes in use; all but a single one are full."""
        return -(-self.layout.world_size // self.devices_per_node)

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return min(self.layout.world_size, self.devices_per_node)

    @property
    def stages(self) -> tuple[range, ...]:
        """Blocks of each stage, in the order of the model."""
        starts, ends = (0, *self.cuts), (*self.cuts, self.sizes.num_layers)
        return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """How another system is started: the same model, the same layout."""

    system: str
    version: str
    command: tuple[str, ...]
    """Words of the command, to be given on every node.  `$HEAD_NODE` and `$NODE_RANK` stand for what only the place
    knows."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name → text of what must lie in the folder of the command."""
    notes: tuple[str, ...] = ()
    """What the system does differently, and what stands for something of the user's, one line each."""


class System(Protocol):
    """A training system at a named version."""

    @property
    def facts(self) -> Facts:
        """The recorded version, arguments and checks."""
        ...

    def spaces(self, sizes: ModelSizes, space: Space) -> tuple[Space, ...]:
        """Return parts of a space that together are what the system can do with a model; empty where it cannot train
        the model at all."""
        ...

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        """Yield what the system has no words for in a model."""
        ...

    def refusals(self, job: Job) -> Iterator[str]:
        """Yield why the system cannot train a model under a layout."""
        ...

    def emission(self, job: Job) -> Emission:
        """Return the command of a job without refusals."""
        ...

    def check(self, emission: Emission, job: Job) -> Iterator[str]:
        """Yield what the recorded arguments and checks of the system say against a command."""
        ...
