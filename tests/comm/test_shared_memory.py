"""The shared-memory backend: every collective, dtype, operation and size against a reference, bit for bit."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from shared_memory_jobs import (
    ARITHMETIC,
    BITWISE,
    FLOATS,
    INTEGERS,
    data_of,
    everyones,
    group,
    movements,
    reduced,
    reductions,
    same,
    traces,
)

from weft.comm.mesh import Mesh
from weft.comm.reduce import start_all_gather, start_all_reduce, start_reduce_scatter
from weft.comm.shared_memory import shared_memory_group
from weft.config.plan import MeshPlan
from weft.errors import CollectiveError

SIZES = (0, 1, 3, 127, 1_000, 9_001, 300_007)
WEFT = "cpu:weft"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_reductions(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    assert ranks.run(world, reductions, [(dtype, op) for op in ARITHMETIC], SIZES, backend=WEFT) == [[]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_integer_and_truth_reductions(ranks: RankPool, world: int) -> None:
    cases = [(dtype, op) for dtype in INTEGERS for op in (*ARITHMETIC, *BITWISE)]
    cases += [(torch.bool, op) for op in ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE)]
    assert ranks.run(world, reductions, cases, (1, 1_000, 70_001), backend=WEFT) == [[]] * world


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_movements(ranks: RankPool, world: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    assert ranks.run(world, movements, dtypes, (0, 1, 5, 1_001, 150_003), backend=WEFT) == [[]] * world


def test_eight_ranks(ranks: RankPool) -> None:
    cases = [(torch.float32, "SUM"), (torch.bfloat16, "AVG")]
    assert ranks.run(8, reductions, cases, (0, 7, 1_000, 300_007), backend=WEFT) == [[]] * 8
    assert ranks.run(8, movements, (torch.float32,), (0, 7, 40_001), backend=WEFT) == [[]] * 8


def _large() -> list[str]:
    """Above the size from which copying is measured first; then sizes around a slot's."""
    wrong = reductions([(torch.float32, "SUM"), (torch.bfloat16, "SUM")], (5_000_011,))
    slot = group().engine.manner.slot_bytes
    return wrong + reductions([(torch.uint8, "SUM")], [slot + more for more in (-1, 0, 1)] + [2 * slot, 2 * slot + 1])


def test_large_tensors_and_the_edges_of_a_slot(ranks: RankPool) -> None:
    assert ranks.run(2, _large, backend=WEFT) == [[]] * 2
    assert ranks.run(3, _large, backend=WEFT) == [[]] * 3


def _beside_gloo() -> bool:
    """At two ranks a sum has one order only, so Gloo's is the same to the last bit, in half precision, too."""
    gloo = dist.new_group(backend="gloo")
    rights: list[bool] = []
    for dtype in FLOATS:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            ours, theirs = (data_of(dist.get_rank(), 100_003, dtype) for _ in range(2))
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op, group=gloo)
            rights.append(same(ours, theirs))
    return all(rights)


def test_bit_equal_to_gloo_at_two_ranks(ranks: RankPool) -> None:
    assert ranks.run(2, _beside_gloo, backend=WEFT) == [True, True]


def _half_errors(dtype: torch.dtype) -> tuple[float, float]:
    """Largest error against the sum in fp64, in units of the result's last place: ours, and Gloo's."""
    gloo = dist.new_group(backend="gloo")
    parts = everyones(50_000, dtype)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    unit = torch.maximum(exact.abs(), torch.tensor(1e-3, dtype=torch.float64)) * torch.finfo(dtype).eps
    errors: list[float] = []
    for where in (None, gloo):
        mine = parts[dist.get_rank()].clone()
        dist.all_reduce(mine, group=where)
        errors.append(((mine.double() - exact).abs() / unit).max().item())
    return errors[0], errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(ranks: RankPool, dtype: torch.dtype) -> None:
    for ours, theirs in ranks.run(4, _half_errors, dtype, backend=WEFT):
        assert ours <= 0.51
        assert theirs > 1.0  # Gloo rounds after each addition


def _specials() -> list[str]:
    """Every fp16 and bf16 value through a sum with zero, and infinities and NaN through minima and maxima."""
    wrong: list[str] = []
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
        value = bits.view(dtype).clone()
        mine = value.clone() if dist.get_rank() == 0 else torch.zeros_like(value)
        dist.all_reduce(mine)
        if not torch.equal(mine.float().nan_to_num(9, 8, 7), value.float().nan_to_num(9, 8, 7)):
            wrong.append(f"{dtype} + 0")
        value[value.float().abs() > 1.6e38] = 0  # twice as much is infinite in fp32, too
        halves = value.clone()
        dist.all_reduce(halves, dist.ReduceOp.AVG)
        if not torch.equal(halves.float().nan_to_num(9, 8, 7), value.float().nan_to_num(9, 8, 7)):
            wrong.append(f"average of equal {dtype}")
    row = torch.tensor([float("nan"), 1.0, float("inf"), -1.0])
    for op, there in (("MIN", [1.0, float("nan"), 2.0, -float("inf")]), ("MAX", [1.0, float("nan"), 2.0, 5.0])):
        mine = row.clone() if dist.get_rank() == 0 else torch.tensor(there)
        dist.all_reduce(mine, getattr(dist.ReduceOp, op))
        expected = (torch.minimum if op == "MIN" else torch.maximum)(row, torch.tensor(there))
        if not torch.equal(mine.nan_to_num(9), expected.nan_to_num(9)):
            wrong.append(op)
    return wrong


def test_infinities_nans_and_denormals(ranks: RankPool) -> None:
    assert ranks.run(2, _specials, backend=WEFT) == [[]] * 2


def _strided() -> bool:
    rank = dist.get_rank()
    mine = data_of(rank, 600, torch.float32).view(20, 30).t()
    dist.all_reduce(mine, async_op=True).wait()
    expected = reduced(everyones(600, torch.float32), "SUM").view(20, 30).t()
    complex_one = torch.complex(torch.full((3,), 1.0 + rank), torch.ones(3))
    dist.all_reduce(complex_one)
    total = torch.complex(torch.full((3,), 3.0), torch.full((3,), 2.0))
    return same(mine, expected) and torch.equal(complex_one, total)


def test_strided_and_complex_tensors(ranks: RankPool) -> None:
    assert ranks.run(2, _strided, backend=WEFT) == [True] * 2


def _in_place(sizes: list[int]) -> tuple[list[str], int]:
    """Tensors of the arena on all ranks, and on one rank only."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), list[str]()
    for size in sizes:
        expected = reduced(everyones(size, torch.float32), "SUM")
        for holders in (range(world), range(1)):
            shared = group().allocate(size) if rank in holders else torch.empty(size)
            shared.copy_(data_of(rank, size, torch.float32))
            dist.all_reduce(shared)
            if not same(shared, expected):
                wrong.append(f"all_reduce {size} {holders}")
            shared.copy_(data_of(rank, size, torch.float32))
            cuts = [size * i // world for i in range(world + 1)]
            parts = [shared[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            group().reduce_scatter_regions(parts, parts[rank]).wait()
            if not same(parts[rank], expected[cuts[rank] : cuts[rank + 1]]):
                wrong.append(f"reduce_scatter {size} {holders}")
            group().all_gather_regions(parts[rank], parts).wait()
            if not same(shared, expected):
                wrong.append(f"all_gather {size} {holders}")
    return wrong, group().engine.in_place_calls


def test_tensors_in_the_arena_are_reduced_where_they_lie(ranks: RankPool) -> None:
    sizes = [0, 1, 1_000, 100_003, 400_001]
    for world in (2, 3):
        for wrong, in_place in ranks.run(world, _in_place, sizes, backend=WEFT):
            assert wrong == []
            assert in_place == 3 * 2  # the two sizes above 64 KiB, on all ranks


def _allocations() -> tuple[int, int, bool, str]:
    first = group().allocate(1000, 1000)
    taken = group().engine.arena_taken_bytes
    part = first[10:20]
    del first
    gc.collect()
    kept = group().engine.arena_taken_bytes
    part.fill_(3.0)
    del part
    gc.collect()
    with pytest.raises(CollectiveError, match=r"do not fit any more .* make this one with torch\.empty") as caught:
        group().allocate(1 << 29)
    return taken, kept, group().engine.arena_taken_bytes == 0, str(caught.value)[:20]


def test_memory_of_the_arena_comes_back(ranks: RankPool) -> None:
    for taken, kept, is_free, text in ranks.run(2, _allocations, backend=WEFT):
        assert taken == kept == 4_001_792
        assert is_free
        assert text == "2,147,483,648 bytes "


def _overlap() -> tuple[bool, bool, bool]:
    """An operation that nobody waits for ends on its own, behind those before it."""
    if dist.get_rank() == 1:
        time.sleep(0.2)
    mine = [torch.full((50_000,), float(i + dist.get_rank())) for i in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in mine]
    was_done = works[-1].is_completed() if dist.get_rank() == 0 else False
    limit = time.monotonic() + 10
    while not works[-1].is_completed() and time.monotonic() < limit:
        time.sleep(0.005)
    rights = [torch.equal(tensor, torch.full((50_000,), 2.0 * i + 1)) for i, tensor in enumerate(mine)]
    return was_done, works[-1].is_success(), all(rights)


def test_asynchronous_operations_go_on_by_themselves_in_order(ranks: RankPool) -> None:
    assert ranks.run(2, _overlap, backend=WEFT) == [(False, True, True)] * 2


def _dropped() -> bool:
    """A tensor that only the operation still needs stays until it is done."""
    kept = torch.full((100_000,), float(dist.get_rank()))
    for _ in range(30):
        dist.all_reduce(torch.full((100_000,), 1.0), async_op=True)
        torch.full((100_000,), 5.0)
    dist.all_reduce(kept)
    return torch.equal(kept, torch.ones(100_000))


def test_a_work_that_nobody_keeps_keeps_its_tensor(ranks: RankPool) -> None:
    assert ranks.run(2, _dropped, backend=WEFT) == [True, True]


def _futures() -> tuple[list[float], bool]:
    works = [dist.all_reduce(torch.full((1_000,), float(i)), async_op=True) for i in range(5)]
    found = [work.get_future().wait()[0][0].item() for work in works]
    late = dist.all_reduce(torch.ones(3), async_op=True)
    late.wait()
    return found, late.get_future().done()


def test_futures_are_completed(ranks: RankPool) -> None:
    assert ranks.run(2, _futures, backend=WEFT) == [([0.0, 2.0, 4.0, 6.0, 8.0], True)] * 2


def _waited_for_twice() -> tuple[bool, bool]:
    """By a thread that completes the future, and by the caller: both wait until it is done."""
    if dist.get_rank() == 1:
        time.sleep(0.3)
    value = torch.ones(1_000)
    work = dist.all_reduce(value, async_op=True)
    future = work.get_future()
    time.sleep(0.05)
    was_done = work.is_completed() and dist.get_rank() == 0
    work.wait()
    return was_done, value[0].item() == 2.0 and future.wait()[0][0].item() == 2.0


def test_a_work_and_its_future_may_both_be_waited_for(ranks: RankPool) -> None:
    assert ranks.run(2, _waited_for_twice, backend=WEFT) == [(False, True)] * 2


def _dropped_groups() -> tuple[dict[str, int], dict[str, int]]:
    """Engines that nobody closed end with their last reference."""
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    before = traces()
    engine = group().engine
    group().engine = group()._mailbox = _Nothing()  # what a group holds is all that holds its engine
    assert traces()["mappings"] == 1
    del engine
    gc.collect()
    after = traces()
    dist.destroy_process_group()
    return before, after


class _Nothing:
    def leave(self) -> None:
        """There is none."""

    close = leave


def test_an_engine_that_nobody_holds_is_gone(ranks: RankPool) -> None:
    for before, after in ranks.run(2, _dropped_groups, backend=WEFT):
        assert (before["mappings"], after["mappings"]) == (1, 0)
        assert after["threads"] < before["threads"]


def _regions() -> tuple[bool, int, int]:
    """What `start_reduce_scatter` and its kin make of regions of unequal size, one of them empty."""
    mesh = Mesh(MeshPlan(replicate=3), torch.device("cpu"))
    view, size = mesh["data"], 1_000
    regions = [(0, 600), (600, 600), (600, 1_000)]
    flat = data_of(view.index, size, torch.float32)
    start_reduce_scatter(flat, regions, view, even=False)()
    expected = reduced(everyones(size, torch.float32), "SUM")
    own = slice(*regions[view.index])
    is_right = same(flat[own], expected[own])
    start_all_gather(flat, regions, view, even=False)()
    is_right &= same(flat, expected)
    start_all_reduce(flat, view)()
    served = shared_memory_group(view.group)
    assert served is not None
    return is_right, served.served["reduce_scatter_regions"], served.served["all_gather_regions"]


def test_regions_of_unequal_size_are_one_operation(ranks: RankPool) -> None:
    assert ranks.run(3, _regions, backend=WEFT) == [(True, 1, 1)] * 3


def _refusals() -> list[str]:
    texts: list[str] = []
    tries = (
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
        lambda: group().reduce_scatter_regions([torch.ones(3), torch.ones(3)], torch.ones(4)),
        lambda: group().all_gather_regions(torch.ones(3), [torch.ones(2), torch.ones(2)]),
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]),
    )
    for attempt in tries:
        with pytest.raises(CollectiveError) as caught:
            attempt()
        texts.append(str(caught.value))
    dist.all_reduce(torch.ones(3))  # the group still works: nothing was sent
    return texts


def test_what_cannot_be_done_is_said_before_anything_is_sent(ranks: RankPool) -> None:
    for texts in ranks.run(2, _refusals, backend=WEFT):
        assert "a reduction (band) of torch.float32 is not defined" in texts[0]
        assert "a reduction (avg) of torch.bool" in texts[1]
        assert "float8" in texts[2]
        assert "output has 4 elements" in texts[3]
        assert "gives 3 elements" in texts[4]
        assert "cannot cut dim 0 of length 4 into [1, 2]" in texts[5]


def _traces() -> tuple[dict[str, int], dict[str, int]]:
    """Before and after forty groups, used in every way."""
    before = traces()
    for _ in range(10):
        one = dist.new_group(timeout=timedelta(seconds=20))
        found = shared_memory_group(one)
        assert found is not None
        dist.all_reduce(torch.ones(300_000), group=one, async_op=True).get_future().wait()
        held = found.allocate(1_000)
        dist.all_reduce(held, group=one)
        dist.destroy_process_group(one)
        del one, found, held
        gc.collect()
    dist.barrier()
    return before, traces()


def test_groups_leave_nothing_behind(ranks: RankPool) -> None:
    for before, after in ranks.run(2, _traces, backend=WEFT):
        assert before["mappings"] == after["mappings"] == 1
        assert after["descriptors"] <= before["descriptors"] + 2  # Gloo opens one late
        assert after["threads"] <= before["threads"]
