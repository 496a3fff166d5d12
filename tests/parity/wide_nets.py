"""Small nets that do with features what parts of them do not allow, or only by rules that are easily got wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

VOCABULARY, LENGTH, WIDTH, HEADS = 48, 6, 16, 4


class Norm(nn.Module):
    """A root-mean-square norm of a class of its own, around one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * WIDTH**0.5


class Padded(nn.Embedding):
    """Row 3 has no gradient, which only the call says."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, padding_idx=3) * 4


class Limited(nn.Linear):
    """Far numbers count as near ones: random ones may be none of them."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.clamp(-8, 8), self.weight, self.bias)


class Narrow(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.bfloat16().to(input.dtype), self.weight, self.bias)


class LimitedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-8, 8))


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_heads, self.kind = HEADS, kind
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.of_query, self.of_key = nn.Linear(WIDTH, WIDTH), Norm(), Norm()
        self.drop, self.slopes = nn.Dropout(0.1), nn.Parameter(torch.randn(HEADS, 1, 1) / 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.kind == "normed":
            query, key = self.of_query(query), self.of_key(key)
        query, key, value = (
            each.view(batch, length, self.num_heads, -1).transpose(1, 2) for each in (query, key, value)
        )
        if self.kind == "plain":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            places = torch.arange(length, device=x.device)
            scores = query @ key.transpose(2, 3) / 4
            scores = scores - self.slopes * (places[:, None] - places).abs()
            scores = scores.masked_fill(places[:, None] < places, -1e9).softmax(-1)
            scores = F.dropout(scores, 0.1, self.training) if self.kind == "dropping" else self.drop(scores)
            mixed = scores @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


Between = Callable[[Tensor, Any], Tensor]


def _gated(up: Tensor, net: Any) -> Tensor:
    gate = net.gate(up.mean(1, keepdim=True)).softmax(-1)
    return up * gate[..., :1] + up.flip(-1) * gate[..., 1:2]


INSIDE: dict[str, Between] = {
    "nothing": lambda up, net: up,
    "shuffled": lambda up, net: up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "softmax": lambda up, net: up.softmax(-1),
    "sorted": lambda up, net: up.sort(-1).values,
    "normed": lambda up, net: net.inner(up),
    "normed and rolled": lambda up, net: net.inner(up).roll(1, -1) * up,
    "dropped and rolled": lambda up, net: net.inside(up.roll(1, -1)),
    "dropped by a function": lambda up, net: F.dropout(up, 0.2, net.training) + up,
    "dropped by a function and rolled": lambda up, net: F.dropout(up.roll(1, -1), 0.2, net.training),
    "gated": _gated,
    "cut": lambda up, net: torch.cat([up[..., :5] * 2, up[..., 5:].tanh()], -1),
    "a vector": lambda up, net: up * net.vector + net.table[1],
    "a vector of what is whole": lambda up, net: up.flip(-1) * net.vector,
    "written into": lambda up, net: torch.zeros_like(up).add_(up.flip(-1)),
}
OUTSIDE: dict[str, Between] = {
    "vector": lambda hidden, net: hidden * net.scale + net.table[0, :WIDTH],
    "scalar": lambda hidden, net: hidden * net.one.tanh(),
    "dropped": lambda hidden, net: F.dropout(hidden, 0.1, net.training),
    "router": lambda hidden, net: hidden * net.gate_of(net.router(hidden).softmax(-1).amax(-1, keepdim=True)),
    "weighed": lambda hidden, net: hidden + net.router(hidden).relu().sum(-1, keepdim=True) * net.scale,
    "position": lambda hidden, net: hidden + torch.sin(torch.arange(WIDTH) * 1.0),
}


class Net(nn.Module):
    def __init__(self, attention: str, inside: str, outside: str, head: str) -> None:
        super().__init__()
        self.embed = Scaled(VOCABULARY, WIDTH) if head == "scaled" else nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(Norm() for _ in range(3))
        self.attention, self.up, self.down = Attention(attention), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.inner, self.inside, self.gate = Norm(32), nn.Dropout(0.2), nn.Linear(32, 2)
        self.router, self.vector = nn.Linear(WIDTH, 6), nn.Parameter(torch.randn(32))
        self.scale, self.one = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(1))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("table", torch.arange(96.0).view(3, 32) / 96)
        if head == "scaled":
            self.head.weight = self.embed.weight
        self.of_up, self.of_hidden, self.of_head = inside, outside, head

    def gate_of(self, x: Tensor) -> Tensor:
        return 1 + x

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + self.attention(self.norms[0](hidden))
        hidden = OUTSIDE[self.of_hidden](hidden, self) if self.of_hidden else hidden
        up = INSIDE[self.of_up](F.gelu(self.up(self.norms[1](hidden))), self)
        hidden = hidden + self.drop(self.down(up))
        logits = self.head(self.norms[2](hidden))
        return (logits / 3).tanh() * 3 if self.of_head else logits


for each in (Norm, Scaled, Padded, Limited, Narrow, LimitedNorm, Attention, Net):
    # A module of one's own is refused before it is looked at.
    each.__module__ = "transformers.of_this_test"


def build(attention: str = "plain", inside: str = "nothing", outside: str = "", head: str = "") -> Blueprint:
    return Blueprint(
        module=Net(attention, inside, outside, head), inputs={"input_ids": "tokens"}, loss=token_loss, initialise=None,
        task="causal_lm", vocabulary_size=VOCABULARY, sequence_length=LENGTH, example=token_example(LENGTH, ["tokens"]),
    )  # fmt: skip


NETS: dict[str, dict[str, str]] = {
    **{f"inside {name}": {"inside": name} for name in INSIDE if name != "normed and rolled"},
    **{f"outside {name}": {"outside": name} for name in OUTSIDE if name != "position"},
    **{f"attention {name}": {"attention": name} for name in ("normed", "eager", "dropping")},
    "scaled": {"head": "scaled"},
    "capped": {"head": "capped", "inside": "shuffled", "attention": "eager"},
}
