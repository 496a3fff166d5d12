"""What sources leave unsaid: whose software it was, of which year, and in which convention its figures are."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.published._rows import Run

FlopConvention = Literal["full", "causal", "linear"]
"""What counts as model FLOPs of attention: all scores, the unmasked half, none."""
MemoryFigure = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkHistory:
    """One training system, as it was at some time."""

    name: str
    flops: FlopConvention = "full"
    memory: MemoryFigure = "reserved"
    """The one of the three peaks that it publishes."""
    memory_model: str = "megatron-lm"
    """What it keeps in memory, by name in `MEMORY_OF_FRAMEWORKS`."""
    reports_first: bool = False
    """Whether it publishes the memory of the first pipeline rank instead of the fullest."""
    shards_optimizer: bool = False
    """Whether it means ZeRO-1 where it does not say."""
    fully_sharded: bool = False
    """Whether it means ZeRO-3 where it does not say."""
    flash_since: int = 2023
    """First year with fused attention."""
    overlaps_gradients_since: int = 2021
    overlaps_tensor_since: int = 9999
    overlaps_backward_since: int = 9999
    """First year in which gradients are summed over tensor ranks beside the products for the weights."""
    bucket_elements: int = 0
    bucket_elements_per_rank: int = 0
    sends_tokens_once_since: int = 9999
    """First year with DeepEP or the like."""
    interleaves_since: int = 9999
    """First year in which unsaid means as many stages per rank as the layers allow."""
    sequence_parallel_since: int = 2022
    balances_experts: bool = False
    """Whether it says that its routing was forced to be even."""
    overlaps_experts: bool = False
    """Whether tokens travel to experts beside another microbatch's computation."""
    vendor_attention: bool = False
    """Whether its attention is NVIDIA's own (cuDNN) rather than FlashAttention's releases."""
    fuses_since: int = 2025
    """First year in which norms, activations and rotations run as one kernel each."""
    lean_since: int = 9999
    """First year in which the host issues kernels without Python between them: graphs, compilation."""
    lean_mixtures_since: int = 2026
    """The same of mixtures of experts, whose shapes change from step to step."""


_NEVER = 9999
_NVIDIA = FrameworkHistory(
    name="megatron-lm",
    memory="allocated",
    memory_model="megatron-lm",
    overlaps_gradients_since=2023,
    overlaps_tensor_since=2024,
    overlaps_backward_since=2022,
    bucket_elements=40_000_000,
    bucket_elements_per_rank=1_000_000,
    sends_tokens_once_since=2025,
    vendor_attention=True,
    fuses_since=2020,
    lean_since=2024,
)
_NEMO = replace(_NVIDIA, name="nemo", interleaves_since=2024)
_DEEPSPEED = FrameworkHistory(
    name="megatron-deepspeed",
    memory="device",
    memory_model="megatron-lm",
    flash_since=_NEVER,
    fuses_since=2020,
    overlaps_gradients_since=_NEVER,
    sequence_parallel_since=_NEVER,
    bucket_elements=500_000_000,
)
_FSDP = FrameworkHistory(name="fsdp", fully_sharded=True, memory_model="torchtitan")
_XLA = replace(_FSDP, name="jax", fuses_since=2020, lean_since=2020)
_FRAMEWORKS: tuple[tuple[str, FrameworkHistory], ...] = (
    (r"megatron-bridge|mbridge", replace(
        _NVIDIA, name="megatron-bridge", flops="causal", interleaves_since=2024, balances_experts=True,
    )),
    (r"automodel", replace(
        _FSDP, name="nemo-automodel", flops="causal", sends_tokens_once_since=2025, vendor_attention=True,
        fuses_since=2024, balances_experts=True,
    )),
    (r"mlperf", replace(_NVIDIA, name="mlperf", memory="reserved", overlaps_tensor_since=2023, lean_since=2023)),
    (r"dgxc|dgx.?cloud|nemo|launcher", _NEMO),
    (r"zero.?bubble|zb-|v-schedule", replace(
        _NVIDIA, name="zero-bubble", flash_since=_NEVER, overlaps_tensor_since=_NEVER, vendor_attention=False,
        sequence_parallel_since=_NEVER,
    )),
    (r"vtrain", _DEEPSPEED),
    (r"sailor", replace(_DEEPSPEED, name="megatron-deepspeed-fp32", fuses_since=_NEVER)),
    (r"bigscience|bloom", replace(_DEEPSPEED, reports_first=True, shards_optimizer=True)),
    (r"megatron-deepspeed|mt-nlg|turing", _DEEPSPEED),
    (r"megascale|bytedance|vescale", replace(_NVIDIA, name="megascale", overlaps_tensor_since=2023, lean_since=2023)),
    (r"hagemann|parallelization-layouts|aleph", FrameworkHistory(name="hagemann", overlaps_gradients_since=_NEVER)),
    (r"llama-megatron|megatron-llama", replace(_NVIDIA, name="megatron-llama")),
    (r"megatron|korthikanti|narayanan|sc21", _NVIDIA),
    (r"llm-foundry|mosaic|composer", replace(_FSDP, name="llm-foundry", fuses_since=2020)),
    (r"torchtitan", replace(_FSDP, name="torchtitan")),
    (r"fms-fsdp|foundation-model", replace(_FSDP, name="fms-fsdp", fuses_since=2023, lean_since=2023)),
    (r"nanotron|ultra-?scale", FrameworkHistory(name="nanotron", memory="allocated", memory_model="nanotron")),
    (r"internevo|internlm", FrameworkHistory(name="internevo", fuses_since=2023)),
    (r"colossal", FrameworkHistory(name="colossalai")),
    (r"alpa\b", replace(_DEEPSPEED, name="alpa", lean_since=2020)),
    (r"maxtext|tpu", replace(_XLA, name="maxtext")),
    (r"levanter|haliax", replace(_XLA, name="levanter")),
    (r"jax|t5x|pax|palm|gopher|xla", _XLA),
    (r"neox", replace(_DEEPSPEED, name="gpt-neox", flash_since=2023)),
    (r"deepspeed|zero-infinity|ulysses", replace(_DEEPSPEED, name="deepspeed", flash_since=2023, fuses_since=2024)),
    (r"deepseek", replace(_NVIDIA, name="deepseek", overlaps_experts=True)),
    (r"fsdp|olmo|axolotl|accelerate|hugging|litgpt|lit-gpt|opt-175", _FSDP),
)  # fmt: skip
_OTHER = FrameworkHistory(name="other")
_BY_SOURCE: tuple[tuple[str, FrameworkHistory], ...] = (
    # Hagemann et al. used their fused norm in all of these runs, and in a fifth of the others.
    (r"sequence_parallelism\.xlsx", FrameworkHistory(name="hagemann-fused", overlaps_gradients_since=_NEVER)),
)
"""Documents whose runs differ from their family's."""

_YEARS_OF_SOURCES: tuple[tuple[str, int], ...] = (
    (r"golden_values", 2025),
    (r"narayanan|sc21|2104\.04473", 2021),
    (r"korthikanti|2205\.05198", 2022),
    (r"2401\.10241|zero.?bubble", 2023),
    (r"vtrain", 2022),
    (r"sailor", 2024),
    (r"bigscience", 2021),
    (r"hagemann|2311\.05610", 2023),
    (r"llm-foundry", 2023),
    (r"internevo", 2023),
    (r"nanotron", 2024),
    (r"fms-fsdp", 2024),
    (r"alpa\b", 2022),
    (r"mlperf training v3", 2023),
    (r"mlperf training v4", 2024),
    (r"mlperf training v5", 2025),
    (r"megatron-core r0\.8", 2024),
    (r"dgxc|mbridge|megatron-bridge|automodel", 2025),
)
_YEARS_OF_DEVICES = (
    (r"p100|v100|tpu-v3|2080|titan", 2020),
    (r"a100|a800|tpu-v4|3090|mi250", 2022),
    (r"b200|b300|mi355", 2025),
)


def attention_speed(history: FrameworkHistory, year: int, kind: str) -> float:
    """Return the speed of fused attention of a year over the best that was published for the device.

    FlashAttention's first release, and Triton's copies of it, ran at about half the speed of the second on an A100 (Dao
    2023, arXiv 2307.08691); the second runs on Hopper at about two thirds of the third (Shah et al. 2024, 2407.08608).
    """
    if history.vendor_attention and year >= 2023:
        return 1.0
    speed = 0.5 if year < 2023 else 0.6 if year == 2023 else 1.0
    is_newer = any(part in kind for part in ("h100", "h200", "h800", "h20", "b200", "b300"))
    return min(speed, 0.65) if is_newer else speed


def history_of(run: Run) -> FrameworkHistory:
    """Return the training system that a row's family or source names."""
    for pattern, history in _BY_SOURCE:
        if re.search(pattern, run.source.lower()):
            return history
    for text in (run.family.lower(), run.source.lower(), run.device.lower()):
        for pattern, history in _FRAMEWORKS:
            if re.search(pattern, text):
                return history
    return _OTHER


def year_of(run: Run) -> int:
    """Return the year of the software: what the source says, else what its device makes likely."""
    text = f"{run.family} {run.source}".lower()
    if container := re.search(
        r'\b(2[0-9])\.(?:0[1-9]|1[0-2])(?:\.\d+)?\b(?=[^"]{0,14}container|-era|\)| ?[,"]|$)', text
    ):
        return 2000 + int(container.group(1))
    if container := re.search(r"(?:nemo|release|ngc) ?(2[0-9])\.(?:0[1-9]|1[0-2])", text):
        return 2000 + int(container.group(1))
    for pattern, year in _YEARS_OF_SOURCES:
        if re.search(pattern, text):
            return year
    if stated := re.search(r"(?<![\d.])(20[12][0-9])(?!\d)", text):
        return int(stated.group(1))
    if paper := re.search(r"arxiv[ :]*(\d\d)(?:0[1-9]|1[0-2])\.\d{4,5}", text):
        return 2000 + int(paper.group(1))
    for pattern, year in _YEARS_OF_DEVICES:
        if re.search(pattern, run.device.lower()):
            return year
    return 2024
