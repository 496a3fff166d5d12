"""Where a model is cut, and what a stage keeps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import prune

from weft.config.recipe import DecoderShape
from weft.errors import PlanError
from weft.model.reference.decoder import build_decoder
from weft.techniques.pipeline.cut import Passed, Received, cut_stage
from weft.techniques.pipeline.stages import choose_cuts
from weft.techniques.pipeline.ties import find_ties


def slowest(costs: list[float], cuts: tuple[int, ...]) -> float:
    edges = [0, *cuts, len(costs) - 2]
    stages = [sum(costs[1 + low : 1 + high]) for low, high in itertools.pairwise(edges)]
    stages[0] += costs[0]
    stages[-1] += costs[-1]
    return max(stages)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=10), st.integers(1, 5))
def test_no_other_cut_is_better(integers: list[int], num_stages: int) -> None:
    costs = [float(cost) for cost in integers]
    num_blocks = len(costs) - 2
    num_stages = min(num_stages, num_blocks)
    best = choose_cuts(costs, num_blocks, num_stages)
    others = itertools.combinations(range(1, num_blocks), num_stages - 1)
    assert slowest(costs, best) == min(slowest(costs, cuts) for cuts in others)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert choose_cuts([0.0, *[1.0] * 8, 3.0], 8, 2) == (5,)
    assert choose_cuts([], 8, 4) == (2, 4, 6)
    assert choose_cuts([], 8, 2, cuts=[7]) == (7,)


def test_cuts_that_do_not_fit() -> None:
    with pytest.raises(
        PlanError, match=r"cuts = \[4, 2\] does not cut 8 blocks into 3 stages.*would be \[3, 6\]|\[2, 5\]"
    ):
        choose_cuts([], 8, 3, cuts=[4, 2])
    with pytest.raises(
        PlanError, match="9 stages, but the model has 8 blocks and every stage needs one. Use at most 8"
    ):
        choose_cuts([], 8, 9)


def decoder(*, tied: bool = True):
    return build_decoder(
        DecoderShape(num_layers=4, hidden_size=16, num_heads=2, vocabulary_size=32, tie_embeddings=tied)
    )


def test_a_stage_keeps_its_names_and_nothing_foreign() -> None:
    blueprint = decoder()
    whole = set(blueprint.module.state_dict())
    stages = [cut_stage(blueprint, stage, (1, 3)) for stage in range(3)]
    kept = [set(stage.state_dict()) for stage in stages]
    assert kept[0] | kept[1] | kept[2] == whole
    assert all(name.startswith(("blocks.1.", "blocks.2.")) for name in kept[1])
    assert {"norm.weight", "head.weight"} <= kept[2]
    assert all(type(stage) is type(blueprint.module) for stage in stages)
    assert isinstance(stages[1].get_submodule("embedding"), Received)
    assert isinstance(stages[1].get_submodule("head"), Passed)
    assert set(blueprint.module.state_dict()) == whole, "the whole model stays whole"


def test_a_middle_stage_runs_the_models_own_forward() -> None:
    stage = cut_stage(decoder(), 1, (1, 3))
    entry = stage.get_submodule("embedding")
    assert isinstance(entry, Received)
    entry.value = torch.zeros(2, 5, 16, device="meta")
    assert stage(tokens=torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 16)


def test_hooks_of_a_stage_know_the_stage() -> None:
    blueprint = decoder()
    whole: Any = blueprint.module
    whole.factor, calls = 1.0, list[float]()
    whole.blocks[1].register_forward_hook(lambda module, args, out: calls.append(whole.factor))
    stage: Any = cut_stage(blueprint, 1, (1, 3))
    stage.factor = 3.0
    entry = stage.get_submodule("embedding")
    entry.value = torch.zeros(2, 5, 16, device="meta")
    stage(tokens=torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert calls == [3.0], "the hook reads the stage, and writes where its author looks"


def test_pruned_weights_are_cut_with_their_layer() -> None:
    blueprint = decoder()
    whole: Any = blueprint.module
    prune.l1_unstructured(whole.blocks[1].ffn.up, "weight", amount=0.4)
    stage: Any = cut_stage(blueprint, 1, (1, 3))
    own = stage.blocks[1].ffn.up
    assert own.weight_orig is not whole.blocks[1].ffn.up.weight_orig
    assert "blocks.1.ffn.up.weight_orig" in stage.state_dict()


def test_ties_are_found_by_identity() -> None:
    blueprint = decoder()
    assert blueprint.cut is not None
    (tie,) = find_ties(blueprint.module, blueprint.cut, (1, 3))
    assert (tie.name, tie.stages, tie.owner) == ("embedding.weight", (0, 2), 0)
    assert not find_ties(decoder(tied=False).module, blueprint.cut, (1, 3))
    assert not find_ties(blueprint.module, blueprint.cut, ())
