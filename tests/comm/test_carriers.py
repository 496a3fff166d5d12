"""A group whose ranks share memory: what is named goes by messages beside it, and everything else stays there."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.comm.algorithms import find_table, keep_table
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.comm.pick import collectives_for
from weft.comm.selector import measure_table
from weft.comm.shared_memory import shared_memory_group
from weft.errors import CollectiveError

CPU = torch.device("cpu")
METHODS = ("allreduce", "reduce_scatter_regions", "all_gather_regions")


def world_view() -> GroupView:
    return GroupView(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def carried(algorithm: str) -> tuple[int, list[int]]:
    """Messages of an all-reduce, a reduce-scatter and an all-gather, and how many calls shared memory served."""
    view = world_view()
    shared = shared_memory_group(view.group)
    assert shared is not None
    before = dict(shared.served)
    regions = [(index * 6, (index + 1) * 6) for index in range(view.size)]
    mine = slice(*regions[view.index])
    values = torch.arange(6.0 * view.size)
    with collectives_for(view, CPU, algorithm) as carrier:
        whole, part, rest = values * (view.index + 1), values * (view.index + 1), torch.full_like(values, -1.0)
        rest[mine] = values[mine]
        carrier.start_all_reduce(whole)()
        carrier.start_reduce_scatter(part, regions, even=True)()
        carrier.start_all_gather(rest, regions, even=True)()
        total = values * (view.size * (view.size + 1) / 2)
        assert torch.equal(whole, total)
        assert torch.equal(part[mine], total[mine])
        assert torch.equal(rest, values)
        return carrier.num_messages, [shared.served[name] - before.get(name, 0) for name in METHODS]


def each_way() -> dict[str, tuple[int, list[int]]]:
    return {name: carried(name) for name in ("auto", "backend", "exchange", "ring", "tree", "hierarchical")}


def test_what_is_named_sends_messages_and_the_rest_shares_memory(ranks: RankPool) -> None:
    for found in ranks.run(3, each_way, backend="cpu:weft"):
        assert found["auto"] == found["backend"] == (0, [1, 1, 1])
        assert found["exchange"] == (0, [1, 0, 0])  # it does no all-reduce
        assert found["ring"] == (4 + 2 + 2, [0, 0, 0])
        assert found["tree"][0] > 0
        assert found["tree"][1] == found["hierarchical"][1] == [0, 0, 0]
        assert found["hierarchical"][0] > 0


def left_alone() -> tuple[str, float]:
    """Rank 0 waits in memory for those that wait for its messages."""
    view, start = replace(world_view(), group=dist.new_group()), time.monotonic()
    flat = torch.ones(9)
    with Messenger(view, timeout_seconds=1.0) as messenger:
        by_messages = partial(messenger.run, flat, "all_reduce", "ring")
        act = partial(dist.all_reduce, flat, group=view.group) if view.index == 0 else by_messages
        with pytest.raises(CollectiveError) as caught:
            act()
    return str(caught.value), time.monotonic() - start


def test_who_gives_up_on_messages_releases_those_that_wait_in_memory(ranks: RankPool) -> None:
    first, *others = ranks.run(3, left_alone, backend="cpu:weft", timeout=60)
    assert "All-reduce (sum) of 36 bytes was given up" in first[0]
    assert first[1] < 10.0
    assert all("rank 0 sent nothing within the deadline" in text for text, _ in others)


def measured(folder: str) -> tuple[str, set[str]]:
    view = world_view()
    table = measure_table(view, sizes=(1 << 12,))
    names = {each.name for each in table.rows[1].candidates if each.measured_seconds is not None}
    if view.index == 0:
        keep_table(table, folder=Path(folder))
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of drift: a busy machine has it
        found = collectives_for(view, CPU, "measured", folder=Path(folder))
    with found as carrier:
        flat = torch.ones(1024)
        carrier.start_all_reduce(flat)()
        assert torch.equal(flat, torch.full_like(flat, view.size))
    return table.backend, names


def test_a_table_of_one_host_has_its_shared_memory_beside_the_algorithms(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, measured, str(tmp_path), backend="cpu:weft")
    assert results[0] == results[1]
    backend, names = results[0]
    assert backend == "weft"
    assert names >= {"backend", "exchange", "ring"}
    assert find_table(2, (2,), "weft", folder=tmp_path) is not None
    assert find_table(2, (2,), "gloo", folder=tmp_path) is None
