"""Models and batches of the tests of this room, by name, so that ranks can build them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.recipe import DecoderShape, EncoderShape
from weft.model.blueprint import Batch, Blueprint
from weft.model.families import CutTable, Localise, SplitRule
from weft.model.losses import token_loss
from weft.model.reference.decoder import build_decoder
from weft.model.reference.encoder import build_encoder

VOCABULARY = 48


def token_batches(length: int, sizes: Sequence[int] = (2, 1), ignored: float = 0.2) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    batches: list[Batch] = []
    for index, size in enumerate(sizes):
        tokens = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
        ids = torch.arange(size) + 10 * index + 3
        batches.append({"tokens": tokens[:, :-1], "labels": labels, "sample_ids": ids})
    return batches


def decoder(length: int = 9, dropout: float = 0.0, tied: bool = True) -> tuple[Blueprint, list[Batch]]:
    shape = DecoderShape(
        num_layers=2,
        hidden_size=32,
        num_heads=8,
        num_kv_heads=4,
        ffn_size=48,
        vocabulary_size=VOCABULARY,
        sequence_length=length,
        tie_embeddings=tied,
        dropout=dropout,
    )
    return build_decoder(shape), token_batches(length)


def encoder(length: int = 7, dropout: float = 0.1) -> tuple[Blueprint, list[Batch]]:
    shape = EncoderShape(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        ffn_size=64,
        vocabulary_size=VOCABULARY,
        sequence_length=length,
        dropout=dropout,
    )
    return build_encoder(shape), token_batches(length, ignored=0.8)


class Conv1D(nn.Module):
    """As Hugging Face writes it: the weight lies (in, out), the width is an attribute."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class FusedBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = heads
        self.split_size = hidden
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = Conv1D(3 * hidden, hidden), Conv1D(hidden, hidden)
        self.query_norm = nn.RMSNorm(hidden // heads, eps=1e-6)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.gate = nn.Linear(hidden, hidden)  # replicated on purpose
        self.fc, self.act_dropout, self.proj = nn.Linear(hidden, 96), nn.Dropout(dropout), nn.Linear(96, hidden)
        with torch.no_grad():
            self.query_norm.weight.copy_(torch.rand(hidden // heads) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(hidden)).split(self.split_size, -1)
        )
        scores = self.query_norm(query) @ key.transpose(-1, -2) / 3
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = self.attn_dropout(scores.masked_fill(causal, -torch.inf).softmax(-1)) @ value
        hidden = hidden + self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))
        inner = self.gate(self.ln_2(hidden)).sigmoid()
        return hidden + self.proj(self.act_dropout(F.gelu(self.fc(input=inner))))


class FusedModel(nn.Module):
    """Fused Conv1D query-key-value, biases everywhere, learned positions, a padding row, a tied head with a bias."""

    def __init__(self, length: int, dropout: float, layers: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, hidden, padding_idx=30)
        self.wpe = nn.Embedding(length, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(FusedBlock(hidden, 4, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.wte(tokens)
        hidden = self.drop(embedded + self.wpe(torch.arange(embedded.shape[1])))
        for block in self.h:
            hidden = block(hidden)
        return self.head(self.ln_f(hidden))


FUSED_RULES = (
    SplitRule(match="wte", kind="vocab"),
    SplitRule(match="h.*.c_attn", kind="column", blocks=3),
    SplitRule(match="h.*.c_proj", kind="row"),
    SplitRule(match="h.*.query_norm", kind="heads"),
    SplitRule(match="h.*.attn_dropout", kind="heads"),
    SplitRule(match="h.*.act_dropout", kind="features"),
    SplitRule(match="h.*.gate", kind="replicate"),
    SplitRule(match="h.*.fc", kind="column"),
    SplitRule(match="h.*.proj", kind="row"),
    SplitRule(match="h.*.ln_?", kind="sequence"),
    SplitRule(match="h.*.resid_dropout", kind="sequence"),
    SplitRule(match="ln_f", kind="sequence"),
    SplitRule(match="head", kind="column"),
)


def fused(
    length: int = 5, dropout: float = 0.0, rules: Sequence[SplitRule] = FUSED_RULES
) -> tuple[Blueprint, list[Batch]]:
    """A really constructed model: its data are sliced."""
    torch.manual_seed(11)
    blueprint = Blueprint(
        module=FusedModel(length, dropout),
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=None,
        split=rules,
        localise=(Localise(match="h.*", attribute="num_heads"), Localise(match="h.*", attribute="split_size")),
        divisible={"num_heads": 4, "vocabulary_size": VOCABULARY},
        cut=CutTable(
            entry="wte", stem_zero=("wpe",), stem_skip=("drop",), blocks=("h.0", "h.1"), tail=("ln_f", "head")
        ),
        vocabulary_head="head",
        task="causal_lm",
        sequence_length=length,
    )
    return blueprint, token_batches(length)
