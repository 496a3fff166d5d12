"""The moving average of weights, and the loss scale of fp16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_shards import SHAPES, draw, layout_of, make_shard, set_gradients, whole_groups
from torch import Tensor

from weft.config.document import JsonObject
from weft.errors import CheckpointError, RecipeError
from weft.run.engine import LossScale
from weft.run.engine._average import WeightAverage
from weft.run.engine.optimizers.sgd import SGD
from weft.techniques.core import Shard


def two_shards() -> list[Shard]:
    values = draw(0, dtype=torch.float32)
    return [
        make_shard([(layout_of("embedding.weight"), 5, 80), (layout_of("scale"), 0, 1)], values, gap=2),
        make_shard([(layout_of("norm.weight"), 0, 8)], values),
    ]


def moved(shards: list[Shard], seed: int) -> list[Tensor]:
    set_gradients(shards, draw(seed, dtype=torch.float32))
    SGD(shards, whole_groups(), momentum=0.0).step(0.1)
    return [shard.master.clone() for shard in shards]


def test_the_average_follows_the_masters() -> None:
    shards = two_shards()
    average = WeightAverage(shards, 0.9)
    expected = [shard.master.double() for shard in shards]
    for step in range(1, 4):
        for index, master in enumerate(moved(shards, step)):
            expected[index] = 0.9 * expected[index] + 0.1 * master.double()
        average.update()
    actual = {(stored.name, stored.start): stored.tensor for stored in average.checkpoint_shards()}
    assert set(actual) == {("average/embedding.weight", 5), ("average/scale", 0), ("average/norm.weight", 0)}
    torch.testing.assert_close(actual["average/embedding.weight", 5], expected[0][:80].float())
    torch.testing.assert_close(actual["average/norm.weight", 0], expected[1].float())
    assert average.state_bytes() == sum(shard.master.numel() * 4 for shard in shards)


def test_swapping_puts_the_masters_back_bit_for_bit() -> None:
    shards = two_shards()
    average = WeightAverage(shards, 0.9)
    before = moved(shards, 1)
    average.update()
    averages = {stored.name: stored.tensor.clone() for stored in average.checkpoint_shards()}
    published: list[Tensor] = []
    with average.swapped(lambda: published.append(shards[1].master.clone())):
        assert torch.equal(shards[1].master, averages["average/norm.weight"])
        with pytest.raises(AssertionError):
            average.update()
    assert torch.equal(published[0], averages["average/norm.weight"])
    assert torch.equal(published[1], before[1])
    assert all(torch.equal(shard.master, value) for shard, value in zip(shards, before, strict=True))
    assert all(torch.equal(stored.tensor, averages[stored.name]) for stored in average.checkpoint_shards())


def test_an_error_inside_the_swap_still_puts_the_masters_back() -> None:
    shards = two_shards()
    average = WeightAverage(shards, 0.9)
    before = moved(shards, 1)
    with pytest.raises(RuntimeError, match="evaluation"), average.swapped(lambda: None):
        raise RuntimeError("evaluation")
    assert all(torch.equal(shard.master, value) for shard, value in zip(shards, before, strict=True))


def test_an_average_can_start_again_from_the_masters() -> None:
    shards = two_shards()
    average = WeightAverage(shards, 0.9)
    moved(shards, 1)
    average.reset()
    assert torch.equal(average.checkpoint_shards()[-1].tensor, shards[1].master)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(RecipeError, match=r"average_decay = .* is not between 0 and 1"):
        WeightAverage([], decay)


def test_the_average_of_fp64_masters_is_kept_in_fp64() -> None:
    shard = make_shard([(layout_of("norm.weight"), 0, SHAPES["norm.weight"][0])], draw(0))
    assert WeightAverage([shard], 0.5).checkpoint_shards()[0].tensor.dtype == torch.float64


def test_the_loss_scale_follows_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mine = LossScale(scale=1024.0, growth_interval=3)
    theirs, growth = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    for _ in range(200):
        finite = bool(torch.rand((), generator=generator) > 0.2)
        mine.update(finite)
        torch._amp_update_scale_(theirs, growth, torch.tensor(float(not finite)), 2.0, 0.5, 3)
        if mine.scale == mine.minimum:
            break
        assert (mine.scale, mine.finite_steps) == (float(theirs), int(growth))


def test_hysteresis_tolerates_non_finite_steps_until_the_next_growth() -> None:
    scale = LossScale(scale=1024.0, growth_interval=4, hysteresis=2)
    trace: list[float] = []
    for finite in (False, True, False, False, True, True, True, True, False, False):
        scale.update(finite)
        trace.append(scale.scale)
    assert trace == [1024, 1024, 512, 256, 256, 256, 256, 512, 512, 256]


def test_the_loss_scale_stays_within_its_bounds() -> None:
    scale = LossScale(scale=2.0, growth_interval=1, minimum=1.0, maximum=8.0)
    for _ in range(5):
        scale.update(False)
    assert scale.scale == 1.0
    for _ in range(5):
        scale.update(True)
    assert scale.scale == 8.0


def test_the_loss_scale_goes_through_json() -> None:
    scale = LossScale(scale=4096.0, hysteresis=2, growth_interval=5)
    scale.update(False)
    scale.update(True)
    again = LossScale()
    again.load_state(json.loads(json.dumps(scale.state())))
    assert again == scale
    state = LossScale().state()
    with pytest.raises(CheckpointError, match="'scales' belongs to no such file. Did you mean scale"):
        again.check_state(saved({**state, "scales": 1.0}))
    with pytest.raises(CheckpointError, match="scale is missing"):
        LossScale().check_state(saved({name: value for name, value in state.items() if name != "scale"}))


def saved(values: dict[str, Any]) -> JsonObject:
    return JsonObject(Path("manifest.json"), CheckpointError, "", values)
