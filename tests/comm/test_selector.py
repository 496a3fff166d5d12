"""Which way carries a collective: all ranks choose alike, what is asked for is what runs, and nothing stays behind."""

from __future__ import annotations

import gc
import json
import math
import threading
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.comm import _choose
from weft.comm._choose import drift_of
from weft.comm._hosts import arrange_hosts
from weft.comm.algorithms import (
    ALGORITHMS,
    ChoiceTable,
    Links,
    MethodCandidate,
    TableRow,
    build_schedule,
    find_table,
    flat,
    keep_table,
    table_to_json,
    tables_of_others,
)
from weft.comm.flat import Collectives
from weft.comm.mesh import GroupView
from weft.comm.pick import collectives_for
from weft.comm.selector import SIZES, ChosenCollectives, discover_nodes, measure_table, probe_links, share_table
from weft.errors import CollectiveError, PlanError

CPU = torch.device("cpu")
TORCH = version("torch")
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def world_view() -> GroupView:
    n = dist.get_world_size()
    return GroupView(tuple(range(n)), dist.get_rank(), dist.group.WORLD if n > 1 else None)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "weft-messages"]


def uneven(elements: int, members: int) -> list[tuple[int, int]]:
    stops = [elements * (index + 1) ** 2 // members**2 for index in range(members)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def run_all(carrier: Collectives, elements: int) -> None:
    """All three collectives over whole numbers, which every way must get exactly, with uneven regions."""
    view, n = carrier.view, carrier.view.size
    regions = uneven(elements, n)
    mine = slice(*regions[view.index])
    values = torch.arange(elements, dtype=torch.float32) % 97
    flat_sum = values * (view.index + 1)
    carrier.start_all_reduce(flat_sum)()
    total = values * (n * (n + 1) // 2)
    assert torch.equal(flat_sum, total)
    scattered = values * (view.index + 1)
    carrier.start_reduce_scatter(scattered, regions, even=False)()
    assert torch.equal(scattered[mine], total[mine])
    gathered = torch.full((elements,), -1.0)
    gathered[mine] = values[mine]
    carrier.start_all_gather(gathered, regions, even=False)()
    assert torch.equal(gathered, values)


# ── what is asked for is what runs ────────────────────────────────────────────────────────────────────────────────────


def sent_by(name: str, collective: str, n: int, rank: int, elements: int) -> int:
    """Messages that a rank sends by an algorithm's schedule when all parts hold something."""
    place = flat(n)
    schedule = build_schedule(name, collective, rank, n, arrangement=place)  # type: ignore[arg-type]
    bounds = (
        schedule.bounds_of_regions(uneven(elements, n)) if collective != "all_reduce" else schedule.bounds(elements)
    )
    assert all(a < b for a, b in zip(bounds, bounds[1:], strict=False))
    return sum(send.peer != rank for step in schedule.steps for send in step.sends)


def override_job(names: list[str]) -> dict[str, tuple[int, int]]:
    """Algorithm → messages sent, and those that its schedules have."""
    view, elements = world_view(), 4096
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        with collectives_for(view, CPU, name) as carrier:
            run_all(carrier, elements)
            methods = ALGORITHMS[name].methods
            parts = ["all_reduce", "reduce_scatter" if "reduce_scatter" in methods else "all_reduce"]
            parts += ["all_gather"] if "all_gather" in methods else []
            wanted = sum(sent_by(name, part, view.size, view.index, elements) for part in parts)
            found[name] = (carrier.num_messages, wanted)
    assert threads() == []
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_override_is_obeyed(ranks: RankPool, world: int) -> None:
    names = [name for name in ALGORITHMS if "all_reduce" in ALGORITHMS[name].methods]
    results = ranks.run(world, override_job, names, timeout=120)
    for found in results:
        assert all(sent == wanted for sent, wanted in found.values()), found
    sent = {name: sum(found[name][0] for found in results) for name in names}
    assert sent["ring"] > 0
    assert len(set(sent.values())) > 2 or world == 2


def by_size_job() -> list[int]:
    view, counts = world_view(), list[int]()
    with collectives_for(view, CPU, "tree:0-4K;backend;ring:16K-max") as carrier:
        for size_bytes in (4092, 4096, 16380, 16384):
            before = carrier.num_messages
            tensor = torch.ones(size_bytes // 4)
            carrier.start_all_reduce(tensor)()
            assert torch.equal(tensor, torch.full_like(tensor, view.size))
            counts.append(carrier.num_messages - before)
    return counts


def test_a_list_by_size_is_obeyed_to_the_byte(ranks: RankPool) -> None:
    counts = ranks.run(4, by_size_job)
    assert [sum(each) for each in zip(*counts, strict=True)] == [6, 0, 0, 24]
    assert [each[3] for each in counts] == [6] * 4  # 2(n−1) of a ring


def built_in_job() -> tuple[int, int]:
    view, used = world_view(), list[int]()
    for name in ("backend", "auto", "exchange"):
        with collectives_for(view, CPU, name, folder=Path("/nonexistent")) as carrier:
            if name != "exchange":
                run_all(carrier, 1000)
                even = [(index * 10, (index + 1) * 10) for index in range(view.size)]
                tensor = torch.full((10 * view.size,), -1.0)
                tensor[slice(*even[view.index])] = float(view.index)
                carrier.start_all_gather(tensor, even, even=True)()
                assert tensor.tolist() == [float(index) for index in range(view.size) for _ in range(10)]
            used.append(carrier.num_messages)
    return sum(used), len(threads())


def test_built_in_ways_need_no_messages_of_ours_and_no_thread(ranks: RankPool) -> None:
    assert ranks.run(3, built_in_job) == [(0, 0)] * 3


def closed_job() -> None:
    view = world_view()
    carrier = collectives_for(view, CPU, "ring")
    wait = carrier.start_all_reduce(torch.ones(100_000))
    assert threads() == ["weft-messages"]
    carrier.close()
    carrier.close()
    wait()
    assert threads() == []
    with pytest.raises(CollectiveError, match="closed"):
        carrier.start_all_reduce(torch.ones(3))
    unused = collectives_for(view, CPU, "ring")
    unused.close()
    with pytest.raises(CollectiveError, match="closed"):
        unused.start_all_reduce(torch.ones(3))
    forgotten = collectives_for(view, CPU, "ring")
    forgotten.start_all_reduce(torch.ones(3))()
    del forgotten
    gc.collect()


def test_a_closed_one_leaves_no_thread_and_says_so(ranks: RankPool) -> None:
    ranks.run(2, closed_job)


def test_one_rank_needs_nothing() -> None:
    view = GroupView((0,), 0, None)
    with collectives_for(view, CPU, "ring") as carrier:
        tensor = torch.ones(3)
        carrier.start_all_reduce(tensor)()
        carrier.start_reduce_scatter(tensor, [(0, 3)], even=True)()
        carrier.start_all_gather(tensor, [(0, 3)], even=True)()
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert share_table(table("ring"), view) == table("ring")
    assert discover_nodes(view).nodes == (1,)
    with pytest.raises(CollectiveError, match="a group of 1 rank"):
        measure_table(view)


def test_an_accelerator_chooses_itself() -> None:
    with pytest.raises(PlanError, match="on CUDA NCCL chooses"):
        collectives_for(GroupView((0,), 0, None), torch.device("cuda"), "ring")


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(choice: str, members: int = 2) -> ChoiceTable:
    candidates = (MethodCandidate(name=choice, predicted_seconds=1.0, measured_seconds=1.0),)
    rows = tuple(
        TableRow(collective=collective, size_bytes=1 << 12, choice=choice, candidates=candidates)
        for collective in KINDS
    )  # fmt: skip
    return ChoiceTable(
        members=members, nodes=(members,), backend="gloo", links=Links(latency=1e-5, per_byte=1e-9), rows=rows
    )


def divergent_job(tables: list[ChoiceTable | None]) -> list[ChoiceTable | None]:
    """Every rank has a table of its own, by which they would deadlock."""
    view = world_view()
    agreed = share_table(tables[view.index], view)
    if agreed is not None:
        with ChosenCollectives(view, agreed.choose) as carrier:
            run_all(carrier, 999)
    return [agreed]


@pytest.mark.parametrize("first", ["halving_doubling", None])
def test_all_ranks_take_the_first_ones_table(ranks: RankPool, first: str | None) -> None:
    mine = None if first is None else table(first, 3)
    found = ranks.run(3, divergent_job, [mine, table("ring", 3), table("direct", 3)])
    assert found == [[mine]] * 3


def kept_job(folders: list[str]) -> tuple[int, str]:
    view = world_view()
    with collectives_for(view, CPU, "measured", folder=Path(folders[view.index])) as carrier:
        run_all(carrier, 4096)
        return carrier.num_messages, str(carrier._choose("all_reduce", 100))


def test_measured_takes_the_table_that_the_first_rank_finds(ranks: RankPool, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    keep_table(table("ring"), folder=folders[0])
    keep_table(table("direct"), folder=folders[1])
    assert ranks.run(2, kept_job, [str(folder) for folder in folders]) == [(4, "ring")] * 2
    empty = str(tmp_path / "empty")
    with pytest.raises(PlanError, match="nothing has been measured for 2 ranks.*weft comm explain"):
        ranks.run(2, kept_job, [empty, str(folders[1])])


def test_a_damaged_table_is_none(ranks: RankPool, tmp_path: Path) -> None:
    path = keep_table(table("ring"), folder=tmp_path)
    path.write_text(table_to_json(table("ring"))[:-9])
    with pytest.raises(PlanError, match="nothing has been measured"):
        ranks.run(2, kept_job, [str(tmp_path)] * 2)


def measure_job(folder: str) -> tuple[str, float, int]:
    view = world_view()
    links = probe_links(view, flat(view.size, nodes=(1, view.size - 1)) if view.size > 2 else flat(view.size))
    assert links.latency > 0
    assert (links.inner_latency is not None) == (view.size > 2)
    told: list[str] = []
    found = measure_table(view, sizes=(1 << 10, 1 << 16), tell=told.append)
    assert len(told) == 6
    if view.index == 0:
        keep_table(found, folder=Path(folder))
    return table_to_json(found), found.links.latency, len(threads())


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_measured_is_the_same_on_all_ranks(ranks: RankPool, tmp_path: Path, world: int) -> None:
    results = ranks.run(world, measure_job, str(tmp_path), timeout=120)
    assert len({text for text, _, _ in results}) == 1
    assert {left for _, _, left in results} == {0}
    found = find_table(world, (world,), "gloo", folder=tmp_path)
    assert found is not None
    assert [(row.collective, row.size_bytes) for row in found.rows] == [(k, s) for k in KINDS for s in (1024, 65536)]
    for row in found.rows:
        measured = {each.name: each.measured_seconds for each in row.candidates if each.measured_seconds is not None}
        assert min(measured.values()) > 0
        assert measured[row.choice] <= min(measured.values()) / 0.95
        assert ("backend" if row.collective == "all_reduce" else "exchange") in measured
        assert all(bool(each.note) == (each.measured_seconds is None) for each in row.candidates)


def one_host_job() -> None:
    view = world_view()
    nothing = replace(table("ring"), rows=())
    assert nothing.choose("all_reduce", 4096) is None
    assert discover_nodes(view).nodes == (view.size,)
    assert [math.log2(size) % 2 for size in SIZES] == [0.0] * len(SIZES)


def test_ranks_of_one_host_find_one_node(ranks: RankPool) -> None:
    ranks.run(4, one_host_job)


def test_ranks_are_taken_host_by_host() -> None:
    place = arrange_hosts([7, 9, 7, 9])
    assert (place.order, place.nodes, place.shape) == ((0, 2, 1, 3), (2, 2), (2, 2))
    place = arrange_hosts([5, 5, 8])
    assert (place.order, place.nodes) == ((0, 1, 2), (2, 1))
    assert arrange_hosts([1, 2, 3]).nodes == (1, 1, 1)


# ── what has changed since ────────────────────────────────────────────────────────────────────────────────────────────


def budget_job() -> tuple[list[int], list[str]]:
    told: list[str] = []
    found = measure_table(world_view(), sizes=(1 << 16, 1 << 10), budget_seconds=1e-6, tell=told.append)
    return [row.size_bytes for row in found.rows], told[3:]


def test_a_budget_takes_the_shortest_sizes_and_one_at_least(ranks: RankPool) -> None:
    for sizes, told in ranks.run(2, budget_job):
        assert sizes == [1 << 10] * 3
        assert told == ["64K and more left out: 0 s would not do"]


def taking(seconds: float) -> ChoiceTable:
    """A table that says that everything takes so long."""
    found = table("ring")
    each = MethodCandidate(name="ring", predicted_seconds=1.0, measured_seconds=seconds)
    return replace(found, rows=tuple(replace(row, candidates=(each,)) for row in found.rows))


def drift_job(folder: str) -> list[tuple[float, list[str]]]:
    view, results = world_view(), list[tuple[float, list[str]]]()
    for seconds in (1e-7, 1000.0):
        if view.index == 0:
            keep_table(taking(seconds), folder=Path(folder))
        dist.barrier()
        with warnings.catch_warnings(record=True) as said, patch.object(_choose, "_CHECKED_SECONDS", 1e4):
            warnings.simplefilter("always")
            with collectives_for(view, CPU, "measured", folder=Path(folder)) as carrier:
                before = carrier.num_messages
                run_all(carrier, 100)
                assert carrier.num_messages - before == 4  # of a ring, whatever it takes
                results.append((drift_of(carrier, taking(seconds)), [str(each.message) for each in said]))
        dist.barrier()
    return results


def test_links_that_have_drifted_are_reported_and_choices_stay(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, drift_job, str(tmp_path))
    assert [drift for drift, _ in first] == [drift for drift, _ in second]  # the same figures on all ranks
    assert first[0][0] > 1.3
    assert first[1][0] < 1 / 1.3
    for _, said in first:
        assert len(said) == 1
        assert "collectives of 2 ranks take" in said[0]
        assert "weft comm explain --measure --processes 2" in said[0]
    assert [said for _, said in second] == [[], []]


def test_nothing_short_means_no_drift() -> None:
    with ChosenCollectives(GroupView((0,), 0, None)) as carrier:
        assert drift_of(carrier, table("ring")) == 1.0


def missing_job(folder: str) -> str:
    with pytest.raises(PlanError) as caught:
        collectives_for(world_view(), CPU, "measured", folder=Path(folder))
    return str(caught.value)


def test_a_table_of_other_versions_is_mentioned(ranks: RankPool, tmp_path: Path) -> None:
    path = keep_table(table("ring"), folder=tmp_path)
    data = json.loads(path.read_text())
    data["circumstances"]["torch"] = "1.0"
    path.unlink()
    (tmp_path / "of-another-torch.json").write_text(json.dumps(data))
    (tmp_path / "damaged.json").write_text("[")
    (tmp_path / "a-list.json").write_text("[]")
    assert tables_of_others(2, (2,), "gloo", folder=tmp_path) == f" One was measured under torch 1.0, now {TORCH}."
    assert tables_of_others(3, (3,), "gloo", folder=tmp_path) == ""
    assert tables_of_others(2, (2,), "gloo", folder=tmp_path / "none") == ""
    first, second = ranks.run(2, missing_job, str(tmp_path))
    assert f"as these do. One was measured under torch 1.0, now {TORCH}. Run weft comm explain" in first
    assert "as these do. Run weft comm explain" in second
