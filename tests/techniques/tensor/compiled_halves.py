"""Graphs of a decoder whose blocks are compiled in bf16 while its gradients are summed in fp32.

In a process of its own, because Dynamo leaves references behind.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch._dynamo.utils import counters

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import ComputePlan, DataParallelPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.reference.decoder import build_decoder
from weft.run.engine import create_training
from weft.run.launch import RankInfo, initialise_distributed

SHAPE = DecoderShape(
    num_layers=3,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    ffn_size=48,
    vocabulary_size=64,
    sequence_length=16,
    tie_embeddings=False,
)


def train(rank_info: RankInfo, zero: Literal[0, 1, 2]) -> dict[str, Any]:
    """Three steps of two microbatches, compiled and not: losses, and the graphs of the compiled blocks."""
    with initialise_distributed("cpu", rank_info) as distributed:
        losses = {compiled: _losses(zero, distributed.device, compiled) for compiled in (False, True)}
        return {
            "eager": losses[False],
            "compiled": losses[True],
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
        }


def _losses(zero: Literal[0, 1, 2], device: torch.device, compiled: bool) -> list[float]:
    recipe = Recipe(
        model=ModelRecipe(shape=SHAPE),
        batch=BatchRecipe(global_batch_size=4),
        run=RunRecipe(steps=3, seed=1),
        permit=PermitRecipe(precision=("bf16",)),
    )
    plan = Plan(
        data_parallel=DataParallelPlan(zero=zero),
        microbatch=MicrobatchPlan(size=2, per_step=2),
        compute=ComputePlan(precision="bf16", compile=compiled, device="cpu"),
    )
    training = create_training(recipe, plan, build_decoder(SHAPE), Mesh(plan.mesh, device), Recorder())
    torch.manual_seed(5)
    tokens = torch.randint(SHAPE.vocabulary_size, (2, 2, SHAPE.sequence_length + 1))
    batches = [
        {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), "sample_ids": torch.arange(2)}
        for rows in tokens
    ]
    return [training.stepper(batches, step=step, learning_rate=1e-4).loss for step in range(3)]
