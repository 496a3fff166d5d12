"""Cores priced by what `weft probe` measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import (
    AttentionSpeed,
    BlockTime,
    Cluster,
    Devices,
    MatrixSpeed,
    Measured,
    MemorySpeed,
    parse_cluster_spec,
)
from weft.model.profile import ModelSizes, profile_of_sizes
from weft.planning.price import predict
from weft.planning.price._block_factors import BlockFit, _block, _summed, block_fit
from weft.techniques.cost_terms import DATASHEET, WEFT, Device, Layout
from weft.techniques.cost_terms._measured import Speeds

SETTINGS = ((1, 2), (2, 1))
SHAPES = ((64, 64, 64), (512, 512, 512), (2048, 512, 512))
RATE = 5e10
"""FLOP/s of a core of this made machine."""


def devices(block: float = 0.02, *, settings: tuple[tuple[int, int], ...] = SETTINGS) -> Devices:
    """Two cores of RATE each, 4 GB/s of `add`; on one core a block takes `block` seconds forward, then twice that."""
    return Devices(
        kind="cpu",
        count=2,
        memory_bytes=4 << 30,
        peak_flops={"fp32": RATE},
        measured=Measured(
            matrix=tuple(
                MatrixSpeed(
                    precision="fp32", m=m, n=n, k=k, ranks=r, threads=t, seconds=2.0 * m * n * k / RATE / t + 1e-6
                )
                for r, t in settings
                for m, n, k in SHAPES
            ),
            attention=tuple(
                AttentionSpeed(
                    precision="fp32",
                    samples=4,
                    heads=8,
                    tokens=tokens,
                    head_size=64,
                    backward=backward,
                    ranks=r,
                    threads=t,
                    seconds=(3.5 if backward else 1) * 4 * 8 * tokens**2 * 64 * 2 / RATE / t,
                )
                for r, t in settings
                for tokens in (128, 512)
                for backward in (False, True)
            ),
            memory=tuple(
                MemorySpeed(work=work, elements=elements, ranks=r, threads=t, seconds=rate * elements / t + 1e-6)
                for r, t in settings
                for work, rate in (("add", 3e-9), ("adamw", 7e-9))
                for elements in (1 << 10, 1 << 16, 1 << 22)
            ),
            blocks=tuple(
                BlockTime(
                    precision="fp32",
                    samples=4,
                    tokens=128,
                    hidden_size=256,
                    heads=4,
                    ffn_size=768,
                    ranks=r,
                    threads=t,
                    forward_seconds=block / t,
                    backward_seconds=2 * block / t,
                )
                for r, t in settings
            ),
            operator_seconds=1e-6,
        ),
    )


def speeds(threads: float, **more: tuple[tuple[int, int], ...]) -> Speeds:
    found = Speeds.of(devices(**more), threads)  # pyright: ignore[reportArgumentType]
    assert found is not None
    return found


@pytest.mark.parametrize("shape", [(64, 64, 64), (512, 512, 512), (100, 300, 200), (4096, 4096, 4096)])
@pytest.mark.parametrize("threads", [1.0, 2.0])
def test_products_of_a_plain_machine_follow_its_line(shape: tuple[int, int, int], threads: float) -> None:
    m, n, k = shape
    expected = 2.0 * m * n * k / RATE / threads + 1e-6
    assert speeds(threads).product_seconds(m, n, k, "fp32") == pytest.approx(expected, rel=0.05)
    assert speeds(threads).product_seconds(m, n, k, "bf16") is None


def test_a_measured_shape_is_priced_as_measured_and_its_neighbours_like_it() -> None:
    plain = devices()
    assert plain.measured is not None
    rows = [
        replace(row, seconds=3 * row.seconds) if row.m == 2048 and row.ranks == 2 else row
        for row in plain.measured.matrix
    ]
    found = Speeds.of(replace(plain, measured=replace(plain.measured, matrix=tuple(rows))), 1.0)
    assert found is not None
    alike = 2.0 * 1900 * 512 * 512 / RATE
    assert found.product_seconds(1900, 512, 512, "fp32") == pytest.approx(3 * alike, rel=0.1)
    assert found.product_seconds(64, 64, 64, "fp32") == pytest.approx(2.0 * 64**3 / RATE + 1e-6, rel=0.1)


def test_attention_memory_and_updates() -> None:
    found = speeds(1.0)
    forward = 2 * 8 * 256**2 * 64 * 2 / RATE
    assert found.attention_seconds(2, 8, 256, 64, "fp32", backward=False) == pytest.approx(forward, rel=0.01)
    assert found.attention_seconds(2, 8, 256, 64, "fp32", backward=True) == pytest.approx(2.5 * forward, rel=0.01)
    assert found.attention_seconds(2, 8, 256, 64, "bf16", backward=True) is None
    assert found.moved_seconds(12e6) == pytest.approx(3e-3, rel=0.05)
    assert found.moved_seconds(12e9) == pytest.approx(3, rel=0.01)
    assert found.moved_seconds(1.0) == pytest.approx(3e-9 * 1024 + 1e-6)
    assert found.update_seconds(1e6) == pytest.approx(7e-3, rel=0.05)


def test_more_ranks_than_cores_share_them() -> None:
    once, twice = speeds(1.0), speeds(0.5)
    assert twice.scale == 2 * once.scale == 2
    assert twice.update_seconds(1e6) == 2 * (once.update_seconds(1e6) or 0)
    measured = speeds(0.5, settings=(*SETTINGS, (4, 1)))
    assert measured.scale == 1  # four ranks on two cores were measured themselves


def test_nothing_measured_nothing_looked_up() -> None:
    assert Speeds.of(replace(devices(), measured=None), 1.0) is None
    assert Speeds.of(replace(devices(), measured=Measured()), 1.0) is None
    assert Device(parse_cluster_spec("8xh100").nodes[0].devices, DATASHEET, WEFT).speeds is None


def test_blocks_of_several_sizes_show_a_factor_and_an_extra() -> None:
    plain = devices()
    device = Device(plain, DATASHEET, WEFT, 1.0)
    assert plain.measured is not None
    (row,) = (row for row in plain.measured.blocks if row.ranks == 2)
    rows: list[BlockTime] = []
    for samples, hidden in ((1, 32), (4, 256), (8, 512)):
        shape = replace(row, samples=samples, hidden_size=hidden, ffn_size=3 * hidden)
        there, back = _summed(device, _block(shape), shape)
        forward, backward = there[0] + 3 * there[1] + 2e-3, back[0] + 2 * back[1] + 3e-3
        rows.append(replace(shape, forward_seconds=forward, backward_seconds=backward))
    found = Device(replace(plain, measured=replace(plain.measured, blocks=tuple(rows))), DATASHEET, WEFT, 1.0)
    operators = len(_block(row).operators)
    fit = block_fit(found, "fp32")
    assert fit.forward.factor == pytest.approx(3, rel=0.02)
    assert fit.backward.factor == pytest.approx(2, rel=0.02)
    assert fit.forward.extra * operators == pytest.approx(2e-3, rel=0.05)
    assert fit.backward.extra * operators == pytest.approx(3e-3, rel=0.05)
    assert block_fit(found, "bf16") == BlockFit()
    assert block_fit(Device(replace(plain, measured=None), DATASHEET, WEFT, 1.0), "fp32") == BlockFit()


def test_cores_that_compute_hide_little() -> None:
    calibration = DATASHEET.on_cores()
    assert calibration.overlap_share < DATASHEET.overlap_share
    assert calibration.step_seconds < DATASHEET.step_seconds


def test_measured_blocks_set_the_step() -> None:
    sizes = ModelSizes(
        num_layers=8, hidden_size=256, num_heads=4, sequence_length=128, ffn_size=768, vocabulary_size=256
    )  # fmt: skip
    profile = profile_of_sizes(sizes)
    layout = Layout(replicate=2, microbatch_size=4, precision="fp32")
    times: list[float] = []
    for block in (0.02, 0.03):
        base = parse_cluster_spec("2xcpu")
        cluster = replace(base, nodes=(replace(base.nodes[0], devices=devices(block)),))
        times.append(predict(profile, cluster, layout).step_seconds)
        assert times[-1] > 8 * 3 * block  # eight such blocks, and embedding, head, reduction, update
        assert times[-1] < 1.4 * 8 * 3 * block
    assert times[1] > 1.3 * times[0]


def test_half_of_the_work_takes_half_of_the_time() -> None:
    cluster = with_devices(parse_cluster_spec("2xcpu"), devices(0.02))
    sizes = ModelSizes(
        num_layers=4, hidden_size=256, num_heads=4, sequence_length=128, ffn_size=768, vocabulary_size=256
    )  # fmt: skip
    profile = profile_of_sizes(sizes)
    both = predict(profile, cluster, Layout(replicate=2, microbatch_size=2, precision="fp32")).time
    alone = predict(profile, cluster, Layout(microbatch_size=4, precision="fp32")).time
    assert both.total - both.data == pytest.approx(alone.total, rel=0.25)


def with_devices(cluster: Cluster, found: Devices) -> Cluster:
    return replace(cluster, nodes=(replace(cluster.nodes[0], devices=found),))
