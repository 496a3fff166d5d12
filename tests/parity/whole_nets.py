"""Small nets with a module that no part of the features can be given: rows of squares compute it whole, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wide_nets import LENGTH, VOCABULARY, WIDTH, Attention, Norm

from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

EXPERTS, TOP = 6, 2


class Experts(nn.Module):
    """Each expert takes the tokens that have chosen it, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            rows, places = torch.where(choices == expert)
            if len(rows):
                inner = self.act_fn(F.linear(tokens[rows], self.up_proj[expert]))
                one = F.linear(inner, self.down_proj[expert]) * weights[rows, places, None]
                made = made.index_add(0, rows, one)
        return made


class Mixture(nn.Module):
    """Router, experts, and one more that all tokens see, which squares split."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, choices = self.gate(tokens).softmax(-1).topk(TOP, -1)
        mixed = self.experts(tokens, choices, weights / weights.sum(-1, keepdim=True))
        return (mixed + self.down(F.gelu(self.up(tokens)))).view(hidden.shape)


class Flipped(nn.Module):
    """Turns features round, which parts cannot; and scales them by a share of all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.drop = kind, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=kind != "norm of a batch")

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return KINDS[self.kind](x if scale == 1.0 else x * scale, self)


Kind = Callable[[Tensor, Any], Any]


def _written(x: Tensor, net: Any) -> Tensor:
    x.mul_(0.5)
    return x.flip(-1)


def _capped(x: Tensor, net: Any) -> Tensor:
    """At most half of the tokens of a batch are taken, the first that come."""
    score = net.inner(x.flip(-1)).flatten(0, 1).sigmoid()
    taken = ((score > 0.5).cumsum(0) <= score.shape[0] // 2) * score
    return taken.view(x.shape)


def _counted(x: Tensor, net: Any) -> Tensor:
    net.seen += 1
    return x.flip(-1) + net.seen


def _remembered(x: Tensor, net: Any) -> Tensor:
    net.seen.mul_(0.9)
    net.seen.add_(net.scale.detach())
    return x.flip(-1) * net.scale


def _heads(x: Tensor, net: Any) -> Tensor:
    """Attention whose heads lie side by side entry by entry."""
    heads = net.inner(x).unflatten(-1, (-1, 2)).permute(0, 3, 1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).permute(0, 2, 3, 1).flatten(2)


def _solved(x: Tensor, of: Tensor) -> Tensor:
    """A triangular system of equations for each first entry, as delta rules have."""
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu()
    matrix = (0.01 * of @ of.transpose(1, 2)).masked_fill(later, 0.0)
    matrix = matrix + torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve_triangular(matrix, x, upper=False)


WHOLE: dict[str, Kind] = {
    "solved": lambda x, net: _solved(x.flip(-1), x) * net.scale,
    "in windows": lambda x, net: F.unfold(x.flip(-1)[:, None], (3, 1), padding=(1, 0)).sum(1).view(x.shape) * net.scale,
    "turned": lambda x, net: net.inner(x.flip(-1)),
    "share of all": lambda x, net: x.softmax(-1) * net.scale + net.table[0],
    "dropped": lambda x, net: net.inner(net.drop(x.roll(1, -1))).tanh(),
    "dropped by a function": lambda x, net: F.dropout(x.roll(1, -1), 0.2, net.training) * net.scale,
    "pair": lambda x, net: (net.inner(x.flip(-1)), x.mean(-1)),
    "convolved": lambda x, net: net.conv(x.transpose(1, 2)).transpose(1, 2),
    "heads": _heads,
    "by a table": lambda x, net: (x @ net.table).tanh(),
    "masked": lambda x, net: x.flip(-1).masked_fill(
        torch.ones(LENGTH, 1, dtype=torch.bool, device=x.device).tril(-2), 0.5
    ),
}
"""What rows may compute whole."""
REFUSED: dict[str, tuple[Kind, str]] = {
    "mean of a batch": (lambda x, net: x.flip(-1) - x.mean(0), "reduces over"),
    "mean of all": (lambda x, net: x.flip(-1) - x.mean(), "reduces over"),
    "softmax of samples": (lambda x, net: x.flip(-1).softmax(0), "runs along"),
    "sorted samples": (lambda x, net: x.flip(-1).sort(0).values, "runs along"),
    "samples in turn": (lambda x, net: x.flip(0).flip(-1), "runs along"),
    "samples multiplied": (lambda x, net: x.flip(-1) + torch.einsum("blh,clh->bch", x, x)[:, :1], "multiplies over"),
    "one sample": (lambda x, net: x.flip(-1) + x[:1], "a piece"),
    "samples and tokens": (lambda x, net: x.flip(-1).transpose(0, 1).reshape(x.shape), "across borders"),
    "equations of samples": (
        lambda x, net: torch.linalg.solve_triangular(
            torch.eye(len(x), dtype=x.dtype, device=x.device), x.flip(-1).transpose(0, 1), upper=False
        ).transpose(0, 1),
        "solves equations of several samples",
    ),
    "windows of samples": (
        lambda x, net: F.unfold(x.flip(-1)[None], (3, 1), padding=(1, 0)).view(len(x), 3, *x.shape[1:]).sum(1),
        "rearranges something else than images of samples",
    ),
    "norm of a batch": (lambda x, net: net.norm(x.flip(-1).transpose(1, 2)).transpose(1, 2), "native_batch_norm"),
    "norm that remembers": (lambda x, net: net.norm(x.flip(-1).transpose(1, 2)).transpose(1, 2), "num_batches_tracked"),
    "capacity": (_capped, "runs along"),
    "counted": (_counted, "mixer.seen"),
    "remembered": (_remembered, "mixer.seen"),
    "written": (_written, "writes into what it was given"),
    "noise": (lambda x, net: x.flip(-1) + torch.randn_like(x), "draws random numbers"),
    "chosen by values": (lambda x, net: x.flip(-1) if float(x.sum()) > 0 else x, ""),
    "of a shape": (lambda x, net: x.flip(-1).reshape(-1)[: x.shape[1] * WIDTH].view(1, -1, WIDTH) + x, "a piece"),
    "picked samples": (lambda x, net: x.flip(-1).gather(0, torch.zeros_like(x, dtype=torch.int64)), "across samples"),
    "in rows that two samples fill": (
        lambda x, net: x.flip(-1).reshape(x.shape[1], len(x), -1).softmax(1).view(x.shape) * net.scale,
        "",
    ),
    "in pairs": (lambda x, net: x.flip(-1).reshape(16, -1).softmax(-1).view(x.shape) * net.scale, ""),
    "named": (lambda x, net: {"made": net.inner(x.flip(-1))}, "returns no tensor"),
    "indexed": (lambda x, net: x.flip(-1)[torch.arange(len(x)).flip(0)], "computes index"),
}


def _kept(x: Tensor, net: Any) -> Tensor:
    net.last = net.inner(x.flip(-1))
    return net.last


ALIASES: dict[str, Kind] = {
    "with what it got": lambda x, net: (net.inner(x.flip(-1)), x[..., 0]),
    "some of it": lambda x, net: x[..., :4],
    "kept": _kept,
    "twice the same": lambda x, net: (made := net.inner(x.flip(-1)), made[..., 0]),
}
"""What shares memory with something else that a model can reach, and on ranks would be a copy."""
KINDS: dict[str, Kind] = {**WHOLE, **ALIASES, **{name: kind for name, (kind, _) in REFUSED.items()}}


def _second_written(net: Any, x: Tensor) -> Tensor:
    first, second = net.mixer(x)
    second.mul_(0.5)
    return first + x


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "": lambda net, x: net.mixer(x),
    "by name": lambda net, x: net.mixer(x=x, scale=0.5),
    "twice": lambda net, x: net.mixer(x) + net.mixer(net.of_mixer(x)),
    "and a layer": lambda net, x: net.mixer(x) + net.more(x),
    "writes the second": _second_written,
    "writes a view": lambda net, x: net.mixer(x).mul_(0.5).sum(-1, keepdim=True) + x,
    "writes what is kept": lambda net, x: net.mixer(x).mul_(0.5) + net.mixer.last,
}


class Own(nn.Linear):
    """Of a project's own code, which may do anything in a backward."""


def _clamped(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(each.clamp(-1e-6, 1e-6) for each in given)


class Net(nn.Module):
    def __init__(self, kind: str, call: str, shared: str) -> None:
        super().__init__()
        self.embed, self.call = nn.Embedding(VOCABULARY, WIDTH), call
        self.norms, self.of_mixer = nn.ModuleList(Norm() for _ in range(3)), Norm()
        self.attention, self.up, self.down = Attention("plain"), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.mixer = Mixture() if kind == "mixture" else Flipped(kind)
        self.more, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if shared == "split":
            self.more.weight = self.mixer.get_submodule("inner").get_parameter("weight")
        if shared == "hooked":
            self.mixer.get_submodule("inner").register_full_backward_hook(_clamped)
        if shared == "own":
            self.mixer.inner = Own(WIDTH, WIDTH)
        if shared == "frozen":
            self.mixer.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + self.attention(self.norms[0](hidden))
        made = CALLS[self.call](self, self.of_mixer(hidden))
        made = made["made"] if isinstance(made, dict) else made
        hidden = hidden + (made[0] * made[1][..., None] if isinstance(made, tuple) else made)
        hidden = hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))
        return self.head(self.norms[2](hidden))


for each in (Net, Mixture, Experts, Flipped):  # a module of one's own is refused before it is looked at
    each.__module__ = "transformers.of_this_test"


def build(kind: str, call: str = "", shared: str = "") -> Blueprint:
    return Blueprint(
        module=Net(kind, call, shared), inputs={"input_ids": "tokens"}, loss=token_loss, initialise=None,
        task="causal_lm", vocabulary_size=VOCABULARY, sequence_length=LENGTH, example=token_example(LENGTH, ["tokens"]),
    )  # fmt: skip


NETS: dict[str, dict[str, str]] = {
    **{name: {"kind": name} for name in ("mixture", *WHOLE)},
    "turned, by name": {"kind": "turned", "call": "by name"},
    "turned, twice": {"kind": "turned", "call": "twice"},
    "turned, and a layer": {"kind": "turned", "call": "and a layer"},
    "turned, frozen": {"kind": "turned", "shared": "frozen"},
}
