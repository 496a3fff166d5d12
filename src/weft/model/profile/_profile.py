"""A model as the planner sees it: operators in blocks, with sizes per token, so that any split can be priced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from weft.config.plan import ModelFacts

OperatorKind = Literal["matmul", "attention", "elementwise", "gather", "convolution"]
OperatorSplit = Literal["column", "row", "heads", "vocab", "expert", "sequence", "replicate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a forward pass.  All sizes are those of the whole operator, before any axis splits it.

    A *token* is one position of a sample: a sample has `Profile.sequence_length` tokens (1 where samples are no
    sequences; a convolution counts the positions of its output image as `rows_per_token`).
    """

    name: str
    """`attention.query_key_value`; unique in its block."""
    kind: OperatorKind
    split: OperatorSplit = "replicate"
    """How the tensor or the expert axis divides it: `column` cuts `n`, `row` cuts `k`, `heads` cuts heads, `vocab` cuts
    the vocabulary, `expert` shares out whole experts, `sequence` works on a shard of the tokens under sequence
    parallelism, `replicate` is computed by every rank."""
    rows_per_token: float = 1.0
    """M of a matmul, per token that enters the block: 1; top_k for routed experts."""
    n: int = 0
    """Columns of a matmul's result; output channels of a convolution."""
    k: int = 0
    """Inner size of a matmul; input channels × kernel positions of a convolution."""
    summed_elements_per_token: float = 0.0
    """Elements of its input whose gradient is a sum over tensor ranks, of a convolution that they cut by its output
    channels; of several with one input, at the first.  Other layers that are cut by what they make read what the layer
    behind them makes, which says it."""
    groups: int = 1
    """Matmuls side by side that share the rows out among them: experts; groups of a convolution."""
    heads: int = 0
    """Query heads of attention."""
    kv_heads: int = 0
    head_size: int = 0
    """Features of a query and key head of attention."""
    value_head_size: int = 0
    """Features of a value head of attention (differs from `head_size` in multi-head latent attention)."""
    causal: bool = False
    """Whether half of the scores of attention are masked."""
    window: int | None = None
    """Keys that a query of attention sees at most; None: all."""
    parameters: int = 0
    """Elements of its own weights; those of a tied weight stand at its first use only."""
    elements_moved_per_token: float = 0.0
    """Elements that `elementwise` and `gather` read and write in the forward pass.  Matmuls and attention follow from
    their sizes."""
    kept_elements_per_token: float = 0.0
    """Activations that wait for backward, beyond those that another operator keeps already, in compute precision.
    What an operator keeps is divided as the operator is: the tensor axis divides it, unless `split` is `replicate`, or
    `sequence` without sequence parallelism.  So the input of a column-parallel matmul, which every rank has whole, is
    kept by the norm before it, and its result by what takes it.  The scores of attention that writes them out follow
    from its sizes and do not count here."""
    kept_bytes_per_token: float = 0.0
    """Bytes of fixed size kept per token: dropout masks (1 byte), statistics (4 bytes), indices (8 bytes)."""
    unfused_elements_per_token: float = 0.0
    """Elements kept besides where the operator runs as several kernels (`Framework.fused_elementwise`)."""
    unfused_bytes_per_token: float = 0.0
    """Bytes of fixed size kept besides then: values that such kernels compute in fp32."""
    dropout: bool = False
    """Whether its result is dropped at random: of `elementwise`, `kept_bytes_per_token` is the mask; of attention, a
    mask and a second copy of the probabilities are kept where they are written out."""
    batch_statistics: int = 0
    """Channels with a mean and variance over all samples, which data ranks exchange forward and backward; 0: none.  Of
    what tensor ranks divide, they exchange their own."""
    selective: bool = False
    """Whether `recompute = "selective"` computes it again: attention's inside, activation functions, norms."""

    @property
    def moves_experts_rows(self) -> bool:
        """Whether it brings tokens to their experts, or back."""
        return self.kind == "gather" and self.split == "expert"

    def forward_flops(self, length: int) -> float:
        """FLOPs of one token's forward in a sample of `length` tokens; attention without the causal half."""
        if self.kind == "attention":
            keys = min(self.window or length, length)
            return 2.0 * self.rows_per_token * self.heads * keys * (self.head_size + self.value_head_size)
        groups = self.groups if self.kind == "convolution" else 1
        return 2.0 * self.rows_per_token * self.n * self.k * groups


def last_of_experts(operators: Sequence[Operator]) -> Operator | None:
    """The product whose results experts give, which are parts of a sum where tensor ranks cut experts."""
    return next((operator for operator in reversed(operators) if operator.split == "expert" and operator.n), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A repeated part of the model, between whose copies stages may be cut; or its stem or tail."""

    name: str
    operators: tuple[Operator, ...]
    entry_elements_per_token: float
    """Elements of the activation that enters it: what full recomputation keeps, and what a stage before it sends."""

    @property
    def parameters(self) -> int:
        return sum(operator.parameters for operator in self.operators)

    @property
    def expert_parameters(self) -> int:
        return sum(operator.parameters for operator in self.operators if operator.split == "expert")

    def forward_flops(self, length: int) -> float:
        """FLOPs of one token's forward, as `Operator.forward_flops`."""
        return sum(operator.forward_flops(length) for operator in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model: stem (embedding), blocks in order, tail (final norm, head, loss)."""

    name: str
    sequence_length: int
    """Tokens per sample; 1 where samples are no sequences."""
    stem: Block
    blocks: tuple[Block, ...]
    """Alike blocks are the same object, so that their costs are computed once."""
    tail: Block
    hidden_size: int
    vocabulary_size: int = 0
    """0: no vocabulary head."""
    tied: bool = False
    """Whether embedding and head share their weight; a pipeline then holds it on both ends and adds their gradients."""
    divisible: tuple[tuple[str, int], ...] = ()
    """Named sizes that the tensor axis must divide; empty: no split table, data and ZeRO plans only."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    """What a plan must know of it beside what it computes.  Without limits, for models that other systems train."""
    num_experts: int = 0
    """Routed experts per mixture block; 0: none.  The expert axis must divide it."""
    trained_share: float = 1.0
    """Share of the parameters that are trained; the others are frozen."""
    coded_share: float = 0.0
    """Share of the parameters that are no floating-point numbers: codes of frozen weights, and their scales."""
    code_bytes: float = 0.0
    """Bytes of these per parameter of the whole model."""

    @property
    def parts(self) -> tuple[Block, ...]:
        return (self.stem, *self.blocks, self.tail)

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of one sample's forward, as `Operator.forward_flops`."""
        length = self.sequence_length
        return length * sum(part.forward_flops(length) for part in self.parts)

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """Heads of queries and of keys, where all attention has as many."""
        every = (operator for block, _ in self.count_blocks() for operator in block.operators)
        heads = {(operator.heads, operator.kv_heads) for operator in every if operator.kind == "attention"}
        return heads.pop() if len(heads) == 1 else None

    @property
    def drops_attention(self) -> bool:
        """Whether some attention drops probabilities."""
        return any(
            operator.kind == "attention" and operator.dropout for part in self.parts for operator in part.operators
        )

    @property
    def has_windows(self) -> bool:
        """Whether some attention sees a window of tokens."""
        return any(each.window is not None for part, _ in self.count_blocks() for each in part.operators)

    def count_blocks(self) -> list[tuple[Block, int]]:
        """Return each kind of block once, with how many there are."""
        counts: dict[int, tuple[Block, int]] = {}
        for block in self.blocks:
            counts[id(block)] = (block, counts.get(id(block), (block, 0))[1] + 1)
        return list(counts.values())

    @property
    def num_parameters(self) -> int:
        """Tied ones once."""
        return sum(part.parameters for part in self.parts)


def why_no_pipeline(terms: Iterable[str]) -> str:
    """Why a model whose loss has these auxiliary terms gets no stages: a sentence without its end."""
    return (
        f"its loss has auxiliary terms ({', '.join(terms)}), which need the forwards of all microbatches before the"
        " first backward, and a pipeline interleaves them"
    )
