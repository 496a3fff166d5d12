"""The time of a step: what must hold whatever the constants, and a few figures of published runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import AXES
from weft.config.recipe import ConvNetShape
from weft.errors import ClusterError, PlanError
from weft.model.description import description_of_shape
from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.planning.price import CostModel, check_layout, model_flops, predict
from weft.techniques.cost_terms import DATASHEET, WEFT, Layout

SMALL = profile_of_sizes(
    ModelSizes(
        name="small",
        num_layers=8,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=8,
        ffn_size=8192,
        vocabulary_size=32_000,
        sequence_length=2048,
        tied=False,
    )
)
MIXTURE = profile_of_sizes(
    ModelSizes(
        name="mixture",
        num_layers=4,
        hidden_size=2048,
        num_heads=16,
        vocabulary_size=32_000,
        sequence_length=2048,
        num_experts=16,
        top_k=2,
        expert_ffn_size=1024,
        tied=False,
    )
)
NODES = parse_cluster_spec("4x8xh100")


def seconds(profile: Profile, cluster: Cluster, layout: Layout, **more: object) -> float:
    return predict(profile, cluster, layout, **more).step_seconds  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of `SMALL` on up to 32 devices."""
    pipeline, tensor, context = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    if pipeline * tensor * context > 32:
        context = 1
    data = draw(st.sampled_from([size for size in (1, 2, 4, 8) if size * pipeline * tensor * context <= 32]))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    schedule, chunks = draw(
        st.sampled_from(
            [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("interleaved_zero_bubble", 1)]
        )
        if pipeline > 1
        else st.just(("1f1b", 1))
    )
    return Layout(
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        replicate=1 if zero == 3 else data,
        shard=data if zero == 3 else 1,
        zero=zero,
        sequence_parallel=draw(st.booleans()) and tensor > 1,
        context_scheme=draw(st.sampled_from(["ring", "all_gather", "ulysses"])),
        schedule=schedule,  # type: ignore[arg-type]
        chunks=chunks,
        microbatch_size=draw(st.sampled_from([1, 2])),
        microbatches=draw(st.sampled_from([1, 4, 8, 12])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.sampled_from(["none", "optimizer", "activations"])),
        precision=draw(st.sampled_from(["bf16", "fp8", "fp32"])),
    )


@given(layout=layouts())
@settings(max_examples=20, deadline=None)
def test_terms_add_up_and_none_is_negative(layout: Layout) -> None:
    found = predict(SMALL, NODES, layout)
    terms = dataclasses.asdict(found.time)
    assert sum(terms.values()) == pytest.approx(found.step_seconds, rel=1e-12)
    assert min(terms.values()) > -1e-9, terms
    assert found.model_flops == pytest.approx(
        model_flops(SMALL) * layout.microbatch_size * layout.microbatches * layout.data
    )


@given(layout=layouts())
@example(layout=Layout(pipeline=2, zero=0, schedule="zbv", chunks=2, precision="fp32"))  # one microbatch on a V
@settings(max_examples=20, deadline=None)
def test_the_closed_form_is_close_to_the_played_step(layout: Layout) -> None:
    cost_model = CostModel(SMALL, NODES)
    played = cost_model.predict(layout, exact=True).step_seconds
    assert cost_model.predict(layout).step_seconds == pytest.approx(played, rel=0.1)


@given(layout=layouts(), faster=st.floats(1.0, 8.0))
@settings(max_examples=20, deadline=None)
def test_time_falls_with_bandwidth(layout: Layout, faster: float) -> None:
    links = tuple(
        replace(tier, bandwidth_bytes_per_second=tier.bandwidth_bytes_per_second * faster) for tier in NODES.links
    )
    better = replace(NODES, links=links)
    assert seconds(SMALL, better, layout) <= seconds(SMALL, NODES, layout) * (1 + 1e-9)


@given(layout=layouts(), faster=st.floats(1.0, 4.0))
@example(layout=Layout(shard=4, zero=3, offload="activations", precision="bf16"), faster=2.0)  # two things hide beside
@settings(max_examples=20, deadline=None)
def test_time_falls_with_faster_devices(layout: Layout, faster: float) -> None:
    (node,) = NODES.nodes
    parts = node.devices
    quick = replace(
        parts,
        peak_flops={name: peak * faster for name, peak in parts.peak_flops.items()},
        measured_flops={name: peak * faster for name, peak in parts.measured_flops.items()},
        memory_bandwidth_bytes_per_second=(parts.memory_bandwidth_bytes_per_second or 0) * faster,
    )
    better = replace(NODES, nodes=(replace(node, devices=quick),))
    assert seconds(SMALL, better, layout) <= seconds(SMALL, NODES, layout) * (1 + 1e-9)


@given(layout=layouts(), order=st.permutations(AXES))
@settings(max_examples=20, deadline=None)
def test_where_all_links_are_alike_the_numbering_of_ranks_does_not_matter(layout: Layout, order: list[str]) -> None:
    rack = parse_cluster_spec("1x32xgb200")
    assert len(rack.links) == 1
    swapped = replace(layout, order=tuple(order))  # type: ignore[arg-type]
    assert seconds(SMALL, rack, swapped) == pytest.approx(seconds(SMALL, rack, layout))


def test_axes_of_one_rank_may_stand_anywhere() -> None:
    layout = Layout(replicate=8, tensor=4, microbatches=2)
    moved = replace(layout, order=("pipeline", "context", "expert", "shard", "replicate", "tensor"))
    assert seconds(SMALL, NODES, moved) == pytest.approx(seconds(SMALL, NODES, layout))


def test_tensor_ranks_belong_on_the_fast_links() -> None:
    inside = Layout(replicate=4, tensor=8, microbatches=4)
    across = replace(inside, order=("tensor", "pipeline", "expert", "context", "shard", "replicate"))
    assert seconds(SMALL, NODES, across) > 1.2 * seconds(SMALL, NODES, inside)


def test_recomputation_costs_a_forward_and_selective_less() -> None:
    plain, selective, full = (
        predict(SMALL, NODES, Layout(replicate=8, recompute=recompute)).time
        for recompute in ("none", "selective", "full")
    )
    assert plain.recompute == 0
    assert 0 < selective.recompute < full.recompute
    assert full.recompute == pytest.approx((plain.ideal + plain.matrix_shapes + plain.memory_bound) / 3, rel=0.2)


def test_adapters_leave_out_what_weights_need() -> None:
    whole = predict(SMALL, NODES, Layout(replicate=8, microbatches=2)).time
    adapters = predict(SMALL, NODES, Layout(replicate=8, microbatches=2, trained_share=0.0)).time
    assert adapters.ideal == pytest.approx(whole.ideal * 2 / 3, rel=0.1)
    assert adapters.optimizer == adapters.data == 0


def test_hidden_reductions_cost_less_than_shown_ones() -> None:
    layout = Layout(replicate=32, microbatches=2)
    shown = replace(WEFT, overlap_gradients=False)
    assert predict(SMALL, NODES, layout).time.data < predict(SMALL, NODES, layout, framework=shown).time.data


def test_compression_pays_most_where_the_network_is_slow() -> None:
    layout = Layout(replicate=32)
    slow_links = (NODES.links[0], replace(NODES.links[1], bandwidth_bytes_per_second=1e9))
    slow = replace(NODES, links=slow_links)
    squeezed = replace(layout, compression="int8")
    gains = [
        predict(SMALL, cluster, layout).time.data - predict(SMALL, cluster, squeezed).time.data
        for cluster in (slow, NODES)
    ]
    assert gains[0] > 5 * gains[1]


def test_what_top_k_gathers_grows_with_the_ranks() -> None:
    slow = replace(NODES, links=tuple(replace(link, bandwidth_bytes_per_second=1e8) for link in NODES.links))

    def share(ranks: int) -> float:
        plain = Layout(replicate=ranks)
        one, other = (predict(SMALL, slow, replace(plain, compression=name)).time.data for name in ("topk", "none"))
        return one / other

    assert share(2) < share(8) < share(32)
    assert share(32) == pytest.approx(16 * share(2), rel=0.3)


def test_what_travels_decides_what_a_compression_saves() -> None:
    """A bit less than a byte, a byte less than two; random-k sends no places, but all to every rank, under ZeRO too."""
    slow = replace(NODES, links=tuple(replace(link, bandwidth_bytes_per_second=1e8) for link in NODES.links))

    def data(name: str, zero: int) -> float:
        layout = Layout(replicate=8, zero=zero, compression=name)  # type: ignore[arg-type]
        return predict(SMALL, slow, layout).time.data

    for zero in (0, 1):
        assert data("signsgd", zero) < data("int8", zero) < data("bf16", zero) < data("none", zero)
    assert data("signsgd", 0) < data("randomk", 0) < data("int8", 0)


def test_experts_that_travel_far_cost_more_and_less_when_tokens_travel_once() -> None:
    near = Layout(shard=32, expert=8, microbatches=2)
    far = replace(near, expert=16)
    plain = predict(MIXTURE, NODES, far).time.expert
    assert predict(MIXTURE, NODES, near).time.expert < plain
    once = predict(MIXTURE, NODES, far, framework=replace(WEFT, sends_tokens_once=True)).time.expert
    assert once < plain


def test_spans_show_every_action_until_the_pipeline_ends() -> None:
    layout = Layout(pipeline=4, microbatches=8, schedule="1f1b")
    found = predict(SMALL, NODES, layout, spans=True)
    assert len(found.spans) == 4 * 8 * 2
    assert all(span.stop > span.start >= 0 for span in found.spans)
    inside = found.time.total - found.time.data - found.time.optimizer - found.time.other
    assert max(span.stop for span in found.spans) == pytest.approx(inside)
    assert predict(SMALL, NODES, layout).spans == ()


def test_cores_share_the_node_among_ranks() -> None:
    cores = parse_cluster_spec("4xcpu")
    one, four = (
        seconds(SMALL, cores, Layout(replicate=ranks, microbatches=4 // ranks, precision="fp32")) for ranks in (1, 4)
    )
    assert one == pytest.approx(four, rel=0.5), "the same work on the same four cores"
    eight = seconds(SMALL, cores, Layout(replicate=8, precision="fp32"))
    assert eight > 1.5 * four, "twice the work on the same cores"


def test_layouts_that_cannot_be_are_refused_with_the_fix() -> None:
    (message,) = check_layout(SMALL, NODES, Layout(replicate=64))
    assert message == "world = 64 is more than the cluster's 32 devices. Use data = 32."
    (message,) = check_layout(SMALL, NODES, Layout(tensor=6))
    assert "does not divide" in message
    assert "Use 4." in message
    (message,) = check_layout(SMALL, NODES, Layout(pipeline=16, microbatches=4))
    assert "16 stages of 8 blocks" in message
    (message,) = check_layout(MIXTURE, NODES, Layout(shard=8, expert=5))
    assert "does not divide 16 experts" in message
    (message,) = check_layout(SMALL, NODES, Layout(replicate=8, expert=2))
    assert "has no experts" in message
    with pytest.raises(PlanError, match="more than the cluster's 32 devices"):
        predict(SMALL, NODES, Layout(replicate=64))


def test_devices_of_unknown_speed_are_refused() -> None:
    (node,) = NODES.nodes
    unknown = replace(NODES, nodes=(replace(node, devices=replace(node.devices, peak_flops={})),))
    with pytest.raises(ClusterError, match="peak_flops is empty"):
        predict(SMALL, unknown, Layout(replicate=8))


def test_published_runs_are_within_a_quarter_without_anything_fitted() -> None:
    """Narayanan et al. 2021 (SC21, table 1): 175B on 384 A100, 18 % of peak lost to more than this could explain."""
    sizes = ModelSizes(
        name="gpt-175b",
        num_layers=96,
        hidden_size=12_288,
        num_heads=96,
        ffn_size=49_152,
        vocabulary_size=51_200,
        sequence_length=2048,
        activation="gelu",
        learned_positions=2048,
        rotary=False,
        dropout=0.1,
        attention_dropout=0.1,
        norm="layer",
    )
    framework = replace(
        WEFT, name="megatron-lm", flash_attention=False, overlap_gradients=False, overlap_parameters=False
    )
    layout = Layout(
        pipeline=12,
        tensor=8,
        replicate=4,
        microbatch_size=1,
        microbatches=384,
        schedule="interleaved_1f1b",
        chunks=2,
        recompute="full",
        precision="fp16",
    )
    found = predict(profile_of_sizes(sizes), parse_cluster_spec("48x8xa100"), layout, framework=framework)
    batch, parameters = 1536, 96 * 12 * 12_288**2
    hardware = 96 * batch * 2048 * 96 * 12_288**2 * (1 + 2048 / (6 * 12_288) + 51_200 / (16 * 96 * 12_288))
    assert parameters > 170e9
    assert hardware / found.step_seconds / 384 == pytest.approx(153e12, rel=0.25)


def test_pricing_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, weft.planning.price; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_calibrations_know_variants_of_a_part() -> None:
    assert DATASHEET.matmul_share("a100-40gb", "bf16") == DATASHEET.matmul_share("a100", "bf16")
    assert DATASHEET.matmul_share("gb200", "bf16") < DATASHEET.matmul_share("b200", "bf16")
    assert DATASHEET.attention_share("h200") == DATASHEET.attention_share("h100")


def test_data_ranks_wait_for_each_others_batch_statistics() -> None:
    """Every norm, in every microbatch; a pipeline of one data rank does not, nor does another kind of norm."""
    shape = ConvNetShape(num_layers=4, channels=64, image_size=16, image_channels=3)
    with_norms = description_of_shape(shape).profile
    without = description_of_shape(replace(shape, norm="group")).profile

    def more(layout: Layout) -> float:
        one, other = (predict(profile, NODES, layout) for profile in (with_norms, without))
        assert one.step_seconds - other.step_seconds == pytest.approx(one.time.data - other.time.data)
        return one.time.data - other.time.data

    two = Layout(replicate=2, microbatch_size=4, microbatches=1)
    assert more(two) > 0
    assert more(replace(two, microbatches=3)) == pytest.approx(3 * more(two))
    assert more(replace(two, recompute="full")) > more(two)
    assert more(Layout(pipeline=2, microbatch_size=4, microbatches=2)) == 0
