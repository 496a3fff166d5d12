"""Constants that are fitted on published runs: factors over the data sheet's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.techniques.cost_terms import Calibration

FACTORS: Mapping[str, float] = {
    "matmul_volta": 0.1,
    "matmul_ampere": 0.1,
    "matmul_hopper": 0.1,
    "matmul_blackwell": 0.1,
    "matmul_other": 0.15,
    "attention": 0.2,
    "inner_size_half": 0.5,
    "memory_share": 0.1,
    "unfused_factor": 0.4,
    "host_seconds": 0.5,
    "eager_host_seconds": 0.5,
    "launch_seconds": 0.3,
    "exposed_share": 0.7,
    "exposed_tensor_share": 0.4,
    "overlap_loss": 0.5,
    "inside_slowdown": 0.2,
    "between_slowdown": 0.3,
    "grouped_share": 0.4,
    "step_seconds": 0.7,
    "straggler": 0.7,
}
"""Physical constant → standard deviation of the logarithm of its factor over the data sheet's, before any fit."""

_GENERATIONS = {
    "matmul_volta": ("v100", "titan", "2080"),
    "matmul_ampere": ("a100", "a800", "3090", "l40s"),
    "matmul_hopper": ("h100", "h200", "h800", "h20"),
    "matmul_blackwell": ("b200", "b300", "gb200", "gb300"),
}


def with_factors(calibration: Calibration, factors: Mapping[str, float], *, name: str) -> Calibration:
    """Return a calibration with its constants multiplied; shares stay below 1."""
    factor = {key: factors.get(key, 1.0) for key in FACTORS}
    attention = factor["attention"]
    inside, *between = calibration.link_slowdowns
    return replace(
        calibration,
        name=name,
        matmul_shares=_scaled_shares(calibration.matmul_shares, factor),
        other_matmul_share=calibration.other_matmul_share * factor["matmul_other"],
        attention_shares={
            part: (ahead * attention, back * attention) for part, (ahead, back) in calibration.attention_shares.items()
        },
        other_attention_shares=(
            calibration.other_attention_shares[0] * attention,
            calibration.other_attention_shares[1] * attention,
        ),
        inner_size_half=calibration.inner_size_half * factor["inner_size_half"],
        memory_share=min(0.98, calibration.memory_share * factor["memory_share"]),
        unfused_factor=calibration.unfused_factor * factor["unfused_factor"],
        host_seconds=calibration.host_seconds * factor["host_seconds"],
        eager_host_seconds=calibration.eager_host_seconds * factor["eager_host_seconds"],
        launch_seconds=calibration.launch_seconds * factor["launch_seconds"],
        overlap_share=_exposed(calibration.overlap_share, factor["exposed_share"]),
        tensor_overlap_share=_exposed(calibration.tensor_overlap_share, factor["exposed_tensor_share"]),
        overlap_slowdown=1 + (calibration.overlap_slowdown - 1) * factor["overlap_loss"],
        link_slowdowns=(
            inside * factor["inside_slowdown"],
            *(slowdown * factor["between_slowdown"] for slowdown in between),
        ),
        grouped_share=min(1.0, calibration.grouped_share * factor["grouped_share"]),
        step_seconds=calibration.step_seconds * factor["step_seconds"],
        straggler=calibration.straggler * factor["straggler"],
    )


def _exposed(hidden: float, factor: float) -> float:
    """Scale what is not hidden."""
    return max(0.0, 1 - (1 - hidden) * factor)


def _scaled_shares(
    shares: Mapping[str, Mapping[str, float]], factor: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    return {
        part: {precision: min(0.98, share * factor[_generation(part)]) for precision, share in by_precision.items()}
        for part, by_precision in shares.items()
    }


def _generation(part: str) -> str:
    for generation, parts in _GENERATIONS.items():
        if any(word in part for word in parts):
            return generation
    return "matmul_other"
