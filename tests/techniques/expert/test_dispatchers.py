"""Both ways in which tokens meet experts of other ranks, against experts that lie together, on drawn choices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import MeshPlan
from weft.model.reference.mixture import Experts, arrange, combine, spread
from weft.techniques.core import StepContext
from weft.techniques.expert.exchange import AllToAllDispatcher
from weft.techniques.expert.gathered import AllGatherDispatcher
from weft.techniques.expert.journey import Dispatcher

WIDTH, FFN = 5, 7


def _experts(number: int) -> Experts:
    experts = Experts(number, WIDTH, FFN).double()
    generator = torch.Generator().manual_seed(number)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return experts


def _given(case: int, rank: int, tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices and weights of a rank.  In the second case everybody chooses the same ones, the last."""
    generator = torch.Generator().manual_seed(100 * case + rank)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    scores = torch.rand(tokens, experts, generator=generator)
    if case == 1:
        scores = torch.arange(experts).expand(tokens, -1).float()
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), scores.topk(top_k, -1).indices, weights.requires_grad_()


def _whole(experts: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order, places, counts = arrange(chosen, experts.num_experts)
    return combine(experts(spread(hidden, order, places), counts), weights, order, places)


def _part(experts: Experts, first: int, own: int) -> Experts:
    part = Experts(own, WIDTH, FFN).double()
    for mine, whole in zip(part.parameters(), experts.parameters(), strict=True):
        mine.data.copy_(whole.data[first : first + own])
    return part


def _dispatcher(kind: str, view: GroupView, experts: int) -> Dispatcher:
    if kind == "all_to_all":
        return AllToAllDispatcher(view, experts, lambda rows: None)
    return AllGatherDispatcher(view, experts, StepContext(), MeshPlan())


def _mixed(kind: str, top_k: int, tokens_of: list[list[int]], own: int) -> list[str]:
    """What goes wrong on this rank, case by case."""
    ranks, wrong = dist.get_world_size(), list[str]()
    mesh = Mesh(MeshPlan(shard=ranks, expert=ranks), torch.device("cpu"))
    view, number = mesh["expert"], own * ranks
    for case, tokens in enumerate(tokens_of):
        whole, part = _experts(number), _part(_experts(number), view.index * own, own)
        hidden, chosen, weights = _given(case, view.index, tokens[view.index], number, top_k)
        dispatcher = _dispatcher(kind, view, number)
        mixed, beside = dispatcher.mix(hidden, chosen, weights, part, partial(torch.mul, hidden, 2))
        assert beside is not None
        factor = torch.arange(mixed.numel(), dtype=torch.float64).view_as(mixed) + 1
        ((mixed + beside) * factor).sum().backward()
        found = [mixed, hidden.grad, weights.grad, *(each.grad for each in part.parameters())]
        wanted = _wanted(whole, case, tokens, top_k, view.index, own)
        for name, one, other in zip(("mixed", "tokens", "weights", "up", "down"), found, wanted, strict=True):
            gap = float((one - other).detach().norm()) if one is not None else float("nan")
            if not gap <= 1e-12 * max(1.0, float(other.detach().norm())):
                wrong.append(f"case {case}: {name} differ by {gap}")
    mesh.leave()
    return wrong


def _wanted(whole: Experts, case: int, tokens: list[int], top_k: int, index: int, own: int) -> list[Any]:
    """What one process makes of the tokens of all ranks: this rank's results, and the gradients of its experts."""
    found: list[Any] = []
    for rank, number in enumerate(tokens):
        hidden, chosen, weights = _given(case, rank, number, whole.num_experts, top_k)
        mixed = _whole(whole, hidden, chosen, weights)
        factor = torch.arange(mixed.numel(), dtype=torch.float64).view_as(mixed) + 1
        ((mixed + hidden * 2) * factor).sum().backward()
        if rank == index:
            found = [mixed, hidden.grad, weights.grad]
    parts = [each.grad[index * own : (index + 1) * own] for each in whole.parameters() if each.grad is not None]
    return [*found, *parts]


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("backend", ["gloo", "cpu:weft"])
@pytest.mark.parametrize(("ranks_used", "own", "top_k"), [(2, 1, 2), (2, 3, 4), (3, 2, 1), (4, 2, 3)])
def test_mixes_as_where_all_experts_lie_together(
    ranks: RankPool, ranks_used: int, own: int, top_k: int, backend: str, kind: str
) -> None:
    """Ranks have different numbers of tokens, and some have none."""
    generator = torch.Generator().manual_seed(own + top_k)
    tokens_of = [torch.randint(0, 9, (ranks_used,), generator=generator).tolist() for _ in range(6)]
    tokens_of += [[0] * ranks_used, [0] * (ranks_used - 1) + [5]]
    for wrong in ranks.run(ranks_used, _mixed, kind, top_k, tokens_of, own, backend=backend):
        assert wrong == []
