"""Everything Weft must know of a model to split, cut and initialise it, beside the model itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from weft.config.plan import Limit
from weft.model.families import (
    DROPPED_ATTENTION,
    NO_SEQUENCE,
    NO_VOCABULARY,
    OWN_CHECKPOINTS,
    ROUTED_FEATURES,
    UNKNOWN_ATTENTION,
    UNKNOWN_FEATURES,
    WINDOWED_ATTENTION,
    FoundCut,
    SampleField,
    Tables,
)

if TYPE_CHECKING:
    from weft.model.description import Description
    from weft.model.reference.mixture import Mixture
    from weft.model.stacked import ExpertStack

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that take statistics over the samples of a batch."""
Batch = Mapping[str, Tensor]
"""Fields by name, each with samples along dim 0.  `sample_ids` (int64) is always there."""


class Loss(Protocol):
    """`loss(outputs, batch) -> (sum, count)`: both 0-d; `sum` differentiable, `count` a float that is not.

    The engine divides the sum over all microbatches and ranks by the global count.  A loss that is no sum over samples
    carries the attribute `per_sample = False`; a loss without the attribute is a sum over samples.  One that is also a
    sum over tokens, each by its own outputs and the fields of the batch at its place, may say `per_token = True`.
    Terms that are statistics over the batch stand beside it, as its attribute `auxiliary` (`weft.model.auxiliary`).
    """

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]: ...


Initialiser = Callable[[str, nn.Module], None]
"""`initialise(name, module)`: fill the module's own materialised CPU parameters and buffers (not those of its children)
from the default generator, which the caller has seeded for this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a model's mixtures: modules that return (logits, weights of the choices, chosen experts, …)."""

    names: tuple[str, ...]
    """Modules, in forward order."""
    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    balance_rate: float = 0.0
    """`bias` moves by this much after each step, towards an even load."""
    bias: str = "bias"
    """Buffer of a router by which experts are chosen."""


@dataclass(slots=True, kw_only=True)
class Blueprint(Tables):
    """A model and its tables.  `module` is on the meta device when `initialise` is given, else really constructed."""

    module: nn.Module
    name: str = ""
    """Kind of model, for messages: `decoder`, `llama`; empty: the class says it."""
    inputs: Mapping[str, str]
    """Keyword of the model's forward → field of the batch."""
    beside: Callable[[str, Batch], Any] | None = None
    """`beside(name, batch)`: what else of a batch a forward may be given by `inputs`; None: there is nothing else."""
    casts_inputs: bool = True
    """Whether floating fields are cast to what the model computes in; else it is given them as they are."""
    position_input: str | None = None
    """Keyword of the forward that takes each token's place in its sample, int64 (samples, tokens), in place of 0, 1, …
    Empty: it needs none, for nothing in it depends on places.  None: it has none, and ranks cannot share a sequence."""
    padding_token: int | None = None
    """Token beside which places are counted, as RoBERTa does (`places_beside_padding`); None: they are 0, 1, …"""
    attention: Literal["causal", "full"] | None = None
    """How tokens see one another, where all of it is `scaled_dot_product_attention` (also in `nn.MultiheadAttention`)
    of the tokens of a sample: those before and itself, or all; of their document alone, where the batch has documents.
    Nothing else in the forward may mix tokens (no masks of its own, biases, convolutions, sums or shifts along the
    sequence), or run again by itself (`torch.utils.checkpoint`).  None: models of tokens alone are looked at
    (`weft.analysis`), others share none."""
    attending: tuple[str, ...] = ()
    """Modules that call it of the tokens, where looking has shown them."""
    modifies_scores: bool = False
    """Whether looking has shown that some of these cap their scores, add slopes to them or have sinks."""
    has_known_forward: bool = False
    """Whether it is a reference model, or of a family with a file, as it is: tensor ranks that form a grid rely on what
    a forward does between layers, which tables do not show."""
    loss: Loss
    initialise: Initialiser | None
    task: Literal["causal_lm", "masked_lm", "classification", "other"] = "other"
    vocabulary_size: int | None = None
    hidden_size: int | None = None
    """Width of the activation between two blocks, for messages."""
    flops_per_sample: float = 0.0
    """Forward and backward of one sample, attention counted without the causal half."""
    block_costs: Sequence[float] = ()
    """Relative forward cost of [stem, block 0, …, tail]; empty: cut by block count."""
    example: Callable[[int], dict[str, Tensor]] | None = None
    """`example(batch_size)`: a batch on the meta device, to find shapes."""
    samples: Mapping[str, SampleField] = field(default_factory=dict[str, SampleField])
    """Shape of a sample by field, with `labels`, so that samples can be made up. Empty: `example` has the shapes."""
    export: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    """Weights under the names and shapes that `transformers` loads; None: as they are."""
    export_config: Mapping[str, Any] | None = None
    """`config.json` beside exported weights."""
    export_files: tuple[str, str] = ("config.json", "model.safetensors")
    """Names of the files of `export_config` and of the weights; a model's adapters have others."""
    sequence_length: int | None = None
    """Tokens per sample; None where samples are no sequences."""
    attention_heads: tuple[int, int] | None = None
    """Heads of queries and of keys in every attention; None: they differ, or nothing says."""
    sometimes: Sequence[str] = ()
    """Blocks that only some samples' forwards call, as far as looks have shown: none is gathered by itself."""
    stacks: Mapping[str, ExpertStack] = field(default_factory=dict[str, "ExpertStack"])
    """Modules of stacked experts that ranks can share out beside mixtures of Weft's own, and how they compute."""
    routers: Routers | None = None
    """Modules whose load and entropy a report of a step has; None: none."""
    keep_dtype: Sequence[str] = ()
    """Globs over buffers that keep their dtype in bf16 and fp16 (tables that lose their meaning when rounded)."""

    def keywords(self, batch: Batch) -> dict[str, Any]:
        """Keywords of the model's forward; fields that the batch lacks are left out."""
        arguments: dict[str, Any] = {}
        for keyword, name in self.inputs.items():
            if name in batch:
                arguments[keyword] = batch[name]
            elif self.beside is not None and (value := self.beside(name, batch)) is not None:
                arguments[keyword] = value
        return arguments

    @property
    def has_batch_norm(self) -> bool:
        """Whether it has batch norms, also such as take no statistics now."""
        return any(isinstance(module, BATCH_NORMS) for module in self.module.modules())

    @property
    def batch_norm(self) -> str:
        """The first batch norm that takes the statistics of a batch, in the mode that it is in; empty: none does."""
        modules = self.module.named_modules()
        return next((f"{name} ({type(norm).__name__})".strip() for name, norm in modules if takes_statistics(norm)), "")

    @property
    def mixtures(self) -> Mapping[str, Mixture]:
        """Mixtures of experts by name, which ranks can share out."""
        if "weft.model.reference.mixture" not in sys.modules:  # whoever made one has loaded it
            return {}
        from weft.model.reference.mixture import Mixture

        return {name: module for name, module in self.module.named_modules() if isinstance(module, Mixture)}

    @property
    def experts(self) -> Mapping[str, int]:
        """How many experts ranks can share out, by the module that holds them."""
        own = {f"{name}.experts" if name else "experts": one.experts for name, one in self.mixtures.items()}
        counted = {name: experts.num_experts for name, experts in own.items()}
        return counted | {name: stack.num_experts for name, stack in self.stacks.items()}

    @property
    def per_sample_loss(self) -> bool:
        """Whether the loss is a sum over samples."""
        return getattr(self.loss, "per_sample", True)

    def why_not(self, limit: Limit) -> str:
        """Return why the model cannot do something, as far as tables, modules and loss say: a sentence without its end;
        empty: it can, or only looking at it would tell."""
        if reason := self.limits.get(limit):
            return reason
        match limit:
            case "blocks":
                return "" if self.cut is not None else f"nothing says where the blocks of {self._kind} are"
            case "tensor":
                return "" if self.splits else f"nothing says how the layers of {self._kind} split"
            case "pipeline":
                return self._why_no_pipeline()
            case "sequence":
                return NO_SEQUENCE if isinstance(self.cut, FoundCut) else ""
            case "context":
                return self._why_no_context()
            case "mesh_2d":
                return self._why_no_mesh_2d()
            case "mesh_3d":
                return self._why_no_mesh_3d()
            case "expert" | "gathered_loss":
                return ""

    @property
    def _kind(self) -> str:
        return type(self.module).__name__

    def _why_no_pipeline(self) -> str:
        terms = getattr(self.loss, "auxiliary", None)
        if not terms:
            return ""
        from weft.model.profile import why_no_pipeline  # loaded where a loss has such terms

        return why_no_pipeline(terms)

    def _why_no_context(self) -> str:
        if self.sequence_length is None:
            return "its samples are no sequences"
        if self.position_input is None or self.attention is None:
            return UNKNOWN_ATTENTION
        return self._no_sum_over_tokens

    @property
    def _no_sum_over_tokens(self) -> str:
        """Why ranks cannot share a sequence although it is known how its tokens see one another: what its loss or its
        modules have against it; empty: nothing."""
        if not (self.per_sample_loss and getattr(self.loss, "per_token", False)):
            return "nothing says that its loss is a sum over tokens (an attribute `per_token` of the loss)"
        if getattr(self.loss, "auxiliary", None):
            return "its loss has auxiliary terms over the batch"
        if any(getattr(module, "gradient_checkpointing", False) for module in self.module.modules()):
            return OWN_CHECKPOINTS
        return ""

    def _why_no_mesh_2d(self) -> str:
        if not self.has_known_forward or self.vocabulary_size is None:
            return UNKNOWN_FEATURES
        if self.stacks or any(rule.kind == "expert" for rule in self.split):
            return ROUTED_FEATURES
        if self.vocabulary_head is None:
            return NO_VOCABULARY
        return self._no_sum_over_tokens

    def _why_no_mesh_3d(self) -> str:
        if self.why_not("mesh_2d"):
            return ""
        if self.attention is None or self.attending:  # how its tokens see one another its family leaves to its masks
            return WINDOWED_ATTENTION
        dropouts = (
            name for name, module in self.module.named_modules() if isinstance(module, nn.Dropout) and module.p > 0
        )
        dropped = any(self.kind_of(name) == "heads" for name in dropouts)
        return DROPPED_ATTENTION if dropped else self.why_not("context")

    def described_by(self, description: Description) -> Blueprint:
        """Take what a description of the model says: its name, its widths, its heads, and what its parts cost; return
        itself."""
        profile = description.profile
        self.name, self.hidden_size = profile.name, profile.hidden_size
        self.divisible = dict(profile.divisible)
        self.attention_heads = profile.attention_heads
        if reason := description.facts.why_not("context"):
            self.limit("context", reason)
        self.flops_per_sample, self.block_costs = description.flops_per_sample, description.block_costs
        return self


def takes_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch norm that normalises by the statistics of the batch, in the mode that it is in."""
    return isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None)


def logits_of(outputs: Any) -> Any:
    """Return the logits of a plain model, a Hugging Face output, or a tuple."""
    if hasattr(outputs, "logits"):
        return outputs.logits
    return outputs[0] if isinstance(outputs, tuple | list) else outputs
