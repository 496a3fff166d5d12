"""Hierarchical collectives whose part inside a host goes over shared memory: right, in the same bits, and never alone.

All ranks are on this host; `place` tells them apart as if they were on several.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool
from test_messages import TYPES, cases, expected, region, uneven, values, world_view
from test_messages_missing import DEADLINE, PATIENT, SLACK

from weft.comm._collective_steps import ElementStep
from weft.comm._execute import PreparedCollective, execute
from weft.comm.algorithms import Arrangement, build_schedule, flat
from weft.comm.messages import Messenger
from weft.comm.pick import collectives_for
from weft.comm.selector import ChosenCollectives, NodeMemory, share_node_memory
from weft.errors import CollectiveError

NAMES = ("hierarchical", "hierarchical+recursive_doubling", "hierarchical+direct", "hierarchical+tree")
HALVES = ("hierarchical", "hierarchical+double_ring", "hierarchical+bruck")
BROADCASTS = ("hierarchical", "hierarchical+ring", "hierarchical+scatter")
SHAPES = ((2, 1), (1, 2), (2, 2), (3, 2), (4, 4), (3, 1, 4))
SIZES = (0, 1, 3, 13, 257, 70_001)


def given(nodes: tuple[int, ...], *, apart: bool = False) -> tuple[Arrangement, NodeMemory | None]:
    """A place of such nodes, and this rank's share; `apart`: neighbours by number lie on different nodes."""
    n = sum(nodes)
    order = (*range(0, n, 2), *range(1, n, 2)) if apart else tuple(range(n))
    place = replace(flat(n, nodes=nodes), order=order)
    return place, share_node_memory(world_view(), place)


def is_alone(place: Arrangement) -> bool:
    edges = list(itertools.accumulate(place.nodes))
    at = list(place.order).index(dist.get_rank())
    return next(count for count, edge in zip(place.nodes, edges, strict=True) if at < edge) == 1


# ── right ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reduce_everything(nodes: tuple[int, ...], apart: bool) -> int:
    view = world_view()
    place, node = given(nodes, apart=apart)
    assert (node is None) == is_alone(place)
    count = 0
    with Messenger(view, node=node) as messenger:
        for (dtype, op), some, name in zip(
            cases(view.size), itertools.cycle(SIZES), itertools.cycle(NAMES), strict=False
        ):
            for size in (some, 257):
                tensor = values(view.index, size, dtype)
                messenger.run(tensor, "all_reduce", name, op=getattr(dist.ReduceOp, op), arrangement=place)
                assert torch.equal(tensor, expected(op, size, dtype)), (name, dtype, op, size)
                count += 1
    if node is not None:
        node.close()
        node.close()
    return count


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("nodes", SHAPES)
def test_every_type_and_operation(ranks: RankPool, nodes: tuple[int, ...], apart: bool) -> None:
    assert min(ranks.run(sum(nodes), reduce_everything, nodes, apart, timeout=120)) >= 10


def move_everything(nodes: tuple[int, ...]) -> None:
    view = world_view()
    n, me = view.size, view.index
    place, node = given(nodes)
    halves = itertools.cycle(HALVES)
    with ChosenCollectives(view, place=place, node=node), Messenger(view, node=node) as messenger:
        for size, dtype in zip(SIZES, itertools.cycle(TYPES), strict=False):
            total = expected("SUM", size, dtype)
            for bounds in (None, uneven(size, n)):
                mine = slice(*bounds[me]) if bounds else region(me, size, n)
                tensor = values(me, size, dtype)
                half = next(halves)
                messenger.run(tensor, "reduce_scatter", half, regions=bounds, arrangement=place)
                assert torch.equal(tensor[mine], total[mine]), (size, dtype, bounds)
                tensor = torch.zeros(size, dtype=dtype)
                tensor[mine] = total[mine]
                messenger.run(tensor, "all_gather", half, regions=bounds, arrangement=place)
                assert torch.equal(tensor, total), (size, dtype, bounds)
            for root in range(n):
                tensor = values(me, size, dtype)
                name = BROADCASTS[root % len(BROADCASTS)]
                messenger.run(tensor, "broadcast", name, root=root, pieces=3, arrangement=place)
                assert torch.equal(tensor, values(root, size, dtype)), (size, root)


@pytest.mark.parametrize("nodes", SHAPES)
def test_the_other_collectives(ranks: RankPool, nodes: tuple[int, ...]) -> None:
    ranks.run(sum(nodes), move_everything, nodes, timeout=120)


def bits(nodes: tuple[int, ...]) -> list[list[int]]:
    """Of fp32 by both ways, which must be the same, and of bf16, which memory rounds once a node."""
    view = world_view()
    place, node = given(nodes)
    generator = torch.Generator().manual_seed(view.index)
    tensors = {name: torch.randn(9_999, generator=generator) for name in NAMES}
    over_memory: dict[str, torch.Tensor] = {}
    found: list[list[int]] = []
    with Messenger(view, node=node) as messenger:
        for name, tensor in tensors.items():
            over_memory[name] = messenger.run(tensor.clone(), "all_reduce", name, arrangement=place)
            found.append(over_memory[name].view(torch.int32).tolist())
            narrow = tensor.bfloat16()
            exact = narrow.double()
            dist.all_reduce(exact)
            messenger.run(narrow, "all_reduce", name, arrangement=place)
            assert (narrow.double() - exact).abs().max() < 0.3
            found.append(narrow.view(torch.int16).tolist())
    with Messenger(view) as messenger:
        for name, tensor in tensors.items():
            before = messenger.num_messages
            by_messages = messenger.run(tensor.clone(), "all_reduce", name, arrangement=place)
            assert torch.equal(over_memory[name], by_messages), name
            assert messenger.num_messages > before
    if node is not None:
        node.close()
    return found


@pytest.mark.parametrize("nodes", [(2, 2), (3, 2)])
def test_all_ranks_get_the_same_bits_as_by_messages(ranks: RankPool, nodes: tuple[int, ...]) -> None:
    found = ranks.run(sum(nodes), bits, nodes)
    assert all(other == found[0] for other in found[1:])


# ── what goes where ───────────────────────────────────────────────────────────────────────────────────────────────────


def counted(nodes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Messages that each collective sends, and those that its schedule has between nodes."""
    view = world_view()
    place, node = given(nodes)
    sent: list[int] = []
    wanted: list[int] = []
    with Messenger(view, node=node) as messenger:
        for collective, name, dtype in (
            ("all_reduce", "hierarchical", torch.float32),
            ("all_reduce", "hierarchical+direct", torch.float32),
            ("reduce_scatter", "hierarchical", torch.float32),
            ("all_gather", "hierarchical", torch.complex64),
            ("broadcast", "hierarchical", torch.float32),
            ("reduce_scatter", "hierarchical+double_ring", torch.float32),
            ("all_gather", "hierarchical+recursive_doubling", torch.float32),
            ("broadcast", "hierarchical+scatter", torch.float32),
            ("all_to_all", "hierarchical", torch.float32),  # nothing that memory knows
            ("all_reduce", "hierarchical", torch.complex64),  # sums that the memory does not know
            ("all_reduce", "ring", torch.float32),
        ):
            before = messenger.num_messages
            messenger.run(torch.zeros(960, dtype=dtype), collective, name, arrangement=place)  # type: ignore[arg-type]
            sent.append(messenger.num_messages - before)
            schedule = build_schedule(name, collective, view.index, view.size, arrangement=place)  # type: ignore[arg-type]
            inside = node is None or name == "ring" or (collective, dtype) == ("all_reduce", torch.complex64)
            inside = inside or collective == "all_to_all"
            wanted.append(sum(len(step.sends) for step in schedule.steps if inside or step.phase == "across nodes"))
    if node is not None:
        node.close()
    return sent, wanted


@pytest.mark.parametrize("nodes", [(2, 2), (2, 1), (3, 2)])
def test_nothing_inside_a_node_is_sent(ranks: RankPool, nodes: tuple[int, ...]) -> None:
    for sent, wanted in ranks.run(sum(nodes), counted, nodes):
        assert sent == wanted


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        *itertools.product(("hierarchical",), ("all_reduce", "reduce_scatter", "all_gather", "broadcast")),
        *itertools.product(("hierarchical+double_ring",), ("all_reduce", "reduce_scatter", "all_gather", "broadcast")),
        ("hierarchical+recursive_doubling", "all_gather"),
        ("hierarchical+scatter", "broadcast"),
    ],
)
@pytest.mark.parametrize("nodes", [(2, 2), (3, 2), (1, 4, 2), (5, 5, 5)])
def test_levels_send_across_what_the_schedule_sends(nodes: tuple[int, ...], name: str, collective: str) -> None:
    n, place = sum(nodes), flat(sum(nodes), nodes=nodes)
    for rank in range(n):
        schedule, levels = (
            build_schedule(
                name,
                collective,
                rank,
                n,
                arrangement=place,
                root=n - 1,
                pieces=2,
                shares_node=shares_node,  # type: ignore[arg-type]
            )
            for shares_node in (False, True)
        )
        assert levels.steps == tuple(step for step in schedule.steps if step.phase == "across nodes")
        assert replace(levels, steps=(), before=(), after=()) == replace(schedule, steps=())
        assert levels.before or levels.after
        at = next(index for index, stop in enumerate(itertools.accumulate(nodes)) if rank < stop)
        assert all(len(each.regions) == nodes[at] for each in (*levels.before, *levels.after))
    for other, what in (("ring", "all_reduce"), ("hierarchical", "all_to_all")):
        apart = build_schedule(other, what, 0, n, arrangement=place)  # type: ignore[arg-type]
        assert build_schedule(other, what, 0, n, arrangement=place, shares_node=True) == apart  # type: ignore[arg-type]


def where_it_serves_nothing() -> None:
    view = world_view()
    assert share_node_memory(view, flat(4)) is None
    assert share_node_memory(view, flat(4, nodes=(1, 1, 1, 1))) is None
    with collectives_for(view, torch.device("cpu"), "hierarchical") as carrier:
        assert carrier._node is None  # one host
    place, node = given((2, 2))
    assert node is not None
    assert node.members == ((0, 1) if view.index < 2 else (2, 3))
    other = replace(place, order=(1, 0, 2, 3))
    assert node.carries(place, torch.float32, None)
    assert not node.carries(other, torch.float32, None)
    assert not node.carries(flat(4, nodes=(1, 3)), torch.float32, None)
    assert not node.carries(None, torch.float32, None)
    node.close()


def test_memory_is_shared_only_where_it_serves(ranks: RankPool) -> None:
    ranks.run(4, where_it_serves_nothing)


def without_the_engine() -> None:
    view, place = world_view(), flat(4, nodes=(2, 2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        node = share_node_memory(view, place, use_engine=False)
    assert node is None
    assert len(said) == (view.index in (0, 2))
    with Messenger(view, node=node) as messenger:
        for size in (1, 100, 300_000):
            tensor = values(view.index, size, torch.float32)
            messenger.run(tensor, "all_reduce", "hierarchical", arrangement=place)
            assert torch.equal(tensor, expected("SUM", size, torch.float32))


def test_without_the_engine_messages_do_it(ranks: RankPool) -> None:
    ranks.run(4, without_the_engine)


# ── asynchronous, and afterwards ──────────────────────────────────────────────────────────────────────────────────────


def many_under_way() -> list[float]:
    view = world_view()
    place, node = given((2, 2))
    with ChosenCollectives(view, place=place, node=node) as carrier:
        tensors = [torch.full((5000 + index,), float(index)) for index in range(12)]
        names = itertools.cycle((*NAMES, "ring", "backend"))
        waits = [carrier.start_all_reduce(tensor, by=name) for tensor, name in zip(tensors, names, strict=False)]
        for wait in reversed(waits):
            wait()
            wait()
    return [tensor.mean().item() for tensor in tensors]


def test_several_are_under_way_at_a_time(ranks: RankPool) -> None:
    assert ranks.run(4, many_under_way) == [[4.0 * index for index in range(12)]] * 4


def one_round() -> None:
    place, node = given((2, 2))
    with ChosenCollectives(world_view(), place=place, node=node) as carrier:
        carrier.start_all_reduce(torch.ones(100), by="hierarchical")()


def left_behind() -> tuple[int, int]:
    one_round()  # connects the ranks of the group, which stay connected
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one_round()
    stop = time.monotonic() + 5
    while (more := len(os.listdir("/proc/self/fd")) - files) > 0 and time.monotonic() < stop:
        gc.collect()
        time.sleep(0.01)
    return threading.active_count() - threads, more


def test_nothing_is_left_behind(ranks: RankPool) -> None:
    assert ranks.run(4, left_behind) == [(0, 0)] * 4


# ── a rank is missing ─────────────────────────────────────────────────────────────────────────────────────────────────

VICTIM = 3
PARTS = ("nothing", "before", "across")


def do_a_part(messenger: Messenger, tensor: torch.Tensor, place: Arrangement, part: str) -> None:
    """Take part in a collective up to a point."""
    prepared, combine = messenger._prepared(tensor, "all_reduce", "hierarchical", {"arrangement": place})
    inside = next(number for number, step in enumerate(prepared.steps) if isinstance(step, ElementStep))
    across = sum(isinstance(step, ElementStep) for step in prepared.steps)
    cut = replace(prepared, steps=prepared.steps[: {"nothing": 0, "before": inside, "across": inside + across}[part]])
    messenger._num_jobs += 1
    execute(
        PreparedCollective(cut, tensor, combine, "", (1 << 30) + messenger._num_jobs, PATIENT), messenger._queue.channel
    )


def survive(part: str, how: int, folder: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    place, node = given((2, 2))
    assert node is not None
    messenger = Messenger(world_view(), timeout_seconds=PATIENT, node=node)
    tensor = torch.ones(4096)
    messenger.run(tensor, "all_reduce", "hierarchical", arrangement=place)
    dist.barrier()
    if rank == VICTIM:
        (Path(folder) / "victim").write_text(str(os.getpid()))
        do_a_part(messenger, tensor, place, part)
        os.kill(os.getpid(), how)
        return
    start = time.monotonic()
    try:
        for _ in range(2):  # who was done with the first is caught by the second
            messenger.run(tensor, "all_reduce", "hierarchical", arrangement=place, timeout_seconds=DEADLINE)
    except CollectiveError as error:
        (Path(folder) / f"rank{rank}").write_text(f"{time.monotonic() - start:.3f} {error}")
    messenger.close()
    node.close()
    dist.destroy_process_group()
    if rank == 0:
        others = [Path(folder) / f"rank{other}" for other in range(n) if other != VICTIM]
        stop = time.monotonic() + DEADLINE + SLACK
        while not all(path.exists() for path in others) and time.monotonic() < stop:
            time.sleep(0.02)
        os.kill(int((Path(folder) / "victim").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("part", PARTS)
def test_every_survivor_names_the_missing_rank(ranks: RankPool, part: str, how: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"rank {VICTIM} died with exit code -9"):
        ranks.run(4, survive, part, int(how), str(tmp_path), timeout=60)
    for rank in (0, 1, 2):
        seconds, _, text = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert re.search(rf"all_reduce of 16,384 bytes by hierarchical over 4 ranks: rank {VICTIM} ", text), text
        assert re.search(r"in step \d+ of \d+ \((inside the node|across nodes)\), waiting for ", text), text
        assert float(seconds) < 2 * DEADLINE + SLACK
        if how == signal.SIGKILL:
            assert float(seconds) < DEADLINE + SLACK, "a process that is gone is seen soon"


def come_late() -> str:
    rank = dist.get_rank()
    place, node = given((2, 2))
    assert node is not None
    messenger = Messenger(world_view(), timeout_seconds=PATIENT, node=node)
    tensor = torch.ones(1000)
    messenger.run(tensor, "all_reduce", "hierarchical", arrangement=place)
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(DEADLINE + 0.5)
        start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        messenger.run(tensor, "all_reduce", "hierarchical", arrangement=place, timeout_seconds=DEADLINE)
    assert time.monotonic() - start < DEADLINE + SLACK
    with pytest.raises(CollectiveError, match="was given up before"):
        messenger.run(tensor, "all_reduce", "hierarchical", arrangement=place)
    messenger.close()
    node.close()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_late_rank_is_named_and_told(ranks: RankPool) -> None:
    texts = ranks.run(4, come_late, timeout=60)
    assert "this rank (1) came too late" in texts[1]
    for rank in (0, 2, 3):
        assert f"rank 1 sent nothing within the deadline of {DEADLINE:g} s" in texts[rank], texts[rank]


def call_something_else() -> str:
    rank = dist.get_rank()
    place, node = given((2, 2))
    assert node is not None
    given_tensor = torch.ones(1000 if rank != 1 else 1200)
    messenger = Messenger(world_view(), timeout_seconds=DEADLINE, node=node)
    with pytest.raises(CollectiveError) as caught:
        messenger.run(given_tensor, "all_reduce", "hierarchical", arrangement=place)
    messenger.close()
    node.close()
    dist.destroy_process_group()
    return str(caught.value)


def test_ranks_of_a_node_that_call_different_things_are_told(ranks: RankPool) -> None:
    texts = ranks.run(4, call_something_else, timeout=60)
    assert all("must make the same calls" in text for text in texts[:2]), texts
    assert all("by hierarchical over 4 ranks" in text for text in texts[2:]), texts
