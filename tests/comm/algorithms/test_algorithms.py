"""Every algorithm's schedule: what all ranks hold at the end, and that messages, bytes and time are the formula's."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from collective_counts import COUNTS, log2, power
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_simulator import Playback, ScheduleError, simulate

from weft.comm.algorithms import (
    ALGORITHMS,
    Arrangement,
    Links,
    Receive,
    Schedule,
    Send,
    Step,
    build_schedule,
    find_algorithm,
    flat,
)
from weft.config.cluster import Collective
from weft.errors import CollectiveError

WORLDS = range(1, 18)
ACROSS = (
    *("ring", "double_ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"),
    *("direct", "one_shot", "scatter", "bruck"),
)
PAIRS = [(name, kind) for name, algorithm in ALGORITHMS.items() for kind in algorithm.collectives]
KINDS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
LATENCY, PER_BYTE = 16.0, 1.0


def world(name: str, kind: Collective, members: int, **options: object) -> list[Schedule]:
    return [build_schedule(name, kind, rank, members, **options) for rank in range(members)]  # type: ignore[arg-type]


def play(name: str, kind: Collective, members: int, num_bytes: int, **options: object) -> Playback:
    return simulate(world(name, kind, members, **options), num_bytes, link=lambda source, target: (LATENCY, PER_BYTE))


def nodes_of(members: int) -> list[tuple[int, ...]]:
    """One node, nodes of one, alike ones, and unequal ones with the small one first or last."""
    found = [(members,), (1,) * members]
    found += [(members // k,) * k for k in (2, 3, 4) if members % k == 0 and members > k]
    if members > 2:
        found += [(members - 1, 1), (1, members - 1), (2, 1) * (members // 3) + (1,) * (members % 3)]
    if members > 6:
        found += [(2, members - 2), (3, 2, members - 5)]
    return found


# ── the result ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_rank_ends_with_what_the_collective_promises(name: str, kind: Collective) -> None:
    for members in WORLDS:
        for pieces in (1, 2, 5) if name == "double_tree" or kind == "broadcast" else (1,):
            for root in {0, members // 2, members - 1} if kind == "broadcast" else {0}:
                simulate(world(name, kind, members, pieces=pieces, root=root), 1000)


@pytest.mark.parametrize("members", [2, 5, 8, 17])
def test_any_number_of_servers(members: int) -> None:
    for servers in range(1, members + 1):
        for kind in ALGORITHMS["parameter_server"].collectives:
            simulate(world("parameter_server", kind, members, servers=servers, root=members - 1), 100)


@pytest.mark.parametrize("members", WORLDS)
def test_hierarchical_over_nodes_of_any_sizes(members: int) -> None:
    for number, nodes in enumerate(nodes_of(members)):
        place = flat(members, nodes=nodes)
        for kind in ALGORITHMS["hierarchical"].collectives:
            for root in range(members if kind == "broadcast" else 1):
                simulate(world("hierarchical", kind, members, arrangement=place, root=root), 1000)
        for across, kind in itertools.product(ACROSS if members < 9 else ACROSS[number::5], KINDS):
            if kind in ALGORITHMS[across].collectives:
                name = f"hierarchical+{across}"
                simulate(world(name, kind, members, arrangement=place, root=members // 2, pieces=2), 1000)


@pytest.mark.parametrize("members", WORLDS)
def test_torus_of_any_shape(members: int) -> None:
    for rows in (rows for rows in range(1, members + 1) if members % rows == 0):
        place = flat(members, shape=(rows, members // rows))
        for kind in ALGORITHMS["torus"].collectives:
            for root in {0, members // 2, members - 1} if kind == "broadcast" else {0}:
                simulate(world("torus", kind, members, arrangement=place, root=root, pieces=3), 1000)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_ranks_in_any_order_and_buffers_of_any_size(data: st.DataObject) -> None:
    name, kind = data.draw(st.sampled_from(PAIRS))
    members = data.draw(st.integers(1, 12))
    order = tuple(data.draw(st.permutations(range(members))))
    place = replace(flat(members, nodes=data.draw(st.sampled_from(nodes_of(members)))), order=order)
    size = data.draw(st.integers(0, 200))
    schedules = world(
        name, kind, members, arrangement=place, root=data.draw(st.integers(0, members - 1)),
        pieces=data.draw(st.integers(1, 6)), servers=data.draw(st.integers(1, members)),
    )  # fmt: skip
    bounds = schedules[0].bounds(size)
    assert bounds[0] == 0
    assert bounds[-1] == size
    assert len(bounds) == schedules[0].num_parts + 1
    assert list(bounds) == sorted(bounds)
    simulate(schedules, size)


# ── messages, bytes, seconds ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "kind"), COUNTS)
def test_messages_and_bytes_are_exactly_the_formulas(name: str, kind: Collective) -> None:
    steps, messages, tensors = COUNTS[name, kind]
    for members in range(2, 18):
        size = 3 * math.lcm(members, power(members), 2 * members)
        done = play(name, kind, members, size)
        assert done.steps == steps(members), members
        assert max(done.messages) == messages(members), members
        assert max(done.bytes_sent) == pytest.approx(tensors(members) * size, abs=1e-6), members


EXACT = [
    ("ring", "all_reduce"), ("ring", "reduce_scatter"), ("ring", "all_gather"),
    ("direct", "all_reduce"), ("direct", "reduce_scatter"), ("direct", "all_gather"), ("direct", "all_to_all"),
    ("one_shot", "all_reduce"), ("one_shot", "broadcast"), ("bruck", "all_reduce"), ("bruck", "reduce_scatter"),
    ("bruck", "all_gather"), ("halving_doubling", "reduce_scatter"), ("halving_doubling", "all_gather"),
    ("parameter_server", "all_reduce"), ("parameter_server", "broadcast"), ("ring", "all_to_all"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_a_played_schedule_takes_the_seconds_of_its_formula(name: str, kind: Collective) -> None:
    links = Links(latency=LATENCY, per_byte=PER_BYTE)
    for members in range(2, 18):
        size = 4 * math.lcm(members, power(members))
        seconds = find_algorithm(name).methods[kind].seconds(flat(members), size, links)
        assert play(name, kind, members, size).seconds == pytest.approx(seconds), members


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tree", "all_reduce"),
        ("tree", "broadcast"),
        ("recursive_doubling", "all_reduce"),
        ("recursive_doubling", "all_gather"),
        ("halving_doubling", "all_reduce"),
    ],
)
def test_a_power_of_two_takes_the_formula_and_other_numbers_a_little_less(name: str, kind: Collective) -> None:
    """Where ranks have unlike work, one may send on while its last message is on the way: the formulas are bounds."""
    links = Links(latency=LATENCY, per_byte=PER_BYTE)
    for members in range(2, 18):
        size = 4 * math.lcm(members, power(members))
        formula = find_algorithm(name).methods[kind].seconds(flat(members), size, links)
        seconds = play(name, kind, members, size).seconds
        assert seconds <= formula + 1e-9
        assert seconds >= formula - (log2(members) * LATENCY if members > power(members) else 1e-9), members


@pytest.mark.parametrize("members", [2, 4, 8, 16])
def test_bruck_moves_half_of_the_buffer_at_a_time(members: int) -> None:
    links = Links(latency=LATENCY, per_byte=PER_BYTE)
    seconds = find_algorithm("bruck").methods["all_to_all"].seconds(flat(members), 64 * members, links)
    assert play("bruck", "all_to_all", members, 64 * members).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_double_ring_and_torus_take_the_seconds_of_their_formulas_on_links_of_their_own(kind: Collective) -> None:
    links = Links(latency=LATENCY, per_byte=PER_BYTE)
    shapes = [(1, n) for n in range(3, 18)] + [(3, 3), (3, 4), (4, 4), (5, 3)]
    for shape in shapes:
        members = math.prod(shape)
        size = 8 * members * members
        place = flat(members, shape=shape)
        for name in ("double_ring",) if shape[0] == 1 else ("torus",):
            schedules = world(name, kind, members, arrangement=place)
            done = simulate(schedules, size, link=lambda a, b: (LATENCY, PER_BYTE), has_one_port=False)
            assert done.seconds == pytest.approx(find_algorithm(name).methods[kind].seconds(place, size, links)), shape


@pytest.mark.parametrize(("name", "shape"), [("double_ring", (1, 9)), ("torus", (3, 3)), ("torus", (2, 5))])
def test_broadcasts_over_links_of_their_own_send_half_of_the_tensor_each_way(name: str, shape: tuple[int, int]) -> None:
    place, size, pieces = flat(math.prod(shape), shape=shape), 12_800, 64
    formula = find_algorithm(name).methods["broadcast"].seconds
    schedules = world(name, "broadcast", place.members, arrangement=place, pieces=pieces, root=4)
    for latency in (0.0, 5.0):
        done = simulate(schedules, size, link=lambda a, b, latency=latency: (latency, 1.0), has_one_port=False)
        hops = sum(shape) - 1 if name == "torus" else place.members - 1
        least = formula(place, size, Links(latency=latency, per_byte=1.0)) + (hops - 1) * size / 2 / pieces
        assert done.seconds == pytest.approx(least) if latency == 0 else least - 1e-6 <= done.seconds <= 1.2 * least
    assert max(done.bytes_sent) <= size


HIERARCHIES = (
    *(("hierarchical", kind) for kind in KINDS), ("hierarchical+direct", "all_reduce"),
    ("hierarchical+direct", "reduce_scatter"), ("hierarchical+direct", "all_gather"),
    ("hierarchical+bruck", "reduce_scatter"), ("hierarchical+bruck", "all_gather"),
    ("hierarchical+ring", "all_to_all"), ("hierarchical+one_shot", "broadcast"),
)  # fmt: skip


@pytest.mark.parametrize("nodes", [(4, 4), (2, 2, 2, 2), (8, 8), (4, 4, 4, 4), (3, 3, 3), (5, 5), (1, 1, 1, 1)])
@pytest.mark.parametrize(("name", "kind"), HIERARCHIES)
def test_hierarchical_takes_the_seconds_of_its_formula(nodes: tuple[int, ...], name: str, kind: Collective) -> None:
    members = sum(nodes)
    place = flat(members, nodes=nodes)
    owner = [index for index, size in enumerate(nodes) for _ in range(size)]
    links = Links(latency=40.0, per_byte=10.0, inner_latency=4.0, inner_per_byte=1.0)

    def link(source: int, target: int) -> tuple[float, float]:
        return links.inside if owner[source] == owner[target] else links.across

    size = 12 * members * members
    done = simulate(world(name, kind, members, arrangement=place), size, link=link)
    formula = find_algorithm(name).methods[kind].seconds(place, size, links)
    if kind != "broadcast" or len(nodes) == power(len(nodes)) and nodes[0] == power(nodes[0]):
        assert done.seconds == pytest.approx(formula)
    else:  # of a tree that is not full the formula is a bound
        assert 0.6 * formula < done.seconds <= formula + 1e-9


@pytest.mark.parametrize("members", [4, 7, 16, 33])
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_a_double_tree_is_a_pipeline(members: int, kind: Collective) -> None:
    """Bytes: twice the tensor of an all-reduce, once of a broadcast, whatever n; time: near the formula in pieces."""
    size, pieces = 1 << 16, 64
    schedules = world("double_tree", kind, members, pieces=pieces)
    done = simulate(schedules, size, link=lambda a, b: (1.0, 1.0))
    assert max(done.bytes_sent) <= (2 if kind == "all_reduce" else 1) * size
    depth = log2(members + 1)
    assert done.steps <= pieces + 2 * depth + 2
    formula = find_algorithm("double_tree").methods[kind].seconds(flat(members), size, Links(latency=1.0, per_byte=1.0))
    assert formula * 0.85 < done.seconds < 1.5 * formula
    whole = simulate(world("double_tree", kind, members, pieces=1), size, link=lambda a, b: (1.0, 1.0))
    assert done.seconds < whole.seconds / 1.4


@pytest.mark.parametrize("members", range(1, 40))
def test_no_rank_is_an_inner_node_of_both_trees(members: int) -> None:
    from weft.comm.algorithms.double_tree import _Tree, height, spot

    trees = [_Tree(members, False), _Tree(members, True)]
    for position in range(members):
        inner = [bool(spot(tree.place(position), members).children) for tree in trees]
        assert sum(inner) <= 1
        assert all(tree.position(tree.place(position)) == position for tree in trees)
    assert max(spot(place, members).depth for place in range(members)) == height(members)


def test_a_chain_keeps_all_links_busy() -> None:
    done = simulate(world("ring", "broadcast", 9, pieces=100), 10_000, link=lambda a, b: (0.0, 1.0))
    assert done.seconds == 10_000 + 7 * 100
    assert max(done.bytes_sent) == 10_000


def test_one_rank_of_16k_is_scheduled_in_no_time() -> None:
    start = time.process_time()
    schedule = build_schedule("ring", "all_reduce", 9_999, 16_384)
    assert len(schedule.steps) == 2 * 16_383
    for name in ("halving_doubling", "double_tree", "bruck", "tree"):
        build_schedule(name, "all_reduce", 9_999, 16_384)
    assert time.process_time() - start < 5


# ── faults and refusals ───────────────────────────────────────────────────────────────────────────────────────────────


def broken(name: str, rank: int, step: int, change: Callable[[Step], Step]) -> list[Schedule]:
    schedules = world(name, "all_reduce", 4)
    steps = list(schedules[rank].steps)
    steps[step] = change(steps[step])
    schedules[rank] = replace(schedules[rank], steps=tuple(steps))
    return schedules


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: replace(step, sends=()), "wait for one another: rank 1 in step 5"),
        (lambda step: replace(step, receives=()), "messages that nobody takes|adds a rank|ends with"),
        (lambda step: replace(step, sends=(*step.sends, Send(2, ((0, 1),)))), "nobody takes"),
        (lambda step: replace(step, receives=tuple(replace(r, reduce=False) for r in step.receives)), "ends with"),
        (lambda step: replace(step, receives=(Receive(3, ((0, 2),), True),)), "awaits"),
    ],
)
def test_the_simulator_sees_broken_schedules(change: Callable[[Step], Step], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(broken("ring", 0, 5 if "wait" in message else 1, change), 100)


def test_the_simulator_sees_a_rank_that_is_counted_twice() -> None:
    schedules = [replace(s, steps=s.steps * 2) for s in world("one_shot", "all_reduce", 3)]
    with pytest.raises(ScheduleError, match="adds a rank to part 0 that is in it already"):
        simulate(schedules, 10)


def test_the_simulator_sees_a_part_sent_too_early() -> None:
    schedules = [replace(s, steps=s.steps[::-1]) for s in world("ring", "all_gather", 4)]
    with pytest.raises(ScheduleError, match="before it has them"):
        simulate(schedules, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rign", "all_reduce", 0, 4, {}), "'rign' does not exist. There are ring.* Did you mean ring"),
        (("hierarchical+rign", "all_reduce", 0, 4, {}), "across nodes there are ring.* Did you mean ring"),
        (("tree", "all_gather", 0, 4, {}), "'tree' does not define all_gather: it does all_reduce, broadcast. .*ring"),
        (("ring", "all_reduce", 4, 4, {}), "rank = 4 is not in a group of 4: use 0 to 3"),
        (("ring", "broadcast", 0, 4, {"root": -1}), "root = -1 is not in a group of 4"),
        (("ring", "broadcast", 0, 4, {"pieces": 0}), "pieces = 0: use 1 or more"),
        (("parameter_server", "all_reduce", 0, 4, {"servers": 5}), "servers = 5: a group of 4 has 1 to 4"),
        (("ring", "all_reduce", 0, 4, {"arrangement": flat(5)}), "holds 5 ranks, and the group has 4"),
    ],
)
def test_refusals(arguments: tuple[str, Collective, int, int, dict[str, object]], message: str) -> None:
    name, kind, rank, members, options = arguments
    with pytest.raises(CollectiveError, match=message):
        build_schedule(name, kind, rank, members, **options)  # type: ignore[arg-type]


def test_arrangements_that_do_not_hold_the_group_are_refused() -> None:
    with pytest.raises(CollectiveError, match=r"nodes = \[2, 3\] must share out all 4 ranks .* they hold 5"):
        flat(4, nodes=(2, 3))
    with pytest.raises(CollectiveError, match=r"shape = \[3, 3\] has 9 places for 8 ranks: try 2x4"):
        flat(8, shape=(3, 3))
    with pytest.raises(CollectiveError, match="must name each of the ranks 0 to 2 once"):
        Arrangement(order=(0, 1, 1), nodes=(3,), shape=(1, 3))
    with pytest.raises(CollectiveError, match="members = 0"):
        flat(0)
