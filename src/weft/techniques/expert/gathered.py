"""Tokens of all ranks come to all of them, and each adds up what its own experts make of them.

Every rank of the group has the same tokens then, with their choices and what these count.  It copies those of its own
experts, computes on them, and sums the copies of each token; a reduce-scatter adds up the sums of all ranks and brings
every token home.  A token travels once, however many experts it has chosen: where that is more than there are ranks,
less is sent than by all-to-all.  (Megatron-LM's all-gather dispatcher does the same.)

How many tokens each rank has is told first, and shorter shares are filled up with tokens that have chosen nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from weft.comm.collectives import all_gather
from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_gather, start_reduce_scatter
from weft.config.plan import MeshPlan
from weft.techniques.core import StepContext
from weft.techniques.core.autograd import gather_samples
from weft.techniques.expert.journey import Compute, Journey, arrive, leave
from weft.techniques.expert.row_counts import most_tokens_of, rows_of_rank

_NOBODY = -1
"""Choice of a token that fills a share up."""


@final
class TokenJourney(Journey):
    """One way of tokens, of which every rank of the group has equally many: outward to all ranks, back as sums."""

    def __init__(self, view: GroupView, *, is_outward: bool) -> None:
        super().__init__(is_outward=is_outward)
        self._view = view

    def start(self, leaving: Tensor, *, is_outward: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        """See `Journey`: outward (tokens, features) become (ranks · tokens, features), and back these their sums."""
        return self._gather(leaving) if is_outward else self._sum(leaving)

    def _gather(self, own: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        every = own.new_empty((self._view.size * own.shape[0], *own.shape[1:]))
        regions = self._regions(own.numel())
        every.view(-1)[slice(*regions[self._view.index])].copy_(own.reshape(-1))
        wait = start_all_gather(every.view(-1), regions, self._view, even=True)

        def end() -> Tensor:
            wait()
            return every

        return every, end

    def _sum(self, every: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        # It sums in place, and autograd may share a gradient with others.
        flat = every.reshape(-1).clone()
        own = every.new_empty((every.shape[0] // self._view.size, *every.shape[1:]))
        regions = self._regions(own.numel())
        wait = start_reduce_scatter(flat, regions, self._view, even=True)

        def end() -> Tensor:
            wait()
            own.view(-1).copy_(flat[slice(*regions[self._view.index])])  # so that the sums of others need not stay
            return own

        return own, end

    def _regions(self, elements: int) -> list[tuple[int, int]]:
        return [(index * elements, (index + 1) * elements) for index in range(self._view.size)]

    def sort(self, arrived: Tensor) -> Tensor:
        """See `Journey`: they stay by rank, and each of their copies is made where it is needed."""
        return arrived

    def unsort(self, rows: Tensor) -> Tensor:
        """See `Journey`."""
        return rows


@dataclass(frozen=True, slots=True)
class OwnCopies:
    """Which of the choices of n tokens are for some experts."""

    top_k: int
    order: Tensor
    """int64, (rows,): which copy (token · top_k + choice) each row is, sorted by expert, those of one by token."""
    counts: Tensor
    """int64, (experts,): rows of each."""
    tokens: Sequence[Tensor]
    """int64, for each choice those tokens that have one of the experts there, once each."""
    rows: Sequence[Tensor]
    """int64, for each choice the rows of these tokens."""


def own_copies(chosen: Tensor, first: int, own: int, assumed: int) -> OwnCopies:
    """Return which of the choices, (n, top_k), are for the experts from `first` on, `own` of them.

    Where numbers are not real (a dry run) they are taken to be `assumed`.
    """
    top_k, local = chosen.shape[1], chosen.long() - first
    here = (local >= 0) & (local < own)
    # Choices of other ranks' experts sort behind the own ones, and are cut off.
    by_expert = torch.where(here, local, own).view(-1)
    by_choice = torch.where(here, torch.arange(top_k, device=chosen.device), top_k).view(-1)
    counts = torch.zeros(own + 1, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add_(0, by_expert, torch.ones_like(by_expert))[:own]
    per_choice = _per_choice(here, assumed)
    num_rows = sum(per_choice)
    order = by_expert.argsort(stable=True)[:num_rows]
    places = torch.empty_like(by_expert).scatter_(0, order, torch.arange(num_rows, device=chosen.device))
    copies = by_choice.argsort(stable=True)[:num_rows]
    return OwnCopies(
        top_k=top_k,
        order=order,
        counts=counts,
        tokens=(copies // top_k).split(per_choice),
        rows=places.index_select(0, copies).split(per_choice),
    )


def _per_choice(here: Tensor, assumed: int) -> list[int]:
    """Return the number of copies by choice.  Here alone the host waits for the device."""
    if type(here) is Tensor and not here.is_meta:
        return here.sum(0).tolist()
    fewest, more = divmod(assumed, here.shape[1])
    return [fewest + (choice < more) for choice in range(here.shape[1])]


class _SpreadOwn(torch.autograd.Function):
    """Tokens (n, hidden) → rows (rows, hidden), sorted by expert.

    The backward sums rows choice by choice.  No token stands twice in one choice, so every sum has a fixed order, where
    `index_add_` with repeated indices would not have one on an accelerator.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: OwnCopies) -> Tensor:
        ctx.save_for_backward(*copies.tokens, *copies.rows)
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(0, copies.order // copies.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        places: tuple[Tensor, ...] = ctx.saved_tensors
        top_k = len(places) // 2
        total = grads[0].new_zeros((ctx.num_tokens, grads[0].shape[1]))
        for tokens, rows in zip(places[:top_k], places[top_k:], strict=True):
            total.index_add_(0, tokens, grads[0].index_select(0, rows))
        return total, None


class _CombineOwn(torch.autograd.Function):
    """Expert outputs (rows, hidden) and weights (n, top_k) → weighted sums (n, hidden), choice by choice."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, weights: Tensor, copies: OwnCopies) -> Tensor:
        ctx.save_for_backward(made, weights, copies.order)
        dtype = torch.promote_types(made.dtype, weights.dtype)
        total = torch.zeros((weights.shape[0], made.shape[1]), dtype=dtype, device=made.device)
        for choice, (tokens, rows) in enumerate(zip(copies.tokens, copies.rows, strict=True)):
            weight = weights[:, choice].index_select(0, tokens)[:, None]
            total.index_add_(0, tokens, (made.index_select(0, rows) * weight).to(dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        made, weights, order = ctx.saved_tensors
        grad = grads[0].index_select(0, order // weights.shape[1])
        grad_made = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_made = (grad * weights.reshape(-1).index_select(0, order)[:, None]).to(made.dtype)
        if ctx.needs_input_grad[1]:
            worth = (made * grad).sum(-1).to(weights.dtype)
            grad_weights = weights.new_zeros(weights.numel()).index_copy_(0, order, worth).view_as(weights)
        return grad_made, grad_weights, None


@final
class AllGatherDispatcher:
    """All-gather of tokens, and reduce-scatter of what the experts of each rank make of them."""

    def __init__(self, view: GroupView, num_experts: int, context: StepContext, mesh: MeshPlan) -> None:
        """`num_experts`: those of all ranks together."""
        self._view, self._num_experts, self._context, self._mesh = view, num_experts, context, mesh

    def mix(
        self,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        compute: Compute,
        meanwhile: Callable[[], Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """See `Dispatcher`."""
        view, num_tokens = self._view, tokens.shape[0]
        most = self._most(num_tokens, tokens.device)
        # Ranks fill up to the longest share, as a gather wants equal parts; a filled-up token chooses no expert.
        every_choice = all_gather(_filled_up(chosen.to(torch.int32), most, _NOBODY), view).flatten(0, 1)
        outward, back = TokenJourney(view, is_outward=True), TokenJourney(view, is_outward=False)
        leaving = leave(_filled_up(tokens, most), outward)
        beside = meanwhile()
        every_weight = self._gather_weights(_filled_up(weights, most))
        own = self._num_experts // view.size
        assumed = rows_of_rank(chosen.numel(), self._num_experts, view.size, view.index)
        copies = own_copies(every_choice, view.index * own, own, assumed)
        rows: Any = _SpreadOwn.apply(arrive(leaving, outward), copies)
        sums: Any = _CombineOwn.apply(compute(rows, copies.counts), every_weight, copies)
        return arrive(leave(sums.to(tokens.dtype), back), back)[:num_tokens], beside

    def _gather_weights(self, weights: Tensor) -> Tensor:
        """Return the weights of all ranks, gathered in fp32 or wider, because their gradients are summed over ranks."""
        wide = torch.promote_types(weights.dtype, torch.float32)
        return gather_samples(weights.to(wide), self._view, 0).to(weights.dtype)

    def _most(self, num_tokens: int, device: torch.device) -> int:
        """Return the largest number of tokens on any rank.  Collective."""
        counts = all_gather(torch.tensor([num_tokens], device=device), self._view)
        if type(counts) is Tensor and not counts.is_meta:
            return int(counts.max())
        shared = None if self._context.current is None else self._context.current.tokens
        if shared is None:
            return num_tokens
        return num_tokens // shared.held * most_tokens_of(shared.length, self._mesh, self._view.ranks)


def _filled_up(values: Tensor, length: int, value: int = 0) -> Tensor:
    missing = length - values.shape[0]
    return values if not missing else torch.cat([values, values.new_full((missing, *values.shape[1:]), value)])
