"""Optimizers that look at whole parameters, on real ranks that each hold a part of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from optimizer_shards import (
    SHAPES,
    columns_of,
    draw,
    gather,
    layout_of,
    local_part,
    local_shape,
    make_shard,
    reference_adafactor,
    reference_lamb,
    reference_lars,
    relative_difference,
    scatter,
    set_gradients,
    train,
    whole_groups,
)
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan
from weft.run.engine.optimizers import ShardOptimizer
from weft.run.engine.optimizers.adafactor import Adafactor
from weft.run.engine.optimizers.adamw import AdamW
from weft.run.engine.optimizers.lamb import LAMB
from weft.run.engine.optimizers.lars import LARS
from weft.techniques.core import CheckpointShard, ParameterLayout, Shard

Name = Literal["adamw", "lamb", "lars", "adafactor"]
Cut = Literal["none", "anywhere", "parameter", "rows", "rows and ties"]
Result = tuple[dict[str, Tensor], list[CheckpointShard]]

PLANS: list[tuple[MeshPlan, Cut]] = [
    (MeshPlan(tensor=2), "none"),
    (MeshPlan(replicate=2), "anywhere"),
    (MeshPlan(shard=3), "rows"),
    (MeshPlan(shard=2, tensor=2), "anywhere"),
    (MeshPlan(replicate=2, tensor=2), "parameter"),
    (MeshPlan(shard=2, tensor=2), "rows"),
    (MeshPlan(replicate=2, shard=2), "rows"),
    (MeshPlan(replicate=2, tensor=2), "none"),
    (MeshPlan(replicate=2, shard=2), "rows and ties"),
]
WHOLE_ROWS = [(plan, cut) for plan, cut in PLANS if cut != "anywhere"]
"""What Adafactor asks for."""


def cases(*names: Name) -> list[tuple[MeshPlan, Cut, Name]]:
    return [(plan, cut, name) for name in names for plan, cut in (WHOLE_ROWS if name == "adafactor" else PLANS)]


def name_plan(value: object) -> str | None:
    if isinstance(value, MeshPlan):
        return "-".join(f"{a}{s}" for a, s in vars_of(value).items() if s > 1)
    return None


def vars_of(plan: MeshPlan) -> dict[str, int]:
    return {axis: int(getattr(plan, axis)) for axis in ("pipeline", "replicate", "shard", "tensor")}


def shards_of(
    mesh: Mesh, runs: list[Any], values: dict[str, Tensor], *, counts: bool = True, **others: Any
) -> list[Shard]:
    """Of what the tensor axis cuts every rank counts; of the rest, in a shard of its own, the first."""
    cut, copied = ([run for run in runs if bool(run[0].split) == is_cut] for is_cut in (True, False))
    first = counts and mesh.index("tensor") == 0
    return [make_shard(cut, values, counts=counts, **others), make_shard(copied, values, counts=first, **others)]


def cut_shards(mesh: Mesh, cut: Cut, values: dict[str, Tensor]) -> list[Shard]:
    """This rank's shards of `values` as the gradient reducers would cut them."""
    layouts = [layout_of(name, mesh.size("tensor"), mesh.index("tensor")) for name in SHAPES]
    if cut == "none":
        runs = [(layout, 0, local_shape(layout).numel()) for layout in layouts]
        first = mesh.index("data") == 0
        return shards_of(mesh, runs[:3], values, gap=1, counts=first) + shards_of(mesh, runs[3:], values, counts=first)
    if cut == "rows and ties":
        kept_out = layouts[0]
        quarter = kept_out.shape.numel() // 4
        mine = [(kept_out, mesh.index("data") * quarter, quarter)]
        shards = row_shards(mesh, layouts[1:], values)
        return shards + shards_of(mesh, mine, values, cut_group=mesh["data"], cut_matrices=columns_of(kept_out))
    if cut == "rows":
        return row_shards(mesh, layouts, values)
    view = mesh["data"]
    if cut == "parameter":
        mine = [
            (layout, 0, local_shape(layout).numel()) for i, layout in enumerate(layouts) if i % view.size == view.index
        ]
        return shards_of(mesh, mine, values, gap=2, cut_group=view)
    total = sum(local_shape(layout).numel() for layout in layouts)
    share = -(-total // view.size)
    low, high = view.index * share, min((view.index + 1) * share, total)
    results: list[tuple[ParameterLayout, int, int]] = []
    first = 0
    for layout in layouts:
        size = local_shape(layout).numel()
        start, stop = max(low - first, 0), min(high - first, size)
        if start < stop:
            results.append((layout, start, stop - start))
        first += size
    return shards_of(mesh, results, values, gap=1, cut_group=view)


def row_shards(mesh: Mesh, layouts: list[ParameterLayout], values: dict[str, Tensor]) -> list[Shard]:
    """One shard per parameter, cut between rows as `fully_shard` does."""
    view = mesh["shard"]
    shards: list[Shard] = []
    for layout in layouts:
        shape = local_shape(layout)
        rows, row = (shape[0], shape[1:].numel()) if len(shape) else (1, 1)
        chunk = -(-rows // view.size)
        start, stop = min(view.index * chunk, rows), min((view.index + 1) * chunk, rows)
        runs = [(layout, start * row, (stop - start) * row)] if stop > start else []
        first, columns = mesh.index("replicate") == 0, columns_of(layout)
        shards += shards_of(mesh, runs, values, cut_group=view, counts=first, cut_matrices=columns)
    return shards


def make(name: Name, shards: list[Shard], mesh: Mesh) -> ShardOptimizer:
    match name:
        case "adamw":
            return AdamW(shards, whole_groups(0.1))
        case "lamb":
            return LAMB(shards, whole_groups(0.1), mesh, betas=(0.9, 0.99))
        case "lars":
            return LARS(shards, whole_groups(0.1), mesh)
        case "adafactor":
            return Adafactor(shards, whole_groups(0.1), mesh)


def train_on_a_rank(plan: MeshPlan, cut: Cut, name: Name, dtype: torch.dtype) -> Result:
    torch.set_num_threads(1)
    mesh = Mesh(plan, torch.device("cpu"))
    shards = cut_shards(mesh, cut, draw(0, dtype=dtype))
    optimizer = make(name, shards, mesh)
    train(optimizer, shards, 4, learning_rate=0.3)
    return gather(shards), [replace(stored, tensor=stored.tensor.clone()) for stored in optimizer.checkpoint_shards()]


def reference(name: Name) -> dict[str, Tensor]:
    match name:
        case "lamb":
            return reference_lamb(4, 0.3, 0.1, (0.9, 0.99), 1e-6)
        case "lars":
            return reference_lars(4, 0.3, 0.1, 0.9)
        case _:
            return reference_adafactor(4, 0.3, 0.1)


def check_against(expected: dict[str, Tensor], results: list[Result], tolerance: float) -> None:
    """Every rank's own elements equal the reference, and together they are all there are."""
    whole = {name: torch.full_like(value, math.nan) for name, value in expected.items()}
    for masters, _ in results:
        mine = {name: torch.where(masters[name].isnan(), expected[name], masters[name]) for name in expected}
        assert relative_difference(mine, expected) <= tolerance
        for name, value in masters.items():
            whole[name].copy_(torch.where(value.isnan(), whole[name], value))
    assert relative_difference(whole, expected) <= tolerance


@pytest.mark.parametrize(("plan", "cut", "name"), cases("lamb", "lars", "adafactor"), ids=name_plan)
def test_whole_parameter_optimizers_equal_one_process(ranks: RankPool, plan: MeshPlan, cut: Cut, name: Name) -> None:
    results = ranks.run(plan.world_size, train_on_a_rank, plan, cut, name, torch.float64)
    check_against(reference(name), results, 1e-10)


@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor"])
def test_fp32_ranks_stay_as_close_as_fp32_can(ranks: RankPool, name: Name) -> None:
    results = ranks.run(4, train_on_a_rank, MeshPlan(shard=2, tensor=2), "rows", name, torch.float32)
    check_against(reference(name), results, 1e-5)


def written_once(results: list[Result]) -> dict[str, Tensor]:
    """Whole states from the checkpoint shards that count, each element of which must come from exactly one rank."""
    wholes: dict[str, Tensor] = {}
    for _, stored_shards in results:
        for stored in stored_shards:
            if stored.counts:
                whole = wholes.setdefault(stored.name, torch.full(stored.shape, math.nan, dtype=torch.float64))
                before = int(whole.isnan().sum())
                scatter(stored, whole)
                assert before - int(whole.isnan().sum()) == stored.tensor.numel(), f"{stored.name} is written twice"
    assert not [name for name, whole in wholes.items() if whole.isnan().any()]
    return wholes


@pytest.mark.parametrize(("plan", "cut", "name"), cases("lamb", "adafactor"), ids=name_plan)
def test_states_of_all_ranks_make_the_states_of_one_process(
    ranks: RankPool, plan: MeshPlan, cut: Cut, name: Name
) -> None:
    actual = written_once(ranks.run(plan.world_size, train_on_a_rank, plan, cut, name, torch.float64))
    mesh = Mesh(MeshPlan(), torch.device("cpu"))
    shards = cut_shards(mesh, "none", draw(0))
    alone = make(name, shards, mesh)
    train(alone, shards, 4, learning_rate=0.3)
    expected = written_once([({}, alone.checkpoint_shards())])
    assert actual.keys() == expected.keys()
    assert relative_difference(actual, expected) <= 1e-10


def resume_on_a_rank(
    plan: MeshPlan, cut: Cut, name: Name, saved: dict[str, Tensor], masters: dict[str, Tensor]
) -> Result:
    torch.set_num_threads(1)
    mesh = Mesh(plan, torch.device("cpu"))
    shards = cut_shards(mesh, cut, masters)
    optimizer = make(name, shards, mesh)
    for stored in optimizer.checkpoint_shards():
        whole = saved[stored.name]
        flat = stored.split.slice(whole).reshape(-1)
        stored.tensor.copy_(flat[stored.start : stored.start + stored.tensor.numel()])
    set_gradients(shards, draw(105, 2.0))
    optimizer.step(0.3, 0.5)
    return gather(shards), []


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor"])
def test_states_load_into_another_plan(ranks: RankPool, name: Name) -> None:
    before, after = (MeshPlan(shard=2, tensor=2), "rows"), (MeshPlan(replicate=3), "parameter")
    results = ranks.run(4, train_on_a_rank, *before, name, torch.float64)
    saved = written_once(results)
    masters = {name: torch.full(shape, math.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    for actual, _ in results:
        for key, value in actual.items():
            masters[key].copy_(torch.where(value.isnan(), masters[key], value))
    mesh = Mesh(MeshPlan(), torch.device("cpu"))
    shards = cut_shards(mesh, "none", draw(0))
    alone = make(name, shards, mesh)
    train(alone, shards, 5, learning_rate=0.3)
    check_against(gather(shards), ranks.run(3, resume_on_a_rank, *after, name, saved, masters), 1e-10)


def tied_copies_on_a_rank(name: str) -> list[tuple[float, float]]:
    """Both model parts of a rank hold the same tied parameter, its rows cut over two data ranks."""
    torch.set_num_threads(1)
    mesh = Mesh(MeshPlan(shard=2), torch.device("cpu"))
    view, values = mesh["shard"], draw(0)
    layout = layout_of(name)
    half = layout.shape.numel() // 2
    cut = [(layout, view.index * half, half)]
    shards = [make_shard(cut, values, cut_group=view, cut_matrices=columns_of(layout)) for _ in range(2)]
    alone = make_shard([(layout, 0, 2 * half)], values)
    for held in (shards, [alone]):
        optimizer = Adafactor(held, whole_groups(), mesh)
        for step in (1, 2):
            set_gradients(held, draw(step))
            optimizer.step(0.1)
    mine = alone.master[view.index * half : (view.index + 1) * half]
    return [(float((shard.master - mine).abs().max()), float(shard.master.abs().max())) for shard in shards]


@pytest.mark.parametrize("name", ["embedding.weight", "norm.weight"])
def test_tied_copies_on_one_rank_count_once(ranks: RankPool, name: str) -> None:
    for copies in ranks.run(2, tied_copies_on_a_rank, name):
        assert all(difference < 1e-12 < size for difference, size in copies)


def test_local_parts_join_to_the_whole() -> None:
    """The helper of these tests cuts as the layouts say."""
    whole = draw(0)["attention.qkv"]
    layouts = [layout_of("attention.qkv", 2, index) for index in range(2)]
    assert layouts[0].split
    assert torch.equal(layouts[0].split.join([local_part(layout, whole) for layout in layouts]), whole)
