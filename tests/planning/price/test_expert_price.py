"""Experts that are shared out are not priced slower for the number of tokens that each happens to get."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.config.cluster import Collective, parse_cluster_spec
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import KNOWN_MODELS
from weft.planning.price import CostModel
from weft.planning.price._stages import BlockCosts, key_of
from weft.planning.search import Space, search
from weft.techniques.cost_terms import FITTED, WEFT, AxisGroup, Device, Layout, Network, Share, operator_work


def test_expert_parallelism_costs_no_alignment() -> None:
    """Beside balanced loads, whole experts on one rank have larger products: shapes lose no more than without."""
    draw = random.Random(11)
    cost_model = CostModel(
        profile_of_sizes(KNOWN_MODELS["mixtral-8x7b"].sizes, 4096),
        parse_cluster_spec("4x8xh100"),
        calibration=replace(FITTED, expert_imbalance=1.0013),
    )
    for _ in range(6):
        layout = Layout(shard=32, zero=1, microbatch_size=draw.choice((1, 2, 3, 4)), microbatches=4)
        without = cost_model.time(layout)
        for expert in (2, 4, 8):
            shared = cost_model.time(replace(layout, expert=expert))
            assert shared.matrix_shapes < 1.1 * without.matrix_shapes
            assert shared.total < 1.15 * without.total


def test_experts_of_mixtral_are_faster_shared_out() -> None:
    """Over 64 devices, whole experts on a rank are products of their own, and their gradients travel less."""
    cost_model = CostModel(
        profile_of_sizes(KNOWN_MODELS["mixtral-8x7b"].sizes, 4096),
        parse_cluster_spec("8x8xh100"),
        calibration=FITTED,
    )
    for size in (1, 2, 4):
        for zero in (1, 3):
            layout = Layout(shard=64, zero=zero, microbatch_size=size, microbatches=4)
            assert cost_model.time(replace(layout, expert=8)).total < cost_model.time(layout).total


@pytest.mark.parametrize(
    ("model", "ranks", "is_gathered"),
    [("qwen3-30b-a3b", 4, True), ("qwen3-30b-a3b", 8, False), ("mixtral-8x7b", 4, False), ("mixtral-8x7b", 8, False)],
)
def test_tokens_are_gathered_where_they_choose_more_experts_than_there_are_ranks(
    model: str, ranks: int, is_gathered: bool
) -> None:
    """Eight of 128 experts, and two of eight."""
    profile, cluster = profile_of_sizes(KNOWN_MODELS[model].sizes, 4096), parse_cluster_spec("1x8xh100")
    space = Space(pipelines=(1,), tensors=(1,), contexts=(1,), experts=(ranks,), microbatch_sizes=(1,), zeros=(3,))
    best = search(profile, cluster, global_batch_size=64, space=space).best[0].layout
    assert (best.expert_exchange == "all_gather") is is_gathered


def test_gradients_of_weights_take_any_number_of_tokens() -> None:
    """Their products sum over tokens, and lie along the other sizes: no number of tokens is slow for itself."""
    (devices,) = (node.devices for node in parse_cluster_spec("1x8xh100").nodes)
    draw = random.Random(3)
    for framework in (WEFT, replace(WEFT, name="other")):
        device = Device(devices, FITTED, framework)
        block = profile_of_sizes(KNOWN_MODELS["mixtral-8x7b"].sizes, 4096).blocks[0]
        expert = next(one for one in block.operators if one.split == "expert" and one.kind == "matmul")
        for _ in range(10):
            tokens = 64 * draw.randint(20, 200)
            odd, even = (
                operator_work(device, expert, Share(samples=1, sequence=count, expert=8), 1.0).weight.seconds
                for count in (tokens + draw.randint(1, 63), tokens + 64)
            )
            assert odd <= 1.001 * even


def test_products_side_by_side_reach_less_than_one() -> None:
    (devices,) = (node.devices for node in parse_cluster_spec("1x8xh100").nodes)
    device = Device(devices, FITTED, WEFT)
    one = device.matmul(8 * 4096, 4096, 4096, 1, "bf16", 2.0).seconds
    eight = device.matmul(4096, 4096, 4096, 8, "bf16", 2.0).seconds
    assert one / eight == pytest.approx(FITTED.grouped_share, rel=0.05)
    assert FITTED.on_cores().grouped_share == 1.0


def test_zero3_gathers_experts_that_are_not_shared_out() -> None:
    """What ZeRO-3 shares out is gathered in every microbatch, experts too; what a rank has for itself is not, and
    buckets play no part in either."""
    cost_model = CostModel(
        profile_of_sizes(KNOWN_MODELS["mixtral-8x7b"].sizes, 1024),
        parse_cluster_spec("8xh100"),
        calibration=replace(FITTED, overlap_share=0.0),
    )
    layout = Layout(shard=8, zero=3, microbatches=2)
    once, twice = (cost_model.time(replace(layout, microbatches=count)).data for count in (2, 4))
    assert twice == pytest.approx(2 * once)
    experts = sum(block.expert_parameters for block in cost_model.profile.blocks)
    share = cost_model.profile.num_parameters / (cost_model.profile.num_parameters - experts)
    assert once / cost_model.time(replace(layout, expert=8)).data == pytest.approx(share, rel=0.3)
    for expert in (1, 2, 8):
        prices = {
            cost_model.time(replace(layout, expert=expert, bucket_bytes=size)).total for size in (1 << 20, 1 << 29)
        }
        assert len(prices) == 1


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_tensor_ranks_send_all_tokens_and_sum_what_their_parts_of_experts_make(tensor: int) -> None:
    sizes = KNOWN_MODELS["mixtral-8x7b"].sizes
    profile, cluster = profile_of_sizes(sizes, 4096), parse_cluster_spec("4x8xh100")
    sent: dict[str, list[float]] = {}

    def seconds(kind: Collective, size_bytes: float, group: AxisGroup, algorithm: str = "auto", /) -> float:
        sent.setdefault(kind, []).append(size_bytes)
        return 1.0

    layout = Layout(shard=8, expert=8, tensor=tensor, zero=1)
    device = Device(
        cluster.nodes[0].devices, FITTED, replace(WEFT, overlap_expert=False, overlap_tensor_backward=False)
    )
    key = key_of(layout, Network(cluster).groups(layout), has_batch_norm=False)
    BlockCosts(profile, device, seconds).cost(profile.blocks[0], key)
    token_bytes = 4096 * sizes.hidden_size * 2
    assert sent["all_to_all"] == [sizes.top_k * token_bytes] * 2
    assert sent.get("all_reduce", []) == [token_bytes] * (2 if tensor > 1 else 0)
