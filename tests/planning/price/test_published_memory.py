"""Predicted against measured peaks of other systems, allocated or reserved as each publishes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import pytest
from benchmarks.published import MEMORY_OF_FRAMEWORKS
from memories import memory_of

from weft.model.profile import ModelSizes, profile_of_sizes
from weft.model.profile.known import known_model
from weft.techniques.cost_terms import WEFT, Layout

GIBI = 2**30


class Measured(NamedTuple):
    model: str
    layout: Layout
    gibibytes: float


NANOTRON_1B = ModelSizes(
    name="llama-1b",
    num_layers=24,
    hidden_size=2048,
    num_heads=32,
    ffn_size=4096,
    vocabulary_size=50257,
    sequence_length=4096,
    tied=True,
)
"""huggingface.co/nanotron/old_bench, July 2024: ZeRO-1, gradients in fp32, no recomputation."""


def nanotron(data: int, tensor: int, microbatch: int) -> Layout:
    return Layout(
        replicate=data, tensor=tensor, sequence_parallel=tensor > 1, zero=1, microbatch_size=microbatch, bucket_bytes=0
    )


@pytest.mark.parametrize(
    ("data", "tensor", "microbatch", "gibibytes"),
    [(16, 1, 1, 15.42), (16, 1, 2, 24.49), (16, 1, 4, 41.89), (32, 2, 2, 12.86), (4, 2, 8, 42.63), (16, 4, 4, 12.84),
     (16, 4, 8, 23.84), (16, 4, 16, 45.85), (4, 4, 16, 46.43)],
)  # fmt: skip
def test_nanotron(data: int, tensor: int, microbatch: int, gibibytes: float) -> None:
    framework = replace(WEFT, memory=MEMORY_OF_FRAMEWORKS["nanotron"])
    (stage,) = memory_of(profile_of_sizes(NANOTRON_1B), nanotron(data, tensor, microbatch), framework)
    assert stage.kinds.allocated / GIBI == pytest.approx(gibibytes, rel=0.04)


@pytest.mark.parametrize(
    ("devices", "length", "microbatch", "recompute", "gibibytes"),
    [(8, 8192, 2, "selective", 77.0), (128, 8192, 2, "selective", 62.0), (8, 32768, 1, "full", 83.9)],
)
def test_torchtitan(
    devices: int, length: int, microbatch: int, recompute: Literal["selective", "full"], gibibytes: float
) -> None:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3 8B, FSDP2 with torch.compile, reserved."""
    profile = profile_of_sizes(known_model("llama-3-8b").sizes, length)
    layout = Layout(shard=devices, zero=3, microbatch_size=microbatch, recompute=recompute, master_bytes=10)
    (stage,) = memory_of(profile, layout, replace(WEFT, memory=MEMORY_OF_FRAMEWORKS["torchtitan"]))
    assert stage.reserved / GIBI == pytest.approx(gibibytes, rel=0.05)


def test_zero_bubble_twice_filled() -> None:
    """Table 4 again: ZB-2p holds 59 GB where 1F1B holds 30."""
    sizes = replace(
        known_model("gpt3-13b").sizes,
        num_layers=22,
        hidden_size=2304,
        num_heads=24,
        head_size=None,
        ffn_size=9216,
        sequence_length=1024,
        learned_positions=1024,
    )
    cuts = tuple(3 * stage - 1 for stage in range(1, 8))
    layout = Layout(pipeline=8, schedule="zero_bubble_2p", cuts=cuts, microbatch_size=6, microbatches=24)
    framework = replace(WEFT, flash_attention=False, memory=MEMORY_OF_FRAMEWORKS["zero-bubble"])
    fullest = max(stage.kinds.allocated for stage in memory_of(profile_of_sizes(sizes), layout, framework))
    assert fullest / GIBI == pytest.approx(59, rel=0.08)


@pytest.mark.parametrize(
    ("model", "length", "layout", "gibibytes", "error"),
    [
        ("llama-3-70b", 8192, Layout(shard=32, tensor=8, microbatch_size=16), 67.6, 0.05),
        ("llama-3.1-405b", 32768, Layout(pipeline=8, shard=8, tensor=8, microbatches=8), 75.3, 0.15),
        ("llama-3.1-405b", 65536, Layout(pipeline=8, shard=4, context=2, tensor=8, microbatches=8), 75.9, 0.15),
        ("llama-3.1-405b", 262144, Layout(pipeline=8, context=8, tensor=8, microbatches=8), 84.9, 0.25),
    ],
)
def test_torchtitan_in_parts(model: str, length: int, layout: Layout, gibibytes: float, error: float) -> None:
    """The same page: the loss in parts over the tensor axis, and pipelines that hold whole weights and gradients."""
    profile = profile_of_sizes(known_model(model).sizes, length)
    layout = replace(layout, zero=3, sequence_parallel=True, recompute="full", master_bytes=10)
    stages = memory_of(profile, layout, replace(WEFT, memory=MEMORY_OF_FRAMEWORKS["torchtitan"]))
    assert max(stage.reserved for stage in stages) / GIBI == pytest.approx(gibibytes, rel=error)


@pytest.mark.parametrize(
    ("model", "length", "layout", "gibibytes"),
    [
        ("llama-3.1-8b", 8192, Layout(replicate=4, context=2, zero=1, gradient_bytes=2), 65.97),
        ("nemotron-4-15b", 4096, Layout(replicate=32, tensor=2, sequence_parallel=True, zero=1, gradient_bytes=2,
                                        microbatch_size=2), 67.96),
    ],
)  # fmt: skip
def test_nemo(model: str, length: int, layout: Layout, gibibytes: float) -> None:
    """NVIDIA/dgxc-benchmarking, example log lines: allocated."""
    profile = profile_of_sizes(known_model(model).sizes, length)
    (stage,) = memory_of(profile, layout, replace(WEFT, memory=MEMORY_OF_FRAMEWORKS["nemo"]))
    assert stage.kinds.allocated / GIBI == pytest.approx(gibibytes, rel=0.04)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "microbatch", "chunks", "gibibytes"),
    [(22, 2304, 24, 6, 1, 30), (30, 4096, 32, 3, 1, 39), (22, 2304, 24, 6, 3, 40), (30, 4096, 32, 3, 4, 48)],
)
def test_pipelines(layers: int, hidden: int, heads: int, microbatch: int, chunks: int, gibibytes: float) -> None:
    """Qi et al. 2023, arXiv 2401.10241, table 4: Megatron-LM without fused attention on 8 stages; first and last stage
    have a layer less; 1F1B, plain and interleaved."""
    sizes = replace(
        known_model("gpt3-13b").sizes,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        head_size=None,
        ffn_size=4 * hidden,
        sequence_length=1024,
        learned_positions=1024,
    )
    each = (layers + 2) // (8 * chunks)
    layout = Layout(
        pipeline=8,
        chunks=chunks,
        schedule="1f1b" if chunks == 1 else "interleaved_1f1b",
        cuts=tuple(each * stage - 1 for stage in range(1, 8 * chunks)),
        microbatch_size=microbatch,
        microbatches=24,
    )
    framework = replace(WEFT, flash_attention=False, memory=MEMORY_OF_FRAMEWORKS["zero-bubble"])
    fullest = max(stage.kinds.allocated for stage in memory_of(profile_of_sizes(sizes), layout, framework))
    assert fullest / GIBI == pytest.approx(gibibytes, rel=0.08)
