"""Codecs by themselves: what they lose, what they owe, what is not finite, and how many bytes they say they send."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.techniques.compression.codecs import CodecSpec, CompressedReduction, Frame, ParameterSpan, SignSGD
from weft.techniques.compression.codecs.randomk import drawn_places
from weft.techniques.compression.wire import count_of

ALONE = GroupView((0,), 0, None)
"""The work of one rank without a network: the sum over it is what its codec makes of its own gradients."""
CODECS = {
    "bf16": CodecSpec(codec="bf16"),
    "int8": CodecSpec(codec="int8"),
    "powersgd": CodecSpec(codec="powersgd", powersgd_rank=2),
    "topk": CodecSpec(codec="topk", topk_share=0.05),
    "randomk": CodecSpec(codec="randomk", randomk_share=0.25),
    "signsgd": CodecSpec(codec="signsgd"),
    "onebit": CodecSpec(codec="onebit"),
}
BIASED = ("powersgd", "topk", "onebit", "randomk", "signsgd")


def frame_of(*shapes: tuple[int, ...], gap: int = 0) -> Frame:
    spans, stop = list[ParameterSpan](), 0
    for index, shape in enumerate(shapes):
        spans.append(ParameterSpan(name=f"p{index}", offset=stop, shape=torch.Size(shape)))
        stop += torch.Size(shape).numel() + gap
    return Frame(spans=tuple(spans), num_elements=stop)


def gradients(frame: Frame, seed: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, a few of them a hundred times as large; padding is zero."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(frame.num_elements, dtype=dtype)
    for span in frame.spans:
        values = torch.randn(span.num_elements, generator=generator, dtype=dtype)
        outliers = torch.rand(span.num_elements, generator=generator) > 0.99
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
    # bf16 and int8 round once on the way out; half a unit of bf16 is at most 2⁻⁸ of a value.  What random-k draws may
    # be nothing but zeros, and what PowerSGD's basis sees, too: they lose less than all on average, see below.
    kept = {"bf16": 1 - 2.0**-16, "int8": 1 - 0.004, "topk": 0.05, "signsgd": 1 / 256, "onebit": 1 / 256}.get(name, 0.0)
    assert squares(decoded - flat) <= (1 - kept) * squares(flat) * (1 + 1e-5) + 1e-60


# ── PowerSGD ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def low_rank(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    """A random matrix of this rank, flat."""
    generator = torch.Generator().manual_seed(seed)
    factors = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((rows, rank), (rank, columns))
    )
    left, right = factors
    return (left @ right).view(-1)


def bases(reduction: CompressedReduction) -> dict[str, Tensor]:
    """Orthonormal ones of what PowerSGD's bases span, by parameter."""
    return {kept.name: torch.linalg.qr(kept.tensor)[0] for kept in reduction.kept() if kept.kind.startswith("basis")}


def steps_of(reduction: CompressedReduction, flat: Tensor, number: int) -> Iterator[Tensor]:
    """Yield what is decoded of the same gradients in each of some steps."""
    for _ in range(number):
        decoded = flat.clone()
        reduction.begin_step()
        reduction.start(decoded)()
        reduction.keep()
        yield decoded


def powersgd(frame: Frame, flat: Tensor, rank: int) -> CompressedReduction:
    return CompressedReduction(CodecSpec(codec="powersgd", powersgd_rank=rank, feedback=False), frame, flat, ALONE)


matrices = st.tuples(st.integers(1, 30), st.integers(1, 30))


@settings(max_examples=60, deadline=None)
@given(st.lists(matrices, min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 2**31), st.floats(-12, 12))
def test_powersgd_keeps_what_its_basis_sees(sizes: list[tuple[int, int]], rank: int, seed: int, power: float) -> None:
    """‖C(M) − M‖² ≤ ‖M‖² − ‖M·Q‖² for an orthonormal Q of the basis; and never more than in the step before.

    C(M) = P̂P̂ᵀM, a projection on what M·Q spans, so ‖P̂ᵀM‖ ≥ ‖P̂ᵀM·Q‖ = ‖M·Q‖.  The next basis spans MᵀP̂, so what it sees
    is at least ‖P̂ᵀM‖ again.
    """
    frame = frame_of(*sizes, gap=3)
    flat = gradients(frame, seed, scale=10.0**power, dtype=torch.float64)
    reduction = powersgd(frame, flat, rank)
    most = {span.name: squares(flat[span.offset : span.stop]) for span in frame.spans}
    seen = bases(reduction)
    for decoded in steps_of(reduction, flat, 4):
        for span in frame.spans:
            here = slice(span.offset, span.stop)
            lost, whole = squares(decoded[here] - flat[here]), squares(flat[here])
            assert lost <= whole - squares(flat[here].view(span.shape) @ seen[span.name]) + 1e-12 * whole
            assert lost <= most[span.name] + 1e-12 * whole
            most[span.name] = lost
        seen = bases(reduction)


@settings(max_examples=60, deadline=None)
@given(matrices, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31), st.floats(-12, 12))
def test_powersgd_loses_nothing_of_a_low_rank(
    size: tuple[int, int], own: int, rank: int, seed: int, power: float
) -> None:
    """A matrix of at most its rank comes out whole, from the first step on: M·Q spans all that M does."""
    frame = frame_of(size)
    flat = low_rank(*size, min(own, rank), seed) * 10.0**power
    for decoded in steps_of(powersgd(frame, flat, rank), flat, 3):
        assert squares(decoded - flat) <= 1e-16 * squares(flat)


@settings(max_examples=5, deadline=None)
@given(st.integers(4, 16), st.integers(4, 16), st.integers(1, 3), st.integers(0, 2**31), st.integers(1, 4))
def test_powersgd_contracts_whatever_the_matrix(rows: int, columns: int, rank: int, seed: int, few: int) -> None:
    """E‖C(M) − M‖² ≤ (1 − r/d)‖M‖² over first bases, with d columns: a random Q sees r/d of every matrix on average.

    The same matrix under 400 names, with nothing in most of its columns: a basis that points somewhere in particular
    would miss them.  Bounds by Bernstein's inequality, missed once in 10⁹.
    """
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix[:, few:] = 0
    frame = frame_of(*[(rows, columns)] * 400)
    flat = (matrix / matrix.norm()).view(-1).repeat(400)
    reduction = powersgd(frame, flat, rank)
    seen = torch.tensor(
        [squares(flat[: rows * columns].view(rows, columns) @ one) for one in bases(reduction).values()]
    )
    share = min(rank, rows) / columns
    assert abs(float(seen.mean()) - share) <= deviation(float(seen.double().var()) * 400, 1.0) / 400
    (decoded,) = steps_of(reduction, flat, 1)
    lost = (decoded - flat).view(400, -1).square().sum(1)
    assert float(lost.mean()) <= 1 - float(seen.mean()) + 1e-12


def test_powersgd_finds_the_leading_directions() -> None:
    """With the same matrix again and again its basis becomes that of the best approximation of this rank."""
    frame = frame_of((40, 30))
    flat = gradients(frame, 5, dtype=torch.float64)
    *_, decoded = steps_of(powersgd(frame, flat, 3), flat, 60)
    best = torch.linalg.svdvals(flat.view(40, 30))[3:].square().sum()
    assert squares(decoded - flat) == pytest.approx(float(best), rel=1e-3)


# ── residuals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    assert len(before) == 2 * {"powersgd": 2, "randomk": 2, "onebit": 3}.get(name, 1)


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
    compression = CodecSpec(codec="topk", topk_share=share)
    count = min(length, -(-int(share * length * 1e6) // 1_000_000))
    decoded = flat.clone()
    CompressedReduction(compression, frame, flat, ALONE).start(decoded)()
    assert int((decoded != 0).sum()) in (min(n, int((flat != 0).sum())) for n in (count, count + 1))
    assert bool((decoded[decoded != 0] == wanted[decoded != 0]).all()), "values keep their sign and size"
    left = (flat - decoded).abs().max()
    assert int((decoded != 0).sum()) == 0 or left <= decoded[decoded != 0].abs().min()


# ── random-k ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.floats(0.001, 1.0), st.integers(0, 2**31))
def test_random_places_are_one_of_each_run(length: int, share: float, seed: int) -> None:
    count = count_of(length, share)
    places = drawn_places(length, count, str(seed)).tolist()
    assert len(places) == count == min(length, max(1, math.ceil(share * length)))
    for index, place in enumerate(places):
        assert index * length // count <= place < (index + 1) * length // count
    assert places == drawn_places(length, count, str(seed)).tolist()


def test_random_places_are_drawn_evenly() -> None:
    """10 of 35 elements, in runs of three and four: each as often as its run's length says, ±5 standard deviations."""
    draws = 4000
    hits = torch.zeros(35)
    for key in range(draws):
        hits[drawn_places(35, 10, str(key))] += 1
    for index in range(10):
        start, stop = index * 35 // 10, (index + 1) * 35 // 10
        chance = 1 / (stop - start)
        spread = 5 * math.sqrt(draws * chance * (1 - chance))
        assert bool(((hits[start:stop] - draws * chance).abs() < spread).all()), (index, hits[start:stop])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=3), st.floats(0.005, 1.0), st.integers(0, 2**31))
def test_random_k_contracts_on_average(lengths: list[int], share: float, seed: int) -> None:
    """E‖C(x) − x‖² = (1 − k/d)‖x‖² where k divides d, else at most (1 − 1/⌈d/k⌉)‖x‖², over one draw after another.

    Every draw is a projection.  Of a run of m elements, one of which is sent, the mean of the squares is sent on
    average; bounds by Bernstein's inequality for all runs and draws together, missed once in 10⁹.
    """
    frame = frame_of(*[(length, 1) for length in lengths])
    flat = gradients(frame, seed, dtype=torch.float64)
    compression = CodecSpec(codec="randomk", randomk_share=share, seed=seed, feedback=False)
    kept, number = 0.0, 150
    for decoded in steps_of(CompressedReduction(compression, frame, flat, ALONE), flat, number):
        assert abs(squares(decoded - flat) + squares(decoded) - squares(flat)) <= 1e-12 * squares(flat)
        kept += squares(decoded) / number
    expected, spread, largest, least = 0.0, 0.0, 0.0, 0.0
    for span in frame.spans:
        length, count = span.num_elements, count_of(span.num_elements, share)
        values = flat[span.offset : span.stop].square()
        for run in (values[i * length // count : (i + 1) * length // count] for i in range(count)):
            expected += float(run.mean())
            spread += float(run.var(correction=0))
            largest = max(largest, float(run.max()))
        least += float(values.sum()) / -(-length // count)
    assert abs(kept - expected) <= deviation(number * spread, largest) / number + 1e-9 * expected
    assert expected >= least * (1 - 1e-12), "less than the claim"


def deviation(variance: float, largest: float) -> float:
    """How far a sum of independent terms may be from its mean, once in 10⁹ farther: Bernstein's inequality.

    `variance` of the sum, and the largest deviation of a term.
    """
    rarity = math.log(2e9)
    return largest * rarity / 3 + math.sqrt((largest * rarity / 3) ** 2 + 2 * variance * rarity)


def test_random_k_draws_by_seed_parameter_and_step_and_by_nothing_else() -> None:
    """What is sent of a parameter depends neither on the bucket that it lies in nor on its place there."""

    def sent(frame: Frame, seed: int, steps: int) -> dict[str, Tensor]:
        reduction = CompressedReduction(replace(CODECS["randomk"], seed=seed), frame, flat_of(frame), ALONE)
        flat = flat_of(frame)
        for _ in range(steps):
            flat = flat_of(frame)
            reduction.begin_step()
            reduction.start(flat)()
            reduction.keep()
        return {span.name: flat[span.offset : span.stop] != 0 for span in frame.spans}

    def flat_of(frame: Frame) -> Tensor:
        return torch.ones(frame.num_elements)

    wide = frame_of((40, 30), (20, 70), gap=5)
    alone = Frame(spans=(replace(wide.spans[1], offset=0),), num_elements=1400)
    first = sent(wide, 1, 1)
    assert torch.equal(sent(alone, 1, 1)["p1"], first["p1"])
    assert not torch.equal(sent(wide, 2, 1)["p1"], first["p1"])
    assert not torch.equal(sent(wide, 1, 2)["p1"], first["p1"])
    assert not torch.equal(first["p0"][:300], first["p1"][:300])


# ── signs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1500), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_signs_are_packed_bit_by_bit(length: int, seed: int, dtype: torch.dtype) -> None:
    """Every block comes back as its mean magnitude with the signs of its values; zeros count as positive."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    values[::7] = 0
    codec = SignSGD()
    packed = torch.zeros(codec.packed_bytes(length), dtype=torch.uint8)
    codec.pack(values, packed)
    unpacked = torch.empty_like(values)
    codec.unpack(packed, unpacked)
    assert len(packed) == 4 * math.ceil(length / 256) + 4 * math.ceil(length / 32)
    for start in range(0, length, 256):
        block, found = values[start : start + 256], unpacked[start : start + 256]
        assert torch.equal(found >= 0, block >= 0)
        torch.testing.assert_close(found.abs(), block.abs().mean().expand(len(block)), rtol=1e-6, atol=0.0)


def test_padding_beside_signs_stays_zero() -> None:
    frame = frame_of((30, 40), (40, 40), gap=100)
    reduction = CompressedReduction(CODECS["signsgd"], frame, torch.zeros(frame.num_elements), ALONE)
    for seed in range(3):
        flat = gradients(frame, seed)
        reduction.begin_step()
        reduction.start(flat)()
        reduction.keep()
        for gap in frame.gaps():
            assert squares(flat[gap]) == 0
    assert [(gap.start, gap.stop) for gap in frame.gaps()] == [(1200, 1300), (2900, 3000)]


# ── 1-bit Adam ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_momenta_travel_by_signs_after_the_warm_up() -> None:
    """Gradients are exact for three steps; then Σ βᵗ⁻ˢ gₛ of what comes out has one magnitude in each block of 256."""
    frame = frame_of((40, 64))
    compression = CodecSpec(codec="onebit", onebit_warmup_steps=3, onebit_decay=0.8)
    reduction = CompressedReduction(compression, frame, torch.zeros(2560, dtype=torch.float64), ALONE)
    found, wanted = torch.zeros(2560, dtype=torch.float64), torch.zeros(2560, dtype=torch.float64)
    sizes = list[int]()
    for step in range(6):
        flat = torch.randn(2560, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        wanted = 0.8 * wanted + flat
        sizes.append(reduction.wire_bytes().sent + reduction.wire_bytes().reduced)
        decoded = flat.clone()
        reduction.begin_step()
        reduction.start(decoded)()
        reduction.keep()
        found = 0.8 * found + decoded
        assert torch.equal(decoded, flat) == (step < 3)
    for block in found.view(-1, 256).abs():
        torch.testing.assert_close(block, block[:1].expand(256), rtol=1e-6, atol=0.0)
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.4
    assert sizes == [8 * 2560] * 3 + [0] * 3, "alone nobody is sent signs"


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
    for name in ("onebit", "randomk", "signsgd"):
        assert CODECS[name].takes((1024,))
        assert not CODECS[name].takes((1023,))
