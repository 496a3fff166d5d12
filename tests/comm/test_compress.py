"""Codecs by themselves: what they lose, what they owe, what is not finite, and how many bytes they say they send."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.comm import GroupView
from weft.comm.compress import CompressedReduction, Compression, Frame, Span

ALONE = GroupView((0,), 0, None)
"""The work of one rank without a network: the sum over it is what its codec makes of its own gradients."""
CODECS = {
    "bf16": Compression(codec="bf16"),
    "int8": Compression(codec="int8"),
    "powersgd": Compression(codec="powersgd", powersgd_rank=2),
    "topk": Compression(codec="topk", topk_share=0.05),
}
BIASED = ("powersgd", "topk")


def frame_of(*shapes: tuple[int, ...], gap: int = 0) -> Frame:
    spans, stop = list[Span](), 0
    for index, shape in enumerate(shapes):
        spans.append(Span(name=f"p{index}", offset=stop, shape=torch.Size(shape)))
        stop += torch.Size(shape).numel() + gap
    return Frame(spans=tuple(spans), num_elements=stop)


def gradients(frame: Frame, seed: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, a few of them a hundred times as large; padding is zero."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(frame.num_elements, dtype=dtype)
    for span in frame.spans:
        values = torch.randn(span.shape.numel(), generator=generator, dtype=dtype)
        outliers = torch.rand(span.shape.numel(), generator=generator) > 0.99
        flat[span.offset : span.stop] = values * torch.where(outliers, 100.0, 1.0) * scale
    return flat


def squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 15), st.integers(0, 2**31), st.floats(-12, 12), st.sampled_from(sorted(CODECS)))
def test_what_is_lost_is_a_part_of_the_gradient(
    sizes: list[tuple[int, int]], gap: int, seed: int, power: float, name: str
) -> None:
    """‖C(x) − x‖² ≤ (1 − δ)‖x‖², with each codec's own δ, over all sizes and twelve powers of ten either way."""
    frame = frame_of(*sizes, gap=gap)
    flat = gradients(frame, seed, scale=10.0**power)
    decoded = flat.clone()
    CompressedReduction(CODECS[name], frame, flat, ALONE).start(decoded)()
    # bf16 and int8 round once on the way out; half a unit of bf16 is at most 2⁻⁸ of a value.
    kept = {"bf16": 1 - 2.0**-16, "int8": 1 - 0.004, "powersgd": 0.0, "topk": 0.05}[name]
    assert squares(decoded - flat) <= (1 - kept) * squares(flat) * (1 + 1e-5) + 1e-60


def test_powersgd_finds_the_leading_directions() -> None:
    """With the same matrix again and again its basis becomes that of the best approximation of this rank."""
    frame = frame_of((40, 30))
    flat = gradients(frame, 5, dtype=torch.float64)
    reduction = CompressedReduction(Compression(codec="powersgd", powersgd_rank=3, feedback=False), frame, flat, ALONE)
    for _ in range(60):
        decoded = flat.clone()
        reduction.begin_step()
        reduction.start(decoded)()
        reduction.keep()
    best = torch.linalg.svdvals(flat.view(40, 30))[3:].square().sum()
    assert squares(decoded - flat) == pytest.approx(float(best), rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(0, 2**31),
    st.integers(1, 12),
    st.sampled_from(BIASED),
)
def test_what_is_sent_and_what_is_owed_add_up(sizes: list[tuple[int, int]], seed: int, steps: int, name: str) -> None:
    """Σ decoded + residual = Σ gradient, whatever is skipped on the way: a skipped step is as if it had never been."""
    frame = frame_of(*sizes, gap=3)
    like = torch.zeros(frame.num_elements, dtype=torch.float64)
    reduction = CompressedReduction(CODECS[name], frame, like, ALONE)
    sent, given_in = torch.zeros_like(like), torch.zeros_like(like)
    for step in range(steps):
        flat = gradients(frame, seed + step, dtype=torch.float64)
        decoded = flat.clone()
        reduction.begin_step()
        reduction.start(decoded)()
        if (seed + step) % 3:
            reduction.keep()
            sent += decoded
            given_in += flat
    owed = torch.zeros_like(like)
    for kept in reduction.kept():
        if kept.kind == "residual":
            span = next(span for span in frame.spans if span.name == kept.name)
            owed[span.offset : span.stop] = kept.tensor
    torch.testing.assert_close(sent + owed, given_in, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BIASED)
def test_parameters_that_nobody_used_are_owed_what_they_were(name: str) -> None:
    frame = frame_of((40, 40), (50, 40))
    reduction = CompressedReduction(CODECS[name], frame, torch.zeros(frame.num_elements), ALONE)

    def step(seed: int, skipped: frozenset[str]) -> dict[str, Tensor]:
        reduction.begin_step()
        reduction.start(gradients(frame, seed))()
        reduction.keep(skipped)
        return {f"{kept.kind} {kept.name}": kept.tensor.clone() for kept in reduction.kept()}

    before = step(1, frozenset())
    after = step(2, frozenset({"p0"}))
    assert {key for key in before if torch.equal(before[key], after[key])} == {key for key in before if "p0" in key}
    assert len(before) == (4 if name == "powersgd" else 2)


@pytest.mark.parametrize("name", BIASED)
def test_rounds_of_one_step_hand_on_what_they_owe(name: str) -> None:
    """ZeRO-2 reduces once per microbatch: two rounds of a step leave what two steps would."""
    frame = frame_of((40, 40))
    like = torch.zeros(frame.num_elements)
    together, apart = (CompressedReduction(CODECS[name], frame, like, ALONE) for _ in range(2))
    together.begin_step()
    for seed in (1, 2):
        together.start(gradients(frame, seed))()
        apart.begin_step()
        apart.start(gradients(frame, seed))()
        apart.keep()
    together.keep()
    for one, other in zip(together.kept(), apart.kept(), strict=True):
        assert torch.equal(one.tensor, other.tensor), one.kind


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_is_not_finite_stays_so_and_is_forgotten_with_the_step(name: str, value: float) -> None:
    frame = frame_of((64, 40), (30, 30))
    reduction = CompressedReduction(CODECS[name], frame, torch.zeros(frame.num_elements), ALONE)
    broken, sound = gradients(frame, 1) * 1e-3, gradients(frame, 2)
    broken[100] = value
    reduction.begin_step()
    reduction.start(broken)()
    assert not bool(broken.isfinite().all()), "the step would not be skipped"
    reduction.begin_step()
    reduction.start(sound)()
    assert bool(sound.isfinite().all())
    fresh = gradients(frame, 2)
    CompressedReduction(CODECS[name], frame, fresh, ALONE).start(fresh)()
    assert torch.equal(sound, fresh)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_zeros_stay_zeros(name: str) -> None:
    frame = frame_of((32, 32), gap=7)
    flat = torch.zeros(frame.num_elements)
    reduction = CompressedReduction(CODECS[name], frame, flat, ALONE)
    for _ in range(3):
        reduction.begin_step()
        reduction.start(flat)()
        reduction.keep()
    assert squares(flat) == 0
    after = gradients(frame, 1)
    reduction.begin_step()
    reduction.start(after)()
    assert squares(after) > 0, "a codec that has seen nothing but zeros goes on"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.floats(0.001, 1.0), st.integers(0, 2**31), st.floats(0, 0.99))
def test_top_k_is_exact_whatever_the_sample_says(length: int, share: float, seed: int, zeros: float) -> None:
    frame = frame_of((length, 1))
    flat = gradients(frame, seed)
    flat[torch.rand(length, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    wanted = flat.clone()
    compression = Compression(codec="topk", topk_share=share)
    count = min(length, -(-int(share * length * 1e6) // 1_000_000))
    decoded = flat.clone()
    CompressedReduction(compression, frame, flat, ALONE).start(decoded)()
    assert int((decoded != 0).sum()) in (min(n, int((flat != 0).sum())) for n in (count, count + 1))
    assert bool((decoded[decoded != 0] == wanted[decoded != 0]).all()), "values keep their sign and size"
    left = (flat - decoded).abs().max()
    assert int((decoded != 0).sum()) == 0 or left <= decoded[decoded != 0].abs().min()


def test_which_parameters_are_compressed() -> None:
    assert CODECS["powersgd"].takes((64, 64))
    assert CODECS["powersgd"].takes((64, 3, 3, 3))
    assert not CODECS["powersgd"].takes((64,))
    assert not CODECS["powersgd"].takes((4, 64)), "factors of rank 2 are more than half as large"
    assert CODECS["topk"].takes((1024,))
    assert not CODECS["topk"].takes((1023,))
    assert CODECS["int8"].takes((1024,))
    assert not CODECS["int8"].takes((1023,)), "a norm beside a large gradient would be rounded to zero"
    assert CODECS["bf16"].takes((1,))
