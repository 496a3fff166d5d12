"""Rows go to their experts and back: drawn counts, ranks without a row, experts without one, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan
from weft.techniques.expert.exchange import RowJourney, find_route
from weft.techniques.expert.journey import arrive, leave
from weft.techniques.expert.row_counts import rows_of_expert, rows_of_rank

WIDTH = 3


def _rows_of(rank: int, counts: list[int]) -> Tensor:
    """Rows that say where they come from: (rank, expert, place)."""
    places = [(rank, expert, place) for expert, count in enumerate(counts) for place in range(count)]
    return torch.tensor(places, dtype=torch.float64).view(-1, WIDTH).requires_grad_()


def _travelled(drawn: list[list[list[int]]]) -> list[str]:
    """What goes wrong for counts by case, rank and expert, with some weights in the gradients."""
    ranks = dist.get_world_size()
    mesh = Mesh(MeshPlan(shard=ranks, expert=ranks), torch.device("cpu"))
    view, wrong = mesh["expert"], list[str]()
    for number, by_rank in enumerate(drawn):
        counts = by_rank[view.index]
        own = len(counts) // ranks
        rows = _rows_of(view.index, counts)
        route = find_route(torch.tensor(counts), len(rows), view)
        outward, back = RowJourney(route, is_outward=True), RowJourney(route, is_outward=False)
        here = arrive(leave(rows, outward), outward)
        mine = range(view.index * own, (view.index + 1) * own)
        wanted = [(r, e, p) for e in mine for r in range(ranks) for p in range(by_rank[r][e])]
        if here.tolist() != [list(map(float, each)) for each in wanted]:
            wrong.append(f"{number}: {here.tolist()} are there, not {wanted}")
        if route.counts.tolist() != [sum(one[e] for one in by_rank) for e in mine]:
            wrong.append(f"{number}: counts {route.counts.tolist()}")
        again = arrive(leave(here * (1 + view.index), back), back)
        owner = torch.tensor([expert // own for expert, count in enumerate(counts) for _ in range(count)])
        factor = (1.0 + owner.double())[:, None]
        if not torch.equal(again, rows * factor):
            wrong.append(f"{number}: {again.tolist()} came back")
        weights = torch.arange(again.numel(), dtype=torch.float64).view_as(again) + 1
        (again * weights).sum().backward()
        assert rows.grad is not None
        if not torch.equal(rows.grad, weights * factor):
            wrong.append(f"{number}: gradients {rows.grad.tolist()}")
    mesh.leave()
    return wrong


def _drawn(ranks: int, own: int, cases: int) -> list[list[list[int]]]:
    """Counts with ranks that have no row, experts that get none, and one expert that gets all."""
    generator = torch.Generator().manual_seed(ranks * 7 + own)
    found: list[list[list[int]]] = []
    for case in range(cases):
        counts = torch.randint(0, 5, (ranks, ranks * own), generator=generator)
        counts[:, torch.rand(ranks * own, generator=generator) < 0.4] = 0
        counts[torch.rand(ranks, generator=generator) < 0.3] = 0
        if case == 0:
            counts.zero_()
        if case == 1:
            counts.zero_()
            counts[:, -1] = 4
        found.append(counts.tolist())
    return found


@pytest.mark.parametrize("backend", ["gloo", "cpu:weft"])
@pytest.mark.parametrize(("ranks_used", "own"), [(2, 1), (2, 4), (3, 2), (4, 2)])
def test_rows_reach_their_experts_and_return(ranks: RankPool, ranks_used: int, own: int, backend: str) -> None:
    for wrong in ranks.run(ranks_used, _travelled, _drawn(ranks_used, own, 12), backend=backend):
        assert wrong == []


def _crossing() -> list[str]:
    """Two exchanges that are under way at once, whose gradients are, too."""
    mesh = Mesh(MeshPlan(shard=2, expert=2), torch.device("cpu"))
    view, found = mesh["expert"], list[Any]()
    for scale in (1.0, 10.0):
        rows = (_rows_of(view.index, [2, 1]).detach() * scale).requires_grad_()
        outward = RowJourney(find_route(torch.tensor([2, 1]), 3, view), is_outward=True)
        found.append((rows, outward, leave(rows, outward)))
    made = [arrive(arriving, outward) for _, outward, arriving in reversed(found)]
    torch.stack([each.sum() for each in made]).sum().backward()
    mesh.leave()
    return [f"{rows.grad}" for rows, _, _ in found if not torch.equal(rows.grad, torch.ones_like(rows))]


def test_exchanges_may_be_under_way_together(ranks: RankPool) -> None:
    assert ranks.run(2, _crossing, backend="cpu:weft") == [[], []]


@given(rows=st.integers(0, 300), own=st.integers(1, 5), sharing=st.integers(1, 6))
@settings(deadline=None)
def test_what_is_assumed_of_rows_adds_up(rows: int, own: int, sharing: int) -> None:
    experts = own * sharing
    each = [rows_of_expert(rows, experts, expert) for expert in range(experts)]
    assert sum(each) == rows
    assert max(each) - min(each) <= 1
    assert sum(rows_of_rank(rows, experts, sharing, index) for index in range(sharing)) == sharing * rows
