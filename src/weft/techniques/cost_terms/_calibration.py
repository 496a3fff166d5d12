"""How much of its data sheet a machine reaches: few numbers with a physical meaning, none of them about one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.config.document import HIDDEN, Rules, bind, read_document
from weft.errors import DataError
from weft.techniques.cost_terms._corrections import Corrections

_RULES = Rules(DataError)

MATMUL_SHARES: Mapping[str, Mapping[str, float]] = {
    "v100": {"fp16": 0.80},
    "a100": {"fp16": 0.87, "bf16": 0.87},
    "h100": {"bf16": 0.80, "fp16": 0.80, "fp8": 0.71},
    "h200": {"bf16": 0.80, "fp16": 0.80, "fp8": 0.73},
    "gh200": {"bf16": 0.84, "fp16": 0.84, "fp8": 0.73},
    "b200": {"bf16": 0.78, "fp16": 0.78, "fp8": 0.76},
    "b300": {"bf16": 0.79, "fp16": 0.79, "fp8": 0.76},
    "gb200": {"bf16": 0.73, "fp16": 0.73, "fp8": 0.72},
    "gb300": {"bf16": 0.73, "fp16": 0.73, "fp8": 0.72},
    "mi300x": {"bf16": 0.51, "fp16": 0.51, "fp8": 0.48},
    "mi325x": {"bf16": 0.60, "fp16": 0.60, "fp8": 0.55},
    "mi355x": {"bf16": 0.63, "fp16": 0.63, "fp8": 0.60},
}
"""Best matrix product that was measured over the data sheet's peak, by part and precision.

Source: the table of maximum achievable matmul FLOP/s in Stas Bekman's Machine Learning Engineering Open Book; V100 from
NVIDIA's cuBLAS figures (about 100 of 125 TFLOP/s).
"""

ATTENTION_SHARES: Mapping[str, tuple[float, float]] = {
    "v100": (0.40, 0.30),
    "a100": (0.65, 0.52),
    "h100": (0.55, 0.45),
    "b200": (0.55, 0.42),
    "mi300x": (0.35, 0.25),
}
"""Part → shares of peak of fused attention, forward and backward, head size 128, long sequences.

Source: FlashAttention-2 (arXiv 2307.08691, figures 4 to 6: up to 73 % forward and 63 % backward on an A100; causal
less) and FlashAttention-3 (arXiv 2407.08608, figures 5 and 6).
"""

ATTENTION_LIKE: Mapping[str, str] = {
    "h200": "h100",
    "gh200": "h100",
    "b300": "b200",
    "gb200": "b200",
    "gb300": "b200",
    "mi325x": "mi300x",
    "mi355x": "mi300x",
}


SUSTAINED_SHARES: Mapping[str, float] = {
    **dict.fromkeys(("h100", "h200", "gh200", "b200", "b300", "gb200", "gb300"), 0.93),
    "a100": 0.95,
}
"""Part → what is left of its best matrix product at the power limit: since Hopper, parts clock down by 5 to 10 % on
random operands (H. He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data", 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the data sheet does not say.  `DATASHEET` holds published measurements of parts, never of training runs."""

    name: str
    matmul_shares: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MATMUL_SHARES)
    """Part → precision → share of peak that large matrix products reach."""
    sustained_shares: Mapping[str, float] = field(default_factory=lambda: SUSTAINED_SHARES)
    other_matmul_share: float = 0.75
    """The same, of parts and precisions that the table lacks."""
    attention_shares: Mapping[str, tuple[float, float]] = field(default_factory=lambda: ATTENTION_SHARES)
    other_attention_shares: tuple[float, float] = (0.5, 0.4)
    matmul_factor: float = 0.92
    """Factor on all shares of matrix products.  The best of thousands of shapes is a tenth above the usual one (same
    book), and for hours on end power and temperature allow less than in a benchmark."""
    inner_size_half: float = 160.0
    """K₀: a product with inner size K reaches K / (K + K₀), for it fills and empties its pipeline."""
    cpu_inner_size_half: float = 32.0
    grouped_share: float = 0.95
    """Share of the rate of one product that several side by side reach, as those of a rank's experts: DeepGEMM's tables
    have 1,297 TFLOP/s for four groups where one product has 1,358 (H800, FP8)."""
    launch_seconds: float = 2.5e-6
    """Time between two kernels of an accelerator."""
    host_seconds: float = 9e-6
    """Time in which the host issues one kernel: a block is never faster than its kernels are issued."""
    eager_host_seconds: float = 6e-5
    """The same where plain Python does it: one operator of a profile is about five kernels then, of 10 µs or more."""
    cpu_operator_seconds: float = 1.2e-5
    """Overhead of an operator on cores."""
    memory_share: float = 0.85
    """Share of the data sheet's memory bandwidth that kernels over plain memory reach."""
    unfused_factor: float = 1.0
    """Factor on what norms, activations and rotations move: more as chains of plain kernels than as one."""
    cpu_memory_bytes_per_second: float = 1.2e10
    """Memory bandwidth of one core, where the cluster does not say."""
    overlap_slowdown: float = 1.06
    """σ: what computation loses while communication runs beside it."""
    overlap_share: float = 0.9
    """ρ: of the computation beside which communication can be hidden."""
    tensor_overlap_share: float = 0.6
    """Share of the tensor axis's collectives that a framework hides by cutting them up beside the products."""
    link_slowdowns: tuple[float, ...] = (1.05, 1.2)
    """Communication within training over the same alone, by tier, innermost first (the last for all further ones)."""
    expert_imbalance: float = 1.05
    """Load of the busiest rank of an expert group over the mean."""
    straggler: float = 0.004
    """The slowest of 2ⁿ nodes is n times this slower than the mean."""
    step_seconds: float = 5e-3
    """Time of a step outside all kernels: reading numbers back, data loading that is not hidden, logging."""
    cpu_overlap_share: float = 0.15
    """The same as `overlap_share` where communication takes the cores that compute.  Two processes on two cores that
    reduced 50 MB of gradients (35 ms alone) beside 54 ms of backward took 85 ms over Gloo."""
    cpu_step_seconds: float = 2e-3
    """The same as `step_seconds`: a step of Weft with next to no work in it, less its blocks, on one core."""
    host_link_bytes_per_second: float = 2.5e10
    """Bandwidth between an accelerator and its host's memory, one way."""
    host_optimizer_bytes_per_second: float = 4e9
    """Optimizer state that a core's share of the host works through."""
    corrections: Corrections = field(default_factory=Corrections, metadata=HIDDEN)
    """What recorded runs of the machine say of prices with all of the above."""

    def __post_init__(self) -> None:
        _RULES.types(self)

    def matmul_share(self, kind: str, precision: str) -> float:
        part = part_of(kind, self.matmul_shares)
        share = self.matmul_shares.get(part, {}).get(precision, self.other_matmul_share)
        return share * self.sustained_shares.get(part, 1.0) * self.matmul_factor

    def attention_share(self, kind: str) -> tuple[float, float]:
        """Forward and backward."""
        part = part_of(kind, {**ATTENTION_LIKE, **dict.fromkeys(self.attention_shares, "")})
        if part not in self.attention_shares:
            part = ATTENTION_LIKE.get(part, part)
        return self.attention_shares.get(part, self.other_attention_shares)

    def on_cores(self) -> Calibration:
        """What differs where cores compute: communication has no processors of its own, and was measured among them."""
        return replace(
            self,
            overlap_share=self.cpu_overlap_share,
            tensor_overlap_share=0.0,
            overlap_slowdown=1.0,
            step_seconds=self.cpu_step_seconds,
            link_slowdowns=(1.0,),
            grouped_share=1.0,
        )


def part_of(kind: str, known: Mapping[str, object]) -> str:
    """Return the entry that a device kind is a variant of: `a100` for `a100_40gb` and `a800`, by the longest match."""
    word = kind.lower().replace("h800", "h100").replace("a800", "a100")
    return max((part for part in known if part in word), key=len, default=word)


DATASHEET = Calibration(name="datasheet")
"""Nothing learnt from training runs."""

FITTED = bind(Calibration, read_document(str(Path(__file__).parent / "fitted.toml"), "calibration", DataError))
"""Fitted on published training runs; `python -m benchmarks.planner validate` says how well."""
