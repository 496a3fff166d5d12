"""The numbers that describe a transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config.document import Rules
from weft.errors import RecipeError

_RULES = Rules(RecipeError)

Activation = Literal["swiglu", "geglu", "gelu", "relu", "squared_relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A transformer in numbers.  Decoders, encoders and vision transformers, dense or of experts, differ in these only.

    Raises:
        RecipeError: sizes that make no model.
    """

    name: str = "transformer"
    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    """Tokens per sample; of a vision transformer, patches and the class token."""
    vocabulary_size: int = 0
    """0: no embedding table and no vocabulary head."""

    num_kv_heads: int | None = None
    """None: as many as `num_heads`."""
    head_size: int | None = None
    """Features of a query and key head; None: `hidden_size / num_heads`."""
    value_head_size: int | None = None
    """None: as `head_size`."""
    query_rank: int = 0
    """Multi-head latent attention: width to which queries are compressed first; 0: they are not."""
    kv_rank: int = 0
    """Multi-head latent attention: width of the joint compression of keys and values; 0: ordinary attention."""
    rope_head_size: int = 0
    """Multi-head latent attention: features of `head_size` that carry the position, one shared key head of them."""
    causal: bool = True
    window: int | None = None
    """Keys that a query sees in windowed layers."""
    full_attention_every: int = 0
    """The last of every so many layers sees everything in spite of `window`; 0: none does."""
    rotary: bool = True
    rotary_base: float = 10_000.0
    """Base of the frequencies of rotary positions.  No price knows it; what is emitted for other systems does."""
    rotary_fraction: float = 1.0
    """Share of a head's features that rotary positions turn."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norms of queries and keys: one weight per feature of a head, or one per feature of all heads."""
    attention_sinks: bool = False
    """One learned score per head beside the keys'."""
    qkv_bias: bool = False
    output_bias: bool = False

    ffn_size: int = 0
    """Inner width of dense feed-forward layers; 0 where all layers are mixtures."""
    activation: Activation = "swiglu"
    ffn_bias: bool = False
    num_experts: int = 0
    """Routed experts per mixture layer; 0: none."""
    top_k: int = 1
    """Experts that a token visits."""
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    """Inner width of all shared experts together; 0: none."""
    shared_gate: bool = False
    """Whether a learned gate weighs the shared experts."""
    leading_dense_layers: int = 0
    expert_every: int = 1
    """The last of every so many layers after the leading dense ones is a mixture."""
    router_bias: bool = False

    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool | None = None
    """None: where `norm` is `layer`."""
    norm_epsilon: float = 1e-5
    norm_placement: Literal["before", "after", "both", "parallel", "parallel_two"] = "before"
    """Places of norms: before attention and feed-forward; after their residual sums (BERT); on both their sides (Gemma
    2); one norm before both side by side (GPT-J, Falcon), or two (GPT-NeoX)."""
    dropout: float = 0.0
    attention_dropout: float = 0.0

    tied: bool = False
    """Whether embedding and head share their weight."""
    learned_positions: int = 0
    """Rows of a table of positions; 0: none."""
    token_types: int = 0
    """Rows of a table of segments."""
    stem_norm: bool = False
    """A norm right after the embedding (BERT, BLOOM)."""
    patch_values: int = 0
    """Vision transformers: values of one patch, which a matrix turns into a token; 0: tokens come from a table."""
    class_token: bool = False
    head: Literal["vocabulary", "masked", "classes", "none"] = "vocabulary"
    """The head's work: over the vocabulary; the same behind a dense layer and a norm (BERT); over classes, once per
    sample."""
    num_classes: int = 0
    head_bias: bool = False

    def __post_init__(self) -> None:
        _RULES.at_least(self, 1, "num_layers", "hidden_size", "num_heads", "sequence_length", "num_kv_heads")
        _RULES.at_least(self, 1, "head_size", "value_head_size", "top_k", "expert_every")
        _RULES.between(self, 0, 1, "dropout", "attention_dropout")
        _RULES.between(self, 0, 1, "rotary_fraction", below=False)
        _RULES.above_zero(self, "rotary_base", "norm_epsilon")
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise _RULES.refuse(self, "num_heads", f"does not divide hidden_size = {self.hidden_size}. Give head_size.")
        if self.num_heads % self.kv_heads:
            raise _RULES.refuse(self, "num_kv_heads", f"does not divide num_heads = {self.num_heads}.")
        if self.num_experts and not self.expert_ffn_size:
            raise _RULES.refuse(self, "expert_ffn_size", f"is missing: there are {self.num_experts} experts.")
        if self.top_k > max(1, self.num_experts):
            raise _RULES.refuse(self, "top_k", f"is more than num_experts = {self.num_experts}.")
        if not self.ffn_size and not all(self.is_mixture(layer) for layer in range(self.num_layers)):
            raise _RULES.refuse(self, "ffn_size", "is missing: some layers are dense.")
        if self.head in ("vocabulary", "masked") and not self.vocabulary_size:
            raise _RULES.refuse(self, "vocabulary_size", f'is missing: head = "{self.head}" needs it.')
        if self.head == "classes" and not self.num_classes:
            raise _RULES.refuse(self, "num_classes", 'is missing: head = "classes" needs it.')

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def query_size(self) -> int:
        """Features of one query or key head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def value_size(self) -> int:
        """Features of one value head."""
        return self.value_head_size or self.query_size

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has two matrices going in."""
        return self.activation in ("swiglu", "geglu")

    @property
    def norm_width(self) -> int:
        """Weights of a norm per feature."""
        biased = self.norm == "layer" if self.norm_bias is None else self.norm_bias
        return 2 if biased else 1

    def is_mixture(self, layer: int) -> bool:
        behind = layer - self.leading_dense_layers
        return bool(self.num_experts) and behind >= 0 and behind % self.expert_every == self.expert_every - 1

    def window_of(self, layer: int) -> int | None:
        """Keys that a query of this layer sees; None: all."""
        every = self.full_attention_every
        return None if every and layer % every == every - 1 else self.window
