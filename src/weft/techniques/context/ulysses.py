"""Heads in exchange for tokens: between two all-to-alls every rank has some heads of all tokens.

Attention itself is then the model's own call, with whatever kernel the device has for it.  Source: Jacobs et al. 2023,
https://arxiv.org/abs/2309.14509.  Ranks that outnumber the heads of keys get copies of them, whose gradients add up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.device import runs_on_gloo
from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.derivatives import once
from weft.techniques.context.attention import Attend, VisitedAttention
from weft.techniques.context.exchange import GatherExchange
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.token_runs import copies_of, joint_runs, runs_of, tokens_of
from weft.techniques.core.local_tokens import LocalTokens


def exchange_parts(flat: Tensor, sent: list[int], received: list[int], view: GroupView) -> Tensor:
    """Send run j of a flat tensor, `sent[j]` elements, to member j; return what comes from all, (Σ received,).

    Call on every rank of the group.
    """
    assert view.group is not None, "a group of one member exchanges nothing"
    transport_device = torch.device("cpu") if runs_on_gloo(flat.device, view.group) else flat.device
    arrived = flat.new_empty(sum(received), device=transport_device)
    dist.all_to_all_single(arrived, flat.contiguous().to(transport_device), received, sent, group=view.group)
    return arrived.to(flat.device)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], received: list[int], view: GroupView) -> Tensor:
        ctx.sent, ctx.received, ctx.view = sent, received, view
        return exchange_parts(flat, sent, received, view)

    @staticmethod
    @once("the exchange of heads", "Use plan.mesh.context = 1.")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # An all-to-all is a permutation of elements over ranks, so its gradient is the same one backwards.
        return exchange_parts(grads[0], ctx.received, ctx.sent, ctx.view), None, None, None


def _swap(flat: Tensor, sent: list[int], received: list[int], view: GroupView) -> Tensor:
    if torch.compiler.is_compiling():
        assert view.group is not None, "a group of one member exchanges nothing"
        return torch.ops.weft.exchanged(flat, sent, received, str(view.group.group_name))
    return _Swap.apply(flat, sent, received, view)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


@final
class HeadExchange:
    """Attention of some heads over all tokens, as `Attend`.  The ranks must divide the heads, and the heads of keys or
    be divided by these.

    Where the group is one of several that share the sequence, heads are exchanged among its ranks, and `between`
    attends to the tokens of all groups.
    """

    def __init__(self, view: GroupView, *, group: int = 0, groups: int = 1, between: Attend | None = None) -> None:
        self._view, self._group, self._groups, self._between = view, group, groups, between

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
        """See `Attend`.

        Raises:
            PlanError: the ranks do not divide the heads.
        """
        copies = copies_of(key.shape[1], self._view.size)
        if query.shape[1] % self._view.size:
            scheme = "ulysses" if self._between is None else "usp"
            raise PlanError(
                f'plan.context_parallel.scheme = "{scheme}" gives each of {self._view.size} ranks as many heads, and'
                f' there are {query.shape[1]} on a rank. Use "ring".'
            )
        # Fewer heads of keys than ranks: each is sent to several, and autograd sums the gradients of the copies.
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        whole = _Whole(tokens.length, self._view, self._group, self._groups)
        # (samples, heads, own tokens, size) → (samples, heads / ranks, tokens of the group, size)
        query, key, value = whole.of_tokens(query, key, value)
        form = form.of_heads(self._view.index * query.shape[1], query.shape[1])
        if self._between is not None:
            together = replace(tokens, runs=joint_runs(tokens.length, self._groups, self._group, self._view.size))
            return whole.of_heads(self._between(query, key, value, together, form))
        if not form.is_plain:
            return whole.of_heads(_attend_alone(query, key, value, tokens, form))
        causal, groups = form.pattern.causal, query.shape[1] != key.shape[1]
        mask = _mask(tokens, causal)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] # no module around this one shares it again
            mixed = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal and mask is None, scale=form.scale, enable_gqa=groups
            )
        return whole.of_heads(mixed)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
    """Return attention of some heads over all tokens, as of a sequence that no ranks share."""
    alone = GroupView((0,), 0, None)
    every = LocalTokens(length=tokens.length, runs=runs_of(tokens.length, 1, 0), documents=tokens.documents)
    return VisitedAttention(alone, GatherExchange(alone))(query, key, value, every, form)


def _mask(tokens: LocalTokens, causal: bool) -> Tensor | None:
    """Return a mask (samples, 1, tokens, tokens) that keeps documents apart; None: there are none."""
    if tokens.documents is None:
        return None
    mask = tokens.documents[:, :, None] == tokens.documents[:, None, :]
    return (mask.tril() if causal else mask)[:, None]


class _Whole:
    """Exchanges heads for tokens: all heads of own tokens ↔ some heads of all tokens of the group."""

    def __init__(self, length: int, view: GroupView, group: int, groups: int) -> None:
        self._view = view
        ranks = [(groups * view.size, group * view.size + index) for index in range(view.size)]
        self._held = [tokens_of(length, *rank) for rank in ranks]
        self._mine = self._held[view.index]
        runs = [run for rank in ranks for run in runs_of(length, *rank)]
        positions = torch.cat([torch.arange(start, stop) for start, stop in runs])
        # Ranks hold a run near the head and one near the tail, so their tokens end to end are not in the order of
        # positions, which causal kernels need.
        self._by_position = positions.argsort()
        """Index, in the order of ranks, of the group's tokens in the order of their positions."""
        self._by_rank = self._by_position.argsort()  # the inverse permutation

    def of_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Exchange heads for tokens, all tensors in one exchange.  Call on every rank of the group.

        Each tensor is (samples, heads, own tokens, size), and comes back as (samples, heads / ranks, tokens of the
        group, size) in the order of positions.
        """
        ranks = self._view.size
        parts = [tensor.unflatten(1, (ranks, -1)) for tensor in tensors]
        flat = torch.cat([torch.cat([part[:, to].reshape(-1) for part in parts]) for to in range(ranks)])
        shapes = [(part.shape[0], part.shape[2], part.shape[4]) for part in parts]
        sizes = [math.prod(shape) for shape in shapes]
        # To each rank the same heads' worth of own tokens; from each rank these heads of its tokens.
        received = [sum(sizes) * tokens for tokens in self._held]
        arrived = _swap(flat, [sum(sizes) * self._mine] * ranks, received, self._view).split(received)
        by_rank = [
            run.split([size * tokens for size in sizes]) for run, tokens in zip(arrived, self._held, strict=True)
        ]
        return [self._in_order([runs[index] for runs in by_rank], shape) for index, shape in enumerate(shapes)]

    def of_heads(self, mixed: Tensor) -> Tensor:
        """Undo `of_tokens`: (samples, heads / ranks, group's tokens, size) → (samples, heads, own tokens, size)."""
        samples, heads, _, size = mixed.shape
        by_rank = mixed.index_select(2, self._by_rank.to(mixed.device)).split(self._held, 2)
        token_size = samples * heads * size
        flat = torch.cat([part.reshape(-1) for part in by_rank])
        received = [token_size * self._mine] * self._view.size
        arrived = _swap(flat, [token_size * tokens for tokens in self._held], received, self._view).split(received)
        return torch.cat([part.view(samples, heads, self._mine, size) for part in arrived], 1)

    def _in_order(self, by_rank: list[Tensor], shape: tuple[int, int, int]) -> Tensor:
        """Return (samples, heads, group's tokens, size) by position.  `shape`: (samples, heads, size)."""
        samples, heads, size = shape
        parts = [part.view(samples, heads, tokens, size) for part, tokens in zip(by_rank, self._held, strict=True)]
        return torch.cat(parts, 2).index_select(2, self._by_position.to(parts[0].device))
