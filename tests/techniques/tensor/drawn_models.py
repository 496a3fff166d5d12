"""Small language models drawn by a seed, with attention as people write it: what a split has to find by looking."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

LENGTH, VOCABULARY, HEADS, HEAD_SIZE = 6, 48, 4, 6
WIDTH = HEADS * HEAD_SIZE


@dataclass(frozen=True)
class Form:
    """How a model is written."""

    fused: str
    """`apart`, `blocks` (all queries, all keys, all values) or `heads` (each head's query, key and value)."""
    counts: str
    """Where the number of heads stands: `module`, `config` (shared by all modules) or `inferred`."""
    norm: str
    """Of queries: `none`, `head` or `all` (over all heads together)."""
    per_head: str
    """A parameter with an entry for each head: `none`, `sink`, `bias` (from a table, by distance)."""
    shared_scale: bool
    """A parameter of the attention module itself that is the same for all heads."""
    grouped: bool
    """Half as many keys and values."""
    head: str
    """`plain`, `capped` (the logits are computed with further), `tied` or `tied to a scaled embedding`."""


CHOICES: dict[str, tuple[Any, ...]] = {
    "fused": ("apart", "blocks", "heads"),
    "counts": ("module", "config", "inferred"),
    "norm": ("none", "head", "all"),
    "per_head": ("none", "sink", "bias"),
    "shared_scale": (False, True),
    "grouped": (False, True),
    "head": ("plain", "capped", "tied", "tied to a scaled embedding"),
}


def drawn_form(seed: int) -> Form:
    draw = random.Random(seed)
    chosen: dict[str, Any] = {field.name: draw.choice(CHOICES[field.name]) for field in fields(Form)}
    form = Form(**chosen)
    return form if form.fused == "apart" else replace(form, grouped=False)


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Config(SimpleNamespace):
    """Settings that all modules share."""


class Attention(nn.Module):
    def __init__(self, form: Form, config: Config) -> None:
        super().__init__()
        self.form, self.config = form, config
        keys = config.num_key_heads * HEAD_SIZE
        if form.fused == "apart":
            self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        if form.counts == "module":
            self.num_heads, self.num_key_heads = HEADS, config.num_key_heads
        if form.norm == "all":
            self.q_norm = nn.RMSNorm(WIDTH)
        elif form.norm == "head":
            self.q_norm = nn.LayerNorm(HEAD_SIZE)
        if form.per_head == "sink":
            self.sinks = nn.Parameter(torch.randn(HEADS))
        elif form.per_head == "bias":
            self.distances = nn.Embedding(LENGTH, HEADS)
        if form.shared_scale:
            self.scale = nn.Parameter(torch.full((HEAD_SIZE,), 1.5))

    def heads(self, x: Tensor, count: str) -> Tensor:
        where = {"module": self, "config": self.config}.get(self.form.counts)
        number = -1 if where is None else getattr(where, count)
        return x.view(*x.shape[:2], number, HEAD_SIZE).transpose(1, 2)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.form.fused == "apart":
            return self.q(x), self.k(x), self.v(x)
        if self.form.fused == "blocks":
            q, k, v = self.qkv(x).chunk(3, -1)
            return q, k, v
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * HEAD_SIZE)).chunk(3, -1)
        return q.flatten(2), k.flatten(2), v.flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        if self.form.norm == "all":
            q = self.q_norm(q)
        q, k, v = self.heads(q, "num_heads"), self.heads(k, "num_key_heads"), self.heads(v, "num_key_heads")
        if self.form.norm == "head":
            q = self.q_norm(q)
        if self.form.shared_scale:
            q = q * self.scale
        if self.form.grouped:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5
        if self.form.per_head == "bias":
            positions = torch.arange(x.shape[1], device=x.device)
            scores = scores + self.distances((positions[:, None] - positions).abs()).permute(2, 0, 1)
        if self.form.per_head == "sink":
            sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, form: Form, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(form, config)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Drawn(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        config = Config(num_heads=HEADS, num_key_heads=HEADS // 2 if form.grouped else HEADS)
        scaled = form.head == "tied to a scaled embedding"
        self.form = form
        self.tokens = (ScaledEmbedding if scaled else nn.Embedding)(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(form, config) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=form.head == "plain")
        if form.head.startswith("tied"):
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return torch.tanh(logits / 5) * 5 if self.form.head == "capped" else logits


def drawn_model(seed: int) -> Blueprint:
    """The model of a seed, whose weights no plan may change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Drawn(drawn_form(seed))
    return Blueprint(
        module=module,
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=None,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        example=token_example(LENGTH, ["tokens"]),
    )
