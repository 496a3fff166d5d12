"""A mixture of experts, written as on one device: a router, experts in two stacked parameters, and a shared expert.

Tokens are permuted once, so that the rows of an expert lie together; experts compute on runs of rows; what they give
goes back to its tokens, where the copies of one are summed in the order of its choices.  Nothing depends on the order
of the tokens or on who else is there: no expert has a capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model._grouped import grouped_product, runs_of

Scoring = Literal["softmax", "sigmoid"]
_TINY = 1e-20
"""Keeps sigmoid scores that are all zero from being divided by their sum."""


class Routing(NamedTuple):
    """A router's decision about n tokens."""

    logits: Tensor
    """(n, experts), in fp32 or wider."""
    weights: Tensor
    """(n, top_k): what each choice counts, in the dtype of the tokens; differentiable."""
    chosen: Tensor
    """(n, top_k), int64: experts by falling score."""


class Router(nn.Module):
    """Scores of all experts for each token, and the `top_k` best of them.  Computes in fp32 or wider.

    With `biased` a buffer is added to the scores by which experts are chosen, and to nothing else: it has no gradient,
    and whoever balances the load sets it.
    Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961; sigmoid scores and the bias: DeepSeek-AI 2024,
    https://arxiv.org/abs/2412.19437, eq. 12 to 16.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Scoring = "softmax",
        normalise: bool = True,
        biased: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.top_k, self.scoring, self.normalise = top_k, scoring, normalise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(num_experts) if biased else None)
        self._std = std

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, tokens: Tensor) -> Routing:
        """Return the choices of tokens (n, hidden)."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        logits = F.linear(tokens.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        # The bias decides who is chosen and not what the choice counts (DeepSeek-V3, eq. 16).
        by = scores.detach() if self.bias is None else scores.detach() + self.bias
        chosen = by.topk(self.top_k, -1).indices
        # (n, experts) → (n, top_k), with a gradient to the scores of the chosen ones.
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return Routing(logits, weights.to(tokens.dtype), chosen)


class Experts(nn.Module):
    """Gated feed-forwards (SwiGLU), stacked.  Their number is read off the parameters: a rank's share also runs.

    `gate_up` is (experts, 2 · ffn, hidden), gates before what they gate; `down` is (experts, hidden, ffn).
    """

    def __init__(
        self, num_experts: int, hidden_size: int, ffn_size: int, *, std: float = 0.02, output_std: float | None = None
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))
        self._stds = (std, std if output_std is None else output_std)

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up, std=self._stds[0])
        nn.init.normal_(self.down, std=self._stds[1])

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what experts make of their rows.

        Args:
            rows: (n, hidden), those of expert 0 first, then those of 1, and so on.
            counts: (experts,), integers: rows of each; their sum is n.  An expert without any gets zeros as gradients.
        """
        runs = runs_of(rows, counts, self.gate_up, self.down)
        # (n, hidden) · (hidden, 2 ffn) → gate and up, (n, ffn) each.
        gate, up = grouped_product(rows, self.gate_up, runs).chunk(2, -1)
        return grouped_product(F.silu(gate) * up, self.down, runs)


class Mixture(nn.Module):
    """Experts for each token by its router's choice, and a shared one for all: hidden (..., hidden) → the same shape.

    `record` may be set to hear of every routing in a forward, with its graph.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.record: Callable[[Routing], None] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routing: Routing = self.router(tokens)
        if self.record is not None:
            self.record(routing)
        mixed, shared = self.dispatch(
            tokens, routing.chosen, routing.weights, lambda: None if self.shared is None else self.shared(tokens)
        )
        return (mixed if shared is None else mixed + shared).view(hidden.shape)

    def dispatch(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the experts make of tokens (n, hidden), and what `meanwhile` returns.

        The one place where tokens meet experts: ranks that share experts out set this attribute of the instance to
        what sends tokens to where their experts are, calls `meanwhile` (the shared expert) while they travel, runs
        `self.experts` with its own share of experts, and brings the results back.

        Args:
            tokens: (n, hidden).
            chosen: (n, top_k), int64: the experts of each.
            weights: (n, top_k): what each choice counts.
            meanwhile: computes beside; to be called once.
        """
        order, places, counts = arrange(chosen, self.router.num_experts)
        rows = spread(tokens, order, places)
        beside = meanwhile()
        return combine(self.experts(rows, counts), weights, order, places), beside


def arrange(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return how copies of tokens are sorted by expert, from the experts `chosen`, (n, top_k).

    Returns:
        For each row of the sorted copies which copy it is (token · top_k + choice), (n · top_k,); for each token and
        choice its row, (n, top_k); and rows per expert, (experts,).  All int64.
    """
    flat = chosen.reshape(-1)
    # Stable: copies for one expert stay in the order of tokens, so sums have one order on all devices.
    order = flat.argsort(stable=True)
    positions = torch.arange(flat.numel(), device=flat.device)
    # The inverse permutation: places[order[i]] = i.
    places = torch.empty_like(order).scatter_(0, order, positions).view(chosen.shape)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return order, places, counts.scatter_add_(0, flat, torch.ones_like(flat))


def spread(tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return copies of tokens (n, hidden) as `arrange` sorts them: (n · top_k, hidden)."""
    rows: Any = _Spread.apply(tokens, order, places)
    return rows


def combine(rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return (n, hidden): of each token's rows the sum, each times its weight of `weights` (n, top_k)."""
    mixed: Any = _Combine.apply(rows, weights, order, places)
    return mixed


class _Spread(torch.autograd.Function):
    """Copies of tokens in their sorted order.  Its backward gathers, so that sums have an order of their own."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (places,) = ctx.saved_tensors
        first, *others = places.unbind(1)
        total = grads[0].index_select(0, first)
        for place in others:
            total += grads[0].index_select(0, place)
        return total, None, None


class _Combine(torch.autograd.Function):
    """Weighted sums of what became of each token's copies, choice by choice; keeps no rows but those it is given."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        parts = zip(places.unbind(1), weights.unsqueeze(-1).unbind(1), strict=True)
        place, weight = next(parts)
        total = rows.index_select(0, place) * weight
        for place, weight in parts:
            total.addcmul_(rows.index_select(0, place), weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weights, order, places = ctx.saved_tensors
        (grad,) = grads
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = (
                grad.index_select(0, order // places.shape[1]) * weights.reshape(-1).index_select(0, order)[:, None]
            )
        if ctx.needs_input_grad[1]:
            columns = [(rows.index_select(0, place) * grad).sum(-1) for place in places.unbind(1)]
            grad_weights = torch.stack(columns, 1)
        return grad_rows, grad_weights, None, None
