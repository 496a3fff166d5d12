"""A model as its ranks' programs need it: parameters, blocks, and the modules around which ranks send.

It knows no plan: shapes are those of the whole model and of `samples` samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from weft.techniques.tensor.mesh_2d.shape import GridCut, OnGrid

Shape = tuple[int, ...]
CallKind = Literal[
    "column", "row", "vocab", "gathered_input", "replicate", "gather", "batch_norm", "enter", "sum", "norms",
    "attention", "expert", "experts", "mixture", "channel_out", "channel_in", "product", "lookup", "rms_norm",
    "layer_norm",
]  # fmt: skip
"""How ranks share a module's work; `batch_norm`: data ranks share its statistics; `expert`: a mixture; `experts`: what
reads its rows, sorted by expert, which may be those of other ranks; `mixture`: what reads its tokens and ends with what
experts make of them, a mixture of Weft's or a module of stacked experts.  `product`, `lookup` and the two norms are
layers that only a grid of tensor ranks shares.  Four are no calls but what a module does inside of its forward: `enter`
copies an activation, `sum` sums its parts, `norms` those of norms of weights, and `attention` lets tokens see one
another: it reads keys, and its output has the shape of the values."""


class TensorCut(NamedTuple):
    """A cut over the tensor axis: dimension `dim` is `blocks` equal blocks, each cut in as many parts as ranks."""

    dim: int
    blocks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One name of a parameter; a tied parameter has several."""

    name: str
    first: str
    """The first name of the same tensor in the whole model: its own, unless it is tied to an earlier one."""
    shape: Shape
    """Whole."""
    is_trained: bool
    split: TensorCut | None = None
    grid: GridCut | None = None
    """The cut over a 2-D mesh of tensor ranks; None: unsplit there, with partial gradients."""
    partial: Literal["never", "sequence", "always"] = "never"
    """Whether each tensor rank computes a part of its gradient: always, or under sequence parallelism."""
    is_expert: bool = False
    """Whether dimension 0 counts the experts of a mixture, which ranks of the expert axis share out."""
    is_sparse: bool = False
    """Whether its gradient comes as rows, which travel by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module in a forward.  Calls stand in the order in which they are entered."""

    module: str
    kind: CallKind
    on_grid: OnGrid | None = None
    """The collectives that a 2-D mesh of tensor ranks runs in it; None: none."""
    block: int | None = None
    """Index of the block that it is a part of; None: it stands before or behind the blocks."""
    in_region: bool = False
    """Whether it works on a shard of the sequence under sequence parallelism."""
    is_inside_whole: bool = False
    """Whether a module around it has gathered its input then."""
    gathers_output: bool = False
    is_divided: bool = False
    """Whether each tensor rank has a part of its channels, of a batch norm; or of its heads, of attention."""
    source: int
    """Calls with equal numbers read the same tensor, unchanged in between."""
    shape: Shape
    """Shape of what the call reads."""
    output: Shape
    heads: int = 0
    """Heads of queries, of attention."""
    window: int | None = None
    """Keys that each query of attention sees, its own and those before; None: as many as there are."""
    experts: int = 0
    """Experts of all ranks together, of such a call."""
    copies: int = 0
    """Experts that a token of a mixture chooses."""
    weighs: bool = False
    """Whether a gradient flows back into what these choices count."""
    needs_gradient: bool
    """Whether a gradient flows back into what it reads."""
    gives_gradient: bool
    """Whether a gradient flows back into it."""
    is_entry_repeated: bool = False
    """Whether its block keeps something for the backward after this call begins: a recomputation goes on that far."""
    is_exit_repeated: bool = False
    """The same of what happens when it ends."""
    is_exit_needed: bool = False
    """Whether the block keeps something for the backward that is computed with this call's result."""
    widths: tuple[tuple[int, int], ...] = ()
    """Bytes of an element in a precision, and of one of what it reads then, where the model itself says the latter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """What enters a block."""

    name: str
    shape: Shape
    """Shape of the block's first argument."""
    needs_gradient: bool
    crossing: tuple[int, int] | None = None
    """Elements that cross a border between stages before it: those that grow with the samples, and the others.  None:
    its first argument alone crosses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGather:
    """A tensor that data ranks gather for a loss that sees the whole batch."""

    what: str
    elements_per_sample: int
    element_bytes: int | None
    """Bytes of an element; None: it is an activation, in the precision of the plan."""
    needs_gradient: bool
    """Whether its gradient is summed over the ranks and cut."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model without its numbers."""

    samples: int
    """Samples that the shapes of activations are for: dim 0 is a multiple of it."""
    parameters: tuple[Parameter, ...]
    """Every name, in the order of the module tree."""
    calls: tuple[ModuleCall, ...]
    stem: tuple[str, ...] = ()
    """Names of modules before the blocks, of all blocks, and behind them; none where the model cannot be cut."""
    entries: tuple[BlockEntry, ...] = ()
    between: Mapping[str, int] = field(default_factory=dict[str, int])
    """Modules between two blocks → index of the second one."""
    tail: tuple[str, ...] = ()
    block_costs: tuple[float, ...] = ()
    vocabulary_head: str | None = None
    joins_after: str | None = None
    """The module after which the sequence is whole again, under sequence parallelism."""
    joined: Shape | None = None
    """Shape that the module returns."""
    tokens: int = 0
    """Tokens of a sample, dim 1 of its activations; 0: samples are no sequences."""
    labels: int = 0
    """Labels that all samples have together."""
    gathers: tuple[SampleGather, ...] = ()
    """Tensors that a loss which is no sum over samples needs of all data ranks, in the order of a step."""

    routers: tuple[int, int] | None = None
    """Routers of mixtures, and the experts of each; None: there are none."""
    is_balanced: bool = False
    """Whether their load is balanced by biases, after each step."""
    auxiliary: tuple[int, ...] = ()
    """Elements of the sums of each auxiliary term of the loss."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks."""
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """First name of every parameter → all its names, in the order of the model."""
        names_of: dict[str, list[str]] = {}
        for parameter in self.parameters:
            names_of.setdefault(parameter.first, []).append(parameter.name)
        return {first: tuple(names) for first, names in names_of.items()}

    @cached_property
    def by_name(self) -> Mapping[str, Parameter]:
        """Every name with its parameter."""
        return {parameter.name: parameter for parameter in self.parameters}
