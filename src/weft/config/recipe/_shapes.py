"""Sizes of the reference models, without torch, so that a recipe can be read and planned anywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from weft.config.document import Rules
from weft.errors import RecipeError

_RULES = Rules(RecipeError)
_OF_MIXTURES = (
    "top_k", "expert_ffn_size", "shared_experts", "first_dense_layers", "router", "normalise", "balance_loss_weight",
    "z_loss_weight", "balance_rate",
)  # fmt: skip


def divisors_near(number: int, near: int) -> str:
    """Return the divisors of `number` on either side of `near`, as a message says them: `4 or 8`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above)


def _check_heads(shape: DecoderShape | EncoderShape) -> None:
    if shape.hidden_size % shape.num_heads:
        use = divisors_near(shape.hidden_size, shape.num_heads)
        raise _RULES.refuse(shape, "num_heads", f"does not divide hidden_size = {shape.hidden_size}. Use {use}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A Llama-style decoder: RoPE, grouped-query attention, RMSNorm, SwiGLU; with `num_experts`, mixtures of experts in
    place of feed-forward layers.  No expert has a capacity: every token gets the experts that it chose."""

    num_layers: int
    """Blocks."""
    hidden_size: int
    """Features of a token between blocks."""
    num_heads: int
    """Attention heads."""
    num_kv_heads: int | None = None
    """None: as many as `num_heads`."""
    ffn_size: int | None = None
    """None: 8/3 of `hidden_size`, rounded up to a multiple of 64."""
    vocabulary_size: int = 8192
    """Tokens that the model knows; also that of the tokenizer to train."""
    sequence_length: int = 512
    """Tokens per sample."""
    tie_embeddings: bool = True
    """Whether embedding and head share one weight."""
    dropout: float = 0.0
    """Probability to drop an activation in training."""
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    num_experts: int = 0
    """Experts of a mixture, beside shared ones; 0: all feed-forward layers are dense."""
    top_k: int = 2
    """Experts that a token goes through."""
    expert_ffn_size: int | None = None
    """Inner width of one expert; None: as `ffn_size`."""
    shared_experts: int = 0
    """Experts that every token goes through, as one layer of their widths together."""
    first_dense_layers: int = 0
    """Blocks at the beginning whose feed-forward layer is dense."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How scores are made of a router's products: as shares of one, or each by itself."""
    normalise: bool = True
    """Whether the scores of the experts that a token chose are divided by their sum."""
    balance_loss_weight: float = 0.0
    """Weight of the load-balance loss: experts × Σ share of the choices × mean score, summed over mixtures, by the
    whole batch of a step.  1 for each mixture where the load is balanced."""
    z_loss_weight: float = 0.0
    """Weight of the mean square of log Σ exp of a router's products, summed over mixtures, by the whole batch."""
    balance_rate: float = 0.0
    """Balancing without a loss: after each step a bias, by which experts are chosen and nothing else, rises by so much
    where an expert had fewer than its share of the choices of the whole batch, and falls where it had more."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "num_layers", "hidden_size", "num_heads", "num_kv_heads")
        _RULES.at_least(self, 1, "ffn_size", "sequence_length")
        _RULES.at_least(self, 2, "vocabulary_size")
        _RULES.between(self, 0, 1, "dropout")
        _RULES.above_zero(self, "rope_theta", "norm_epsilon")
        _check_heads(self)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            use = divisors_near(self.num_heads, self.num_kv_heads)
            raise _RULES.refuse(self, "num_kv_heads", f"does not divide num_heads = {self.num_heads}. Use {use}.")
        if self.hidden_size // self.num_heads % 2:
            even = [n for n in range(1, self.num_heads) if self.hidden_size % (2 * n) == 0]
            use = f"Use num_heads = {even[-1]}." if even else f"Use hidden_size = {2 * self.hidden_size}."
            width = self.hidden_size // self.num_heads
            reason = f"makes heads of {width} features, and rotary positions turn pairs of them."
            raise _RULES.refuse(self, "num_heads", f"{reason} {use}")
        _check_mixture(self)

    @property
    def auxiliary_losses(self) -> dict[str, float]:
        """Weights of the losses of its mixtures, by name; statistics over the whole batch of a step."""
        weights = {"load_balance": self.balance_loss_weight, "router_z": self.z_loss_weight}
        return {name: weight for name, weight in weights.items() if weight}

    def is_mixture(self, layer: int) -> bool:
        """Whether block `layer`, from 0, has a mixture of experts."""
        return self.num_experts > 0 and layer >= self.first_dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """A BERT-style encoder with a masked-language-model head."""

    num_layers: int
    """Blocks."""
    hidden_size: int
    """Features of a token between blocks."""
    num_heads: int
    """Attention heads."""
    ffn_size: int | None = None
    """None: 4 times `hidden_size`."""
    vocabulary_size: int = 8192
    """Tokens that the model knows; also that of the tokenizer to train."""
    sequence_length: int = 128
    """Tokens per sample."""
    tie_embeddings: bool = True
    """Whether embedding and head share one weight."""
    dropout: float = 0.1
    """Probability to drop an activation in training."""
    norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "num_layers", "hidden_size", "num_heads", "ffn_size", "sequence_length")
        _RULES.at_least(self, 2, "vocabulary_size")
        _RULES.between(self, 0, 1, "dropout")
        _RULES.above_zero(self, "norm_epsilon")
        _check_heads(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """Residual blocks of two linear layers over a flat input."""

    num_layers: int
    """Blocks."""
    input_size: int
    """Values of a sample."""
    hidden_size: int
    """Features between blocks."""
    num_classes: int
    """Outputs."""
    ffn_size: int | None = None
    """None: 4 times `hidden_size`."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "num_layers", "input_size", "hidden_size", "num_classes", "ffn_size")
        _RULES.between(self, 0, 1, "dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNetShape:
    """A small residual convolutional classifier."""

    num_layers: int
    """Residual blocks."""
    channels: int
    """Channels of every block."""
    num_classes: int = 10
    """Outputs."""
    image_size: int = 8
    """Height and width."""
    image_channels: int = 1
    """1 for grey, 3 for colour."""
    norm: Literal["batch", "group"] = "batch"
    """`batch`: statistics of the whole batch, over all data ranks; `group`: of one image alone."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "num_layers", "channels", "num_classes", "image_size", "image_channels")


ReferenceShape = DecoderShape | EncoderShape | MlpShape | ConvNetShape


def _check_mixture(shape: DecoderShape) -> None:
    """Raise RecipeError unless what it says of experts makes mixtures, or nothing is said of them."""
    if not shape.num_experts:
        for field in fields(shape):
            if field.name in _OF_MIXTURES and getattr(shape, field.name) != field.default:
                raise _RULES.refuse(shape, field.name, "means nothing without num_experts. Give it, or remove this.")
    _RULES.at_least(shape, 0, "num_experts", "shared_experts", "first_dense_layers")
    _RULES.at_least(shape, 0, "balance_loss_weight", "z_loss_weight", "balance_rate")
    _RULES.at_least(shape, 1, "top_k", "expert_ffn_size")
    if shape.num_experts and shape.top_k > shape.num_experts:
        raise _RULES.refuse(shape, "top_k", f"is more than num_experts = {shape.num_experts}. Use that or less.")
    if shape.num_experts and shape.first_dense_layers >= shape.num_layers:
        most = shape.num_layers - 1
        raise _RULES.refuse(shape, "first_dense_layers", f"leaves no block for a mixture. Use {most} or less.")
