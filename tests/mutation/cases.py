"""The plans by which mutants are looked for: cells of the parity matrix that together run every room of techniques."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "parity")]

CASES = (
    "decoder-z0_m4x3",
    "decoder-r2_z0_m2x3_selective_plain_loss",
    "own-r2_z0_m2x4_2",
    "convnet-h2_z1_m6x1",
    "own-h2_z3_m2x4_2",
    "decoder_untied-t2_z0_sp_m2x6_plain_loss",
    "encoder-t2_z0_sp_m2x6_selective",
    "hf_gpt2-t2_z0_sp_m2x6",
    "decoder_dropout-p2_interleaved_zero_bubblex2_z0_m2x6_full",
    "decoder_dropout-h2_t2_z2_m2x3",
    "decoder-h2_p2_zbvx2_z1_m2x4_2",
    "decoder-h2_p2_zbvx2_z3_m1x6",
    "decoder-r2_h2_z3_m1x3_full_plain_loss",
    "decoder_deep-p4_interleaved_1f1bx2_z0_m1x12",
    "decoder_dropout-h2_t2_p2_1f1b_z1_m2x5_1",
)
"""Cheapest first."""
