"""Memory of pipeline ranks: counts that must agree with schedules, sizes and published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.published import MEMORY_OF_FRAMEWORKS
from hypothesis import given
from hypothesis import strategies as st
from memories import memory_of

from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.model.profile.known import KNOWN_MODELS, known_model
from weft.planning.price import Memories, StageMemory
from weft.techniques.cost_terms import WEFT, Layout
from weft.techniques.pipeline.cost import in_flight
from weft.techniques.pipeline.orders import peak_activations, schedule_orders
from weft.techniques.pipeline.schedules import PricedSchedule

GIBI = 2**30
SMALL = profile_of_sizes(
    ModelSizes(
        num_layers=8, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_size=128, vocabulary_size=512, sequence_length=32
    )
)
MIXTURE = profile_of_sizes(
    ModelSizes(
        num_layers=8,
        hidden_size=64,
        num_heads=8,
        vocabulary_size=512,
        sequence_length=32,
        num_experts=8,
        top_k=2,
        expert_ffn_size=32,
    )  # fmt: skip
)
CHUNKS: dict[PricedSchedule, tuple[int, ...]] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3),
    "interleaved_zero_bubble": (1, 2, 3),
    "zero_bubble_2p": (1,),
    "zbv": (2,),
    "dualpipev": (2,),
}


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 6])
def test_in_flight_is_what_the_orders_hold(schedule: PricedSchedule, pipeline: int) -> None:
    for chunks in CHUNKS[schedule]:
        for microbatches in (pipeline, 2 * pipeline, 5 * pipeline):
            orders = schedule_orders(schedule, pipeline, chunks, microbatches)
            counts = [in_flight(schedule, pipeline, chunks, microbatches, rank) for rank in range(pipeline)]
            assert tuple(sum(each) for each in counts) == peak_activations(orders)


def states(stage: StageMemory) -> float:
    return stage.kinds.weights + stage.kinds.gradients + stage.kinds.optimizer


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt3-13b", "deepseek-v3", "bert-large"])
def test_model_states_of_one_rank(name: str) -> None:
    """Rajbhandari et al. 2020: 16 bytes with gradients in 16 bits; 18 with gradients in fp32."""
    profile = profile_of_sizes(known_model(name).sizes)
    (stage,) = memory_of(profile, Layout())
    assert states(stage) == pytest.approx(18 * profile.num_parameters)
    (stage,) = memory_of(profile, Layout(gradient_bytes=2))
    assert states(stage) == pytest.approx(16 * profile.num_parameters)


def test_zero_shares_out() -> None:
    """ZeRO-1, 2 and 3 over 8 ranks: 6 + 12/8, 2 + 16/8 and 18/8 bytes."""
    parameters = SMALL.num_parameters
    for zero, each in ((0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)):
        (stage,) = memory_of(SMALL, Layout(zero=zero, shard=8))
        assert states(stage) == pytest.approx(each * parameters)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 1), (2, 1), (3, 4)])
def test_what_compression_owes_is_held_whole(zero: int, parts: int) -> None:
    """Two fp32 copies of the gradient per data rank; hybrid sharding owes for its shard alone."""
    layout = Layout(replicate=2, shard=4, zero=zero, microbatch_size=1)  # pyright: ignore[reportArgumentType]
    plain, owing, rounded = (
        memory_of(SMALL, replace(layout, compression=name))[0].kinds.gradients for name in ("none", "powersgd", "int8")
    )
    assert owing - plain == pytest.approx(8 * SMALL.num_parameters / parts)
    assert rounded == plain
    for name in ("powersgd", "topk", "onebit", "randomk", "signsgd"):
        held = memory_of(SMALL, replace(layout, compression=name))[0].kinds.gradients
        extra = 4 * SMALL.num_parameters / parts if name == "onebit" else 0  # the momentum that travels
        assert held == pytest.approx(owing + extra), name


def test_experts_are_shared_out_before_zero() -> None:
    experts = sum(block.expert_parameters for block in MIXTURE.blocks)
    dense = MIXTURE.num_parameters - experts
    (stage,) = memory_of(MIXTURE, Layout(zero=1, shard=8, expert=4))
    assert states(stage) == pytest.approx(dense * (6 + 12 / 8) + experts / 4 * (6 + 12 / 2))


@pytest.mark.parametrize("cuts", [True, False])
def test_experts_over_the_tensor_axis(cuts: bool) -> None:
    """Its ranks have a part of each; or, where they stay whole, share out the tokens: so that they hold the same ones,
    whose optimizer state they share out too."""
    experts = sum(block.expert_parameters for block in MIXTURE.blocks)
    dense = MIXTURE.num_parameters - experts
    layout = Layout(zero=1, shard=8, expert=8, cuts_experts=cuts)
    plain, wide = (memory_of(MIXTURE, replace(layout, tensor=tensor))[0].kinds for tensor in (1, 4))
    assert wide.weights == pytest.approx(2 * (experts / 8 / (4 if cuts else 1) + dense / 4), rel=0.1)
    assert plain.optimizer == pytest.approx(12 * (experts / 8 + dense / 8))
    assert wide.optimizer == pytest.approx(12 * (experts / 8 / 4 + dense / 8 / 4), rel=0.05)


def test_stages_add_up_to_the_model() -> None:
    for layout in (
        Layout(pipeline=4),
        Layout(pipeline=2, chunks=2, schedule="interleaved_1f1b"),
        Layout(pipeline=4, chunks=2, schedule="zbv"),
        Layout(pipeline=2, cuts=(1,)),
    ):
        stages = memory_of(SMALL, layout)
        assert sum(stage.kinds.weights for stage in stages) == pytest.approx(2 * SMALL.num_parameters)


def test_grids_of_ranks_share_weights_out() -> None:
    """A 2.5-dimensional split of 8 ranks has 2 copies of 4 parts."""
    parts = {"1d": 8, "2.5d": 4, "3d": 8}
    split = sum(o.parameters for b in SMALL.blocks for o in b.operators if o.split not in ("replicate", "sequence"))
    split += SMALL.stem.parameters + SMALL.tail.operators[1].parameters
    whole = SMALL.num_parameters - split
    for scheme in ("1d", "2.5d", "3d"):
        (stage,) = memory_of(SMALL, Layout(tensor=8, tensor_scheme=scheme))
        assert stage.kinds.weights == pytest.approx(2 * (split / parts[scheme] + whole))


def test_a_tied_weight_stands_on_both_ends() -> None:
    tied = profile_of_sizes(replace(known_model("gpt2").sizes))
    both = memory_of(tied, Layout(pipeline=2))
    assert sum(stage.kinds.weights for stage in both) == 2 * (tied.num_parameters + 50257 * 768)
    folded = memory_of(tied, Layout(pipeline=2, chunks=2, schedule="zbv"))
    assert sum(stage.kinds.weights for stage in folded) == 2 * tied.num_parameters


def test_activations_of_1f1b() -> None:
    """Korthikanti et al. 2022, section 4.2.3: the first stage holds as many microbatches as there are stages, so that
    it keeps the activations of all blocks whatever the number of stages; with sequence parallelism 34 sbh / t each."""
    sizes = known_model("gpt3-175b").sizes
    profile = profile_of_sizes(sizes)
    layout = Layout(pipeline=8, tensor=8, sequence_parallel=True, microbatches=32)
    stage = memory_of(profile, layout, replace(WEFT, memory=MEMORY_OF_FRAMEWORKS["zero-bubble"]))[0]
    kept = 34 * 2048 * 12288 * 96 / 8
    assert stage.kinds.activations == pytest.approx(kept, rel=0.03)


def test_scores_are_kept_without_flash() -> None:
    """The 5 a s / h of the same paper."""
    profile = profile_of_sizes(known_model("gpt3-13b").sizes)
    layout = Layout(tensor=2)
    (flash,) = memory_of(profile, layout)
    (plain,) = memory_of(profile, layout, replace(WEFT, flash_attention=False))
    scores = 5 * 40 * 2048 * 2048 * 40 / 2
    assert plain.kinds.activations - flash.kinds.activations == pytest.approx(scores, rel=0.05)


def test_full_recomputation_keeps_inputs() -> None:
    sizes = known_model("llama-2-7b").sizes
    (stage,) = memory_of(profile_of_sizes(sizes), Layout(recompute="full", microbatch_size=4))
    inputs = 2 * 32 * 4 * 4096 * 4096
    one_block = 4 * 4096 * (16 * 4096 + 6 * 11008)
    logits = 4 * 4096 * 32000 * MEMORY_OF_FRAMEWORKS["weft"].logit_bytes
    larger = max(one_block, logits)
    assert stage.kinds.activations + stage.kinds.logits == pytest.approx(inputs + larger, rel=0.2)


LAYOUTS = st.builds(
    Layout,
    pipeline=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from([1, 2, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    zero=st.sampled_from([0, 1, 2, 3]),
    microbatch_size=st.sampled_from([1, 2, 4]),
    microbatches=st.sampled_from([4, 8]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    fused_loss=st.booleans(),
    offload=st.sampled_from(["none", "optimizer", "activations"]),
)


def peak(profile: Profile, layout: Layout, **changes: Any) -> float:
    return Memories(profile).fullest(replace(layout, **changes))


@pytest.mark.parametrize("experts", [False, True])
@given(layout=LAYOUTS)
def test_what_saves_memory_never_costs_any(layout: Layout, experts: bool) -> None:
    profile = MIXTURE if experts else SMALL
    here = peak(profile, layout)
    assert here == max(stage.device for stage in Memories(profile).of(layout))
    assert peak(profile, layout, microbatch_size=layout.microbatch_size * 2) > here
    # A loss by chunks sums the head's gradient in fp32.
    assert peak(profile, layout, fused_loss=True) <= here + 4.5 * profile.tail.parameters
    assert peak(profile, layout, offload="optimizer") <= peak(profile, layout, offload="none")
    assert layout.fused_loss or peak(profile, layout, precision="fp32", gradient_bytes=4) > here
    # Groups that come into being have a price of their own: compared without it.
    outside = 3 * MEMORY_OF_FRAMEWORKS["weft"].communicator_bytes
    assert peak(profile, layout, tensor=layout.tensor * 2) <= here + outside
    if layout.zero in (0, 1):
        assert peak(profile, layout, zero=layout.zero + 1) <= here


@pytest.mark.parametrize("experts", [False, True])
@given(layout=LAYOUTS)
def test_gradients_of_zero3_need_no_more_than_those_of_zero2(layout: Layout, experts: bool) -> None:
    profile = MIXTURE if experts else SMALL
    reduced = replace(layout, zero=3, reduce_every="microbatch")
    pairs = zip(memory_of(profile, reduced), memory_of(profile, replace(layout, zero=2)), strict=True)
    assert all(one.kinds.gradients <= other.kinds.gradients for one, other in pairs)
    once = memory_of(profile, replace(reduced, reduce_every="step"))
    whole = memory_of(profile, replace(layout, zero=1))
    assert [stage.kinds.gradients for stage in once] == [stage.kinds.gradients for stage in whole]


@given(layout=LAYOUTS)
def test_no_kind_is_negative(layout: Layout) -> None:
    for stage in memory_of(SMALL, layout):
        kinds = stage.kinds
        parts = (kinds.weights, kinds.gradients, kinds.optimizer, kinds.activations, kinds.logits, kinds.buckets)
        assert all(part >= 0 for part in parts)
        assert kinds.allocated <= stage.reserved <= stage.device


def test_gradients_that_wait_for_the_last_microbatch_stay_whole() -> None:
    """Where they are reduced once per step, or data ranks have unequal shares; pipelines hold their stage's weights."""
    for layout, whole in (
        (Layout(zero=3, shard=8, microbatches=1), False),
        (Layout(zero=3, shard=8, microbatches=1, reduce_every="step"), False),
        (Layout(zero=3, shard=8, microbatches=2), False),
        (Layout(zero=2, shard=8, microbatches=2), False),
        (Layout(zero=3, shard=8, microbatches=2, reduce_every="microbatch"), False),
        (Layout(zero=3, shard=8, microbatches=2, reduce_every="microbatch", uneven=True), True),
        (Layout(zero=3, shard=8, microbatches=2, reduce_every="step"), True),
        (Layout(zero=2, shard=8, microbatches=2, reduce_every="step"), True),
        (Layout(zero=3, shard=8, microbatches=2, pipeline=2), True),
        (Layout(zero=3, shard=8, microbatches=2, pipeline=2, reduce_every="microbatch"), False),
    ):
        stage, other = memory_of(SMALL, layout)[0], memory_of(SMALL, replace(layout, zero=1))[0]
        assert stage.kinds.gradients == other.kinds.gradients / (1 if whole else 8), layout
    held = memory_of(SMALL, Layout(pipeline=2, zero=3, shard=8, microbatches=4))
    for stage in held:
        assert stage.kinds.buckets == pytest.approx(8 * stage.kinds.weights)


def test_on_a_cpu_nothing_is_reserved() -> None:
    (stage,) = memory_of(SMALL, Layout(precision="fp32"), on_accelerator=False)
    assert stage.reserved == stage.kinds.allocated
    assert stage.kinds.workspace == 0
    assert stage.device > stage.reserved


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_known_model_has_memory(name: str) -> None:
    (stage,) = memory_of(profile_of_sizes(KNOWN_MODELS[name].sizes), Layout())
    assert stage.device > 16 * KNOWN_MODELS[name].parameters * 0.95
