"""How the modules of a model split over the tensor axis, and where it may be cut, by their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from weft.config.plan import Limit
from weft.config.recipe import SplitKind

INHERITED = ("sequence", "replicate", "heads", "features", "expert")
"""Kinds that also hold for what lies inside the matching module."""
OF_PARAMETERS = ("part", "heads")
"""Kinds that a single parameter may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How the modules whose names match split over the tensor axis.

    `column` and `row` take linear layers (`nn.Linear`, `nn.Embedding` for `vocab`, Hugging Face `Conv1D`).
    `channel_out` and `channel_in` cut convolutions; `channels` marks norms and convolutions in groups between them.
    `sequence` marks modules (norms, dropouts) that may work on a shard of the sequence.
    `gathered_input` marks modules that read the sequence's length off their input (`batch, length, _ = x.shape`): under
    sequence parallelism their first argument is gathered before them, and not once more at the columns inside.
    `heads` / `features` mark dropouts whose input is already split along dim 1 (heads) / the last dim (features), and
    modules or single parameters that are the same for all heads: each rank then has a part of their gradient.
    `gather` marks modules that need all of a last dim which is split (norms over all heads): it is gathered before
    them, and each rank goes on with its part of their result.
    `part` names a parameter of which each rank has a part along `dim`, because it meets activations that are split.
    `expert` marks mixtures of experts: each rank computes all choices of its router, and with its `part` of every
    expert a part of each token's sum.
    """

    match: str
    """Glob over the names of modules, and for `part` and `heads` of parameters; the first rule that matches wins."""
    kind: SplitKind
    blocks: int = 1
    """Equal blocks fused along the split dimension (3 for a fused query-key-value), each cut on its own."""
    gather_output: bool = False
    """`column` only: all-gather the output (a head whose loss is not vocabulary-parallel)."""
    dim: int = 0
    """`part` only: along which dimension."""

    @property
    def divides(self) -> bool:
        """Whether the tensor axis divides the weights of the modules that match."""
        return self.kind in ("column", "row", "vocab", "channel_out", "channel_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Localise:
    """An attribute of the matching modules that counts something split over the tensor axis, divided by its size."""

    match: str
    attribute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTable:
    """Module names at which a model may be cut into pipeline stages, in forward order. A later stage replaces `entry`
    by the activation it receives, `stem_zero` modules by a zero, and `stem_skip` by the identity; blocks and `tail`
    modules that are not the stage's become identities.

    A later stage replaces `entry` by the activation it receives, `stem_zero` modules by a zero, and `stem_skip` by the
    identity; blocks and `tail` modules that are not the stage's become identities on their first argument.  Nothing is
    renamed and the model's own forward runs unchanged.
    """

    entry: str
    stem_zero: tuple[str, ...] = ()
    stem_skip: tuple[str, ...] = ()
    blocks: tuple[str, ...]
    tail: tuple[str, ...] = ()

    @property
    def stem(self) -> tuple[str, ...]:
        return (self.entry, *self.stem_zero, *self.stem_skip)

    @property
    def between(self) -> Mapping[str, int]:
        """No module stands between two blocks."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that a later stage needs: a result of a module that runs once in a forward."""

    module: str
    leaf: int
    """Position among the tensors and other values that the module returns."""
    shape: tuple[int, ...]
    """Shape of the value for two samples."""
    is_per_sample: bool = True
    """Whether dim 0 grows with the samples."""
    also: tuple[tuple[str, int], ...] = ()
    """Other results that are this same tensor, passed on: module and place."""

    def shape_for(self, samples: int) -> tuple[int, ...]:
        """Return the value's shape where the forward sees so many samples."""
        return (self.shape[0] * samples // 2, *self.shape[1:]) if self.is_per_sample else self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCut:
    """Where a model may be cut into pipeline stages, as one forward shows it (`weft.analysis`).

    A stage runs the model's own forward up to the first module of a later stage.  Modules of earlier stages return what
    has crossed, and stand-ins where a value is no longer needed; so what the forward computes outside of the modules
    named here (masks, positions, sums) is computed on every stage that needs it.  Blocks may stand in several stacks.
    """

    stem: tuple[str, ...]
    """Modules that run before the first block, and those that never run."""
    blocks: tuple[str, ...]
    """The blocks in the order in which they run."""
    between: Mapping[str, int]
    """Module that runs between two blocks → index of the second one, whose stage holds it."""
    tail: tuple[str, ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    """Values that cross the border before each block but the first, in the order in which they are computed."""
    written: tuple[str, ...] = ()
    """Modules whose results the forward writes into."""

    def crossing_shape(self, block: int, samples: int) -> tuple[int, ...]:
        """Shape of what crosses a border before `block`: several results travel as one, end to end."""
        shapes = [crossing.shape_for(samples) for crossing in self.crossings[block - 1]]
        return shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)


Cut = CutTable | FoundCut


def found_split_note(rules: Iterable[SplitRule]) -> str:
    """Return a sentence for the user about rules that were found by looking at a model."""
    return f"its split table, {sum(r.divides for r in rules)} rules, was found by looking at it; `weft check` proves it"


NO_SEQUENCE = "its blocks were found by looking at its forward, and nothing says what stands between them"
"""Why tensor ranks do not share the sequence of a model with a `FoundCut`."""
UNKNOWN_ATTENTION = "nothing says how its tokens see one another (`Blueprint.attention`)"
"""Why ranks do not share a sequence of a model that is neither Weft's own nor of a family with a file."""
UNKNOWN_FEATURES = "how features meet is known only of Weft's decoder and encoder and families with a file"
"""Why tensor ranks form no grid for any other model: a forward that was only looked at splits in one dimension."""
ROUTED_FEATURES = "its router sees all features of a token"
"""Why tensor ranks form no grid for a mixture of experts."""
WINDOWED_ATTENTION = "its masks of windows are made for other samples than a rank has inside of a layer"
"""Why tensor ranks form no cube for a model whose attention sees a window."""
DROPPED_ATTENTION = "its attention drops probabilities of samples that a rank has not got inside of a layer"
"""Why tensor ranks form no cube for a model whose attention has dropout."""
NO_VOCABULARY = "it has no head over a vocabulary"
"""Why tensor ranks form no grid for a model that predicts no token."""
OWN_CHECKPOINTS = "its layers run their own forward again (`gradient_checkpointing`), outside of a microbatch"
"""Why ranks do not share a sequence of a model that recomputes by itself."""


@dataclass(slots=True, kw_only=True)
class Tables:
    """How a model splits and where it is cut; empty where nothing is known of it.  A `Blueprint` has these, too."""

    split: Sequence[SplitRule] = ()
    localise: Sequence[Localise] = ()
    divisible: Mapping[str, int] = field(default_factory=dict[str, int])
    """Named sizes that the tensor axis must divide, for error messages: {"num_heads": 8, "num_kv_heads": 4}."""
    cut: Cut | None = None
    limits: Mapping[Limit, str] = field(default_factory=dict[Limit, str])
    """What the model cannot do → why, as far as its family or looking at it has shown: sentences without their end."""
    vocabulary_head: str | None = None
    """Name of the linear head whose output only the vocabulary loss reads; it may be fused with the loss."""
    notes: Sequence[str] = ()
    """Sentences that the user reads once at the start."""

    @property
    def splits(self) -> bool:
        """Whether a rule lets the tensor axis divide a layer."""
        return any(rule.divides for rule in self.split)

    def limit(self, limit: Limit, reason: str) -> None:
        """Enter that the model cannot do something, and why: a sentence without its end."""
        self.limits = {**self.limits, limit: reason}

    def rule_of(self, name: str) -> SplitRule | None:
        """The first rule that matches a module, else that of the nearest one around it when it covers its inside."""
        around = name
        while True:
            for rule in self.split:
                if fnmatchcase(around, rule.match):
                    return rule if around == name or rule.kind in INHERITED else None
            if "." not in around:
                return None
            around = around.rpartition(".")[0]

    def rule_of_parameter(self, name: str) -> SplitRule | None:
        """The rule about a parameter itself; None: that of its module holds."""
        rule_of_name = next((rule for rule in self.split if fnmatchcase(name, rule.match)), None)
        return rule_of_name if rule_of_name is not None and rule_of_name.kind in OF_PARAMETERS else None

    def kind_of(self, name: str) -> SplitKind | None:
        """The kind of `rule_of`."""
        rule = self.rule_of(name)
        return None if rule is None else rule.kind

    @property
    def of_tables(self) -> dict[str, Any]:
        """Values of these fields alone, by name, where there are others besides."""
        return {item.name: getattr(self, item.name) for item in fields(Tables)}
