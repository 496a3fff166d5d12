"""A Llama-style decoder, written as on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.plan import default_ffn_size
from weft.config.recipe import DecoderShape
from weft.model._initialise import normal_initialiser
from weft.model.blueprint import Blueprint
from weft.model.description import description_of_shape
from weft.model.examples import token_example
from weft.model.families import CutTable, SplitRule
from weft.model.losses import token_loss


def rotary_tables(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that turn queries and keys, shaped like `positions` plus (head_size,).

    Angles are taken in fp32 whatever `dtype` is, as everybody does: a model must not change with its precision.
    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864 (halves instead of interleaved pairs).
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (batch, heads, length, head_size) by tables of (length, head_size) or (batch, 1, length, head_size)."""
    # The pairs that turn together are (i, i + head_size / 2), as in Llama (Su et al. 2021 turn neighbours).
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def document_mask(document_ids: Tensor) -> Tensor:
    """Return (batch, 1, length, length): whether a position sees another, of the same document and not later."""
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]


class Attention(nn.Module):
    """Grouped-query attention.  The number of heads is read off the projections: a rank's share also runs."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        kv_size = self.head_size * (shape.num_kv_heads or shape.num_heads)
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.key = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (self._heads(linear(hidden)) for linear in (self.query, self.key, self.value))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        grouped = query.shape[1] != key.shape[1]
        # (batch, heads, length, head_size)³ → the same; a key head serves heads / kv_heads query heads.
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_size).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward.  Source: Shazeer 2020, https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class DecoderBlock(nn.Module):
    """Attention, and a feed-forward layer `ffn` or a `mixture` of them."""

    def __init__(self, shape: DecoderShape, mixture: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.attention = Attention(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        if mixture is None:
            self.ffn = SwiGLU(shape.hidden_size, default_ffn_size(shape))
        else:
            self.mixture = mixture
        self.ffn_dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), cos, sin, mask)
        hidden = hidden + self.attention_dropout(attended)
        feed = self.ffn if hasattr(self, "ffn") else self.mixture
        return hidden + self.ffn_dropout(feed(self.ffn_norm(hidden)))


class Decoder(nn.Module):
    """Tokens (batch, length) → logits (batch, length, vocabulary); position t predicts what follows token t."""

    def __init__(self, shape: DecoderShape, mixture_of: Callable[[DecoderShape], nn.Module] | None = None) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        self.rope_theta = shape.rope_theta
        self.sequence_length = shape.sequence_length
        self.embedding = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.embedding_dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(
            DecoderBlock(shape, mixture_of(shape) if mixture_of is not None and shape.is_mixture(layer) else None)
            for layer in range(shape.num_layers)
        )
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.head = nn.Linear(shape.hidden_size, shape.vocabulary_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Positions and document ids are (batch, length); without them a sample is one document from position 0."""
        hidden = self.embedding_dropout(self.embedding(tokens))
        # From the tokens' length, not the activation's: under sequence parallelism this may be a shard.
        where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions[:, None]
        cos, sin = rotary_tables(where, self.head_size, self.rope_theta, hidden.dtype)
        mask = None if document_ids is None else document_mask(document_ids)
        for block in self.blocks:
            hidden = block(hidden, cos, sin, mask)
        return self.head(self.norm(hidden))


def build_decoder(
    shape: DecoderShape, *, isolated_documents: bool = False, construct: Callable[[DecoderShape], Decoder] = Decoder
) -> Blueprint:
    """Return the decoder on the meta device with its tables.

    `isolated_documents` says that batches carry `positions` and `document_ids`, which attention then obeys.
    `construct` makes another kind of it (`weft.model.reference.mixture_decoder`).
    """
    with torch.device("meta"):
        module = construct(shape)
    inputs = {"tokens": "tokens"}
    if isolated_documents:
        inputs |= {"positions": "positions", "document_ids": "document_ids"}
    return Blueprint(
        module=module,
        inputs=inputs,
        position_input="positions",
        attention="causal",
        loss=token_loss,
        initialise=normal_initialiser(
            residual_outputs=("blocks.*.attention.output", "blocks.*.ffn.down", "blocks.*.shared.down"),
            num_layers=shape.num_layers,
        ),
        split=_SPLIT,
        cut=CutTable(
            entry="embedding",
            stem_skip=("embedding_dropout",),
            blocks=tuple(f"blocks.{index}" for index in range(shape.num_layers)),
            tail=("norm", "head"),
        ),
        vocabulary_head="head",
        task="causal_lm",
        vocabulary_size=shape.vocabulary_size,
        example=token_example(shape.sequence_length, inputs.values()),
        export=_export(shape),
        export_config=_export_config(shape),
        sequence_length=shape.sequence_length,
    ).described_by(description_of_shape(shape))


_SPLIT = (
    SplitRule(match="embedding", kind="vocab"),
    *(SplitRule(match=f"blocks.*.attention.{name}", kind="column") for name in ("query", "key", "value")),
    SplitRule(match="blocks.*.attention.output", kind="row"),
    SplitRule(match="blocks.*.ffn.gate", kind="column"),
    SplitRule(match="blocks.*.ffn.up", kind="column"),
    SplitRule(match="blocks.*.ffn.down", kind="row"),
    SplitRule(match="blocks.*_norm", kind="sequence"),
    SplitRule(match="blocks.*_dropout", kind="sequence"),
    SplitRule(match="norm", kind="sequence"),
    SplitRule(match="head", kind="column"),
)


EXPORTED = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def _export(shape: DecoderShape):
    def export(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            owner, _, leaf = name.rpartition(".")
            if owner == "head" and shape.tie_embeddings:
                continue  # loaded from the embedding
            if owner.startswith("blocks."):
                _, index, inner = owner.split(".", 2)
                exported[f"model.layers.{index}.{EXPORTED[inner]}.{leaf}"] = tensor
            else:
                exported[f"{EXPORTED[owner]}.{leaf}"] = tensor
        return exported

    return export


def _export_config(shape: DecoderShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": default_ffn_size(shape),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads or shape.num_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.sequence_length,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
