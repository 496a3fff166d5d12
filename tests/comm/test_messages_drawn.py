"""The messenger on ranks with whatever it may be asked for, drawn at random; and what really passes its group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_counts import COUNTS, power
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pool import RankPool
from test_messages import CASES, TYPES, expected, region, values, world_view
from torch import Tensor

from weft.comm.algorithms import ALGORITHMS, Arrangement, find_algorithm, flat
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.comm.watched_group import WATCHED_GLOO, WatchedGroup, register_watched_backend
from weft.config.cluster import Collective

WORLD = 6
NAMES = [
    *ALGORITHMS, "hierarchical+double_ring", "hierarchical+recursive_doubling", "hierarchical+scatter",
    "hierarchical+bruck", "hierarchical+double_tree",
]  # fmt: skip
PAIRS = [(name, kind) for name in NAMES for kind in find_algorithm(name).collectives]


@dataclass(frozen=True)
class Drawn:
    """One call of the messenger."""

    members: int
    """The first so many ranks."""
    name: str
    kind: Collective
    place: Arrangement
    size: int
    dtype: torch.dtype
    op: str
    root: int
    edges: tuple[int, ...] | None
    """Between regions, where they are not near-equal."""
    pieces: int
    servers: int


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    members = draw(st.integers(1, WORLD))
    name, kind = draw(st.sampled_from(PAIRS))
    nodes: list[int] = []
    while sum(nodes) < members:
        nodes.append(draw(st.integers(1, members - sum(nodes))))
    order = tuple(draw(st.permutations(range(members))))
    size = draw(st.integers(0, 300))
    dtype, op = draw(st.sampled_from(CASES)) if "reduce" in kind else (draw(st.sampled_from(TYPES)), "SUM")
    has_edges = kind in ("reduce_scatter", "all_gather") and draw(st.booleans())
    inner = (
        sorted(draw(st.lists(st.integers(0, size), min_size=members - 1, max_size=members - 1))) if has_edges else []
    )
    return Drawn(
        members, name, kind, replace(flat(members, nodes=nodes), order=order), size, dtype, op,
        draw(st.integers(0, members - 1)), (0, *inner, size) if has_edges else None,
        draw(st.integers(1, 5)), draw(st.integers(1, members)),
    )  # fmt: skip


def given_and_wanted(call: Drawn, me: int) -> tuple[Tensor, Tensor, slice]:
    """The tensor that this rank hands in, what it must get, and where that counts."""
    n, size, whole = call.members, call.size, slice(None)
    mine = region(me, size, n) if call.edges is None else slice(*call.edges[me : me + 2])
    if call.kind == "broadcast":
        return values(me, size, call.dtype), values(call.root, size, call.dtype), whole
    if call.kind == "all_to_all":
        peers, within = torch.arange(n)[:, None], torch.arange(size) % 5
        sent, wanted = 31 * me + 7 * peers + within, 31 * peers + 7 * me + within
        return sent.flatten().to(call.dtype), wanted.flatten().to(call.dtype), whole
    total = expected(call.op, size, call.dtype, n)
    if call.kind == "all_gather":
        tensor = torch.zeros_like(total)
        tensor[mine] = total[mine]
        return tensor, total, whole
    return values(me, size, call.dtype), total, mine if call.kind == "reduce_scatter" else whole


def make_all(drawn: list[Drawn]) -> int:
    me, done = dist.get_rank(), 0
    sizes = sorted({call.members for call in drawn})
    groups = {n: dist.new_group(list(range(n))) if n > 1 else None for n in sizes}
    messengers = {n: Messenger(GroupView(tuple(range(n)), me, groups[n])) for n in sizes if me < n}  # type: ignore[arg-type]
    for call in drawn:
        if me >= call.members:
            continue
        messenger = messengers[call.members]
        tensor, wanted, where = given_and_wanted(call, me)
        edges = call.edges
        messenger.run(
            tensor, call.kind, call.name, op=getattr(dist.ReduceOp, call.op), root=call.root, arrangement=call.place,
            regions=None if edges is None else list(zip(edges, edges[1:], strict=False)), pieces=call.pieces,
            servers=call.servers,
        )  # fmt: skip
        assert torch.equal(tensor[where], wanted[where]), call
        done += 1
    for messenger in messengers.values():
        messenger.close()
    return done


@given(st.lists(calls(), min_size=80, max_size=80))
@settings(max_examples=2, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_whatever_is_asked_for(ranks: RankPool, drawn: list[Drawn]) -> None:
    """The first example is the simplest, the second is not; all calls of one go through one run of the ranks."""
    assert ranks.run(WORLD, make_all, drawn)[0] == len(drawn)


# ── what passes the group ─────────────────────────────────────────────────────────────────────────────────────────────


class Counted:
    """A group that notes the bytes of every message that is handed to it."""

    def __init__(self, plain: dist.ProcessGroup) -> None:
        self._plain = plain
        self.sent: list[int] = []

    def send(self, tensors: list[Tensor], *rest: Any) -> dist.Work:
        self.sent.append(sum(tensor.nbytes for tensor in tensors))
        return self._plain.send(tensors, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def elements(members: int) -> int:
    return 3 * math.lcm(2 * members, power(members))


def what_is_sent() -> list[tuple[int, int]]:
    register_watched_backend()
    view = world_view()
    group = dist.new_group(list(view.ranks), backend=WATCHED_GLOO)
    assert isinstance(group, WatchedGroup)
    found: list[tuple[int, int]] = []
    counted = Counted(group.plain)
    group.plain = counted  # type: ignore[assignment]
    sent = counted.sent
    with Messenger(replace(view, group=group)) as messenger:
        for name, kind in COUNTS:
            sent.clear()
            before = messenger.num_messages
            messenger.run(torch.zeros(elements(view.size)), kind, name, pieces=1)
            assert messenger.num_messages - before == len(sent), (name, kind)
            found.append((len(sent), sum(sent)))
    return found


@pytest.mark.parametrize("world", [4, 6])
def test_messages_and_bytes_on_the_wire_are_the_formulas(ranks: RankPool, world: int) -> None:
    by_rank = ranks.run(world, what_is_sent)
    for (pair, (_, messages, tensors)), found in zip(COUNTS.items(), zip(*by_rank, strict=True), strict=True):
        assert max(count for count, _ in found) == messages(world), pair
        assert max(size for _, size in found) == pytest.approx(4 * elements(world) * tensors(world)), pair
