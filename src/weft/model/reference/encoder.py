"""A BERT-style encoder with a masked-language-model head, written as on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.plan import default_ffn_size
from weft.config.recipe import EncoderShape
from weft.model._initialise import normal_initialiser
from weft.model.attention.call import MaskPattern, attend
from weft.model.blueprint import Blueprint
from weft.model.description import description_of_shape
from weft.model.examples import token_example
from weft.model.families import CutTable, SplitRule
from weft.model.losses import token_loss


class EncoderAttention(nn.Module):
    """Attention in both directions, with dropout on its probabilities."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_heads
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.key = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.value = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)
        self.dropout_probability = shape.dropout
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (self._heads(linear(hidden)) for linear in (self.query, self.key, self.value))
        if self.training and self.dropout_probability > 0:
            mixed = attend(query, key, value, MaskPattern(), mask=mask, dropout=self.dropout)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_size)
        self.down = nn.Linear(ffn_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class EncoderBlock(nn.Module):
    """Norms stand after the residual sums, as in the original."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.attention = EncoderAttention(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.attention_norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.ffn = FeedForward(shape.hidden_size, default_ffn_size(shape))
        self.ffn_dropout = nn.Dropout(shape.dropout)
        self.ffn_norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_epsilon)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.attention_norm(hidden + self.attention_dropout(self.attention(hidden, mask)))
        return self.ffn_norm(hidden + self.ffn_dropout(self.ffn(hidden)))


class PredictionTransform(nn.Module):
    """The dense layer, activation and norm between the last block and the vocabulary."""

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden)))


class Encoder(nn.Module):
    """Tokens (batch, length) → logits (batch, length, vocabulary).

    Source: Devlin et al. 2019, https://arxiv.org/abs/1810.04805, without segments.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.position_embedding = nn.Embedding(shape.sequence_length, shape.hidden_size)
        self.embedding_norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.embedding_dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(shape) for _ in range(shape.num_layers))
        self.transform = PredictionTransform(shape.hidden_size, shape.norm_epsilon)
        self.head = nn.Linear(shape.hidden_size, shape.vocabulary_size)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """`attention_mask` is (batch, length), non-zero where a token may be seen; None: everywhere.  `positions` are
        (batch, length); None: 0, 1, …"""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.position_embedding(positions)
        hidden = self.embedding_dropout(self.embedding_norm(hidden))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.transform(hidden))


def build_encoder(shape: EncoderShape) -> Blueprint:
    """Return the encoder on the meta device with its tables."""
    with torch.device("meta"):
        module = Encoder(shape)
    return Blueprint(
        module=module,
        inputs={"tokens": "tokens"},
        position_input="positions",
        attention="full",
        loss=token_loss,
        initialise=normal_initialiser(residual_outputs=(), num_layers=shape.num_layers),
        split=_SPLIT,
        cut=CutTable(
            entry="embedding",
            stem_zero=("position_embedding",),
            stem_skip=("embedding_norm", "embedding_dropout"),
            blocks=tuple(f"blocks.{index}" for index in range(shape.num_layers)),
            tail=("transform", "head"),
        ),
        vocabulary_head="head",
        task="masked_lm",
        vocabulary_size=shape.vocabulary_size,
        example=token_example(shape.sequence_length),
        export=_export(shape),
        export_config=_export_config(shape),
        sequence_length=shape.sequence_length,
    ).described_by(description_of_shape(shape))


_SPLIT = (
    SplitRule(match="embedding", kind="vocab"),
    *(SplitRule(match=f"blocks.*.attention.{name}", kind="column") for name in ("query", "key", "value")),
    SplitRule(match="blocks.*.attention.dropout", kind="heads"),
    SplitRule(match="blocks.*.attention.output", kind="row"),
    SplitRule(match="blocks.*.ffn.up", kind="column"),
    SplitRule(match="blocks.*.ffn.down", kind="row"),
    SplitRule(match="blocks.*_norm", kind="sequence"),
    SplitRule(match="blocks.*_dropout", kind="sequence"),
    SplitRule(match="head", kind="column"),
)


_EXPORTED = {
    "embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "transform.dense": "cls.predictions.transform.dense",
    "transform.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions.decoder",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}


def _export(shape: EncoderShape):
    def export(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            owner, _, leaf = name.rpartition(".")
            if name == "head.weight" and shape.tie_embeddings:
                continue  # loaded from the embedding
            if owner.startswith("blocks."):
                _, index, inner = owner.split(".", 2)
                exported[f"bert.encoder.layer.{index}.{_EXPORTED[inner]}.{leaf}"] = tensor
            else:
                exported[f"{_EXPORTED[owner]}.{leaf}"] = tensor
            if name == "head.bias":
                exported["cls.predictions.bias"] = tensor.clone()
            if name == "position_embedding.weight":  # one segment that adds nothing
                exported["bert.embeddings.token_type_embeddings.weight"] = tensor.new_zeros(1, tensor.shape[1])
        return exported

    return export


def _export_config(shape: EncoderShape) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": default_ffn_size(shape),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "hidden_act": "gelu",
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.dropout,
        "max_position_embeddings": shape.sequence_length,
        "type_vocab_size": 1,
        "layer_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tie_embeddings,
        "pad_token_id": None,
    }
