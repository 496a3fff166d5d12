"""Speed and memory of a Llama on one GPU: Weft beside a hand-written `fully_shard` loop, taken in turn in one process.

`measure` runs on the one rank of a job that `weft.run.launch` starts, so that the process group is the one that
training makes (Gloo and NCCL on CUDA). Everything it returns is JSON.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_kernels import kernels_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from weft.comm.collectives import all_gather_shards, reduce_scatter_shards
from weft.comm.device import memory_bytes, peak_memory_bytes, synchronize
from weft.comm.mesh import GroupView, Mesh
from weft.comm.reduce import start_all_gather, start_all_reduce, start_reduce_scatter
from weft.comm.telemetry import Recorder
from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.model.description import profile_of
from weft.model.reference.decoder import build_decoder
from weft.planning.price import Memories
from weft.run.engine import TrainingState, create_training
from weft.run.engine._throughput import measure_peak_flops
from weft.run.launch import RankInfo, initialise_distributed
from weft.techniques.core import ModelLayout, ParameterLayout, materialise
from weft.techniques.cost_terms import Layout

Step = Callable[[int], float]
SEED, LEARNING_RATE = 1234, 1e-4
ONE_BILLION: dict[str, int] = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_heads": 16,
    "num_kv_heads": 8,
    "ffn_size": 8192,
    "vocabulary_size": 32768,
    "sequence_length": 2048,
}
"""1.14 billion parameters."""
_POOL = 4
"""Batches taken in turn."""


def measure(
    rank_info: RankInfo,
    *,
    device: str,
    sizes: dict[str, int],
    batch: int,
    precision: str,
    compiled: bool,
    warmup: int,
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """Compare Weft, Weft without the fused loss, and the hand-written loop: seconds per step and peak memory."""
    with initialise_distributed(device, rank_info) as distributed:  # type: ignore[arg-type]
        where = distributed.device
        shape = DecoderShape(**sizes, tie_embeddings=False)
        batches = [_batch(shape, batch, index) for index in range(_POOL)]
        peak = measure_peak_flops(where, _dtype(precision), seconds=0.5).flops
        makers: dict[str, Callable[[], Step]] = {
            "weft": lambda: _weft(shape, batches, where, precision, compiled, fused=True),
            "weft, plain loss": lambda: _weft(shape, batches, where, precision, compiled, fused=False),
            "hand-written fully_shard": lambda: _by_hand(shape, batches, where, precision, compiled),
        }
        contenders: dict[str, dict[str, Any]] = {}
        alive: dict[str, Step] = {}
        for name, make in makers.items():
            alive[name], contenders[name] = _warmed_up(make, where, warmup)
        seconds: dict[str, list[float]] = {name: [] for name in alive}
        names = list(alive)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name] += _timed(alive[name], where, warmup + turn * steps, steps)
        kernels = {name: kernels_of(alive[name], where, warmup) for name in names if where.type == "cuda"}
        return {
            "settings": {"sizes": sizes, "batch": batch, "precision": precision, "compile": compiled},
            "parameters": sum(p.numel() for p in build_decoder(shape).module.parameters()),
            "peak_flops": peak,
            "kernels": kernels,
            "contenders": {
                name: contenders[name] | _speed(seconds[name], build_decoder(shape), batch, peak) for name in names
            },
            "weft_against_hand_written": statistics.median(seconds[names[2]]) / statistics.median(seconds[names[0]]),
        }


def measure_memory(
    rank_info: RankInfo, *, device: str, sizes: dict[str, int], batch: int, precision: str, recomputes: list[str]
) -> list[dict[str, Any]]:
    """Peak of the allocator in three steps against the predicted bytes of the allocator."""
    found: list[dict[str, Any]] = []
    with initialise_distributed(device, rank_info) as distributed:  # type: ignore[arg-type]
        where = distributed.device
        shape = DecoderShape(**sizes, tie_embeddings=False)
        batches = [_batch(shape, batch, index) for index in range(_POOL)]
        for recompute in recomputes:
            before = _settled_memory(where)
            recipe, plan = _recipe_and_plan(shape, batch, where, precision, compiled=False, fused=True)
            plan = replace(plan, memory=replace(plan.memory, recompute=recompute))  # type: ignore[arg-type]
            training = create_training(recipe, plan, build_decoder(shape), Mesh(plan.mesh, where), Recorder())
            for index in range(3):
                training.stepper([batches[index]], step=index, learning_rate=LEARNING_RATE)
            profile = profile_of(recipe)
            assert profile is not None
            (need,) = Memories(profile, on_accelerator=where.type != "cpu").of(Layout.of(plan))
            predicted = need.kinds.allocated
            measured = peak_memory_bytes(where) - before
            found.append(
                {
                    "recompute": recompute,
                    "predicted_bytes": predicted,
                    "measured_bytes": measured,
                    "predicted_over_measured": predicted / measured if measured > 0 else None,
                    "predicted_states_bytes": need.kinds.weights + need.kinds.gradients + need.kinds.optimizer,
                    "measured_states_bytes": _state_bytes(training),
                }
            )
            del training
    return found


def collectives(rank_info: RankInfo, *, device: str) -> dict[str, bool]:
    """Weft's collectives on the device's own backend in a group of one: slices in place, as buckets do."""
    with initialise_distributed(device, rank_info) as distributed:  # type: ignore[arg-type]
        view = GroupView((0,), 0, dist.group.WORLD)
        values = torch.arange(64, dtype=torch.float32, device=distributed.device)
        flat, ends = values.clone(), [(0, 64)]
        found: dict[str, bool] = {}
        for name, start in {
            "all-reduce": lambda: start_all_reduce(flat, view),
            "reduce-scatter in place": lambda: start_reduce_scatter(flat, ends, view, even=True),
            "all-gather in place": lambda: start_all_gather(flat, ends, view, even=True),
            "all-gather of uneven regions": lambda: start_all_gather(flat, ends, view, even=False),
        }.items():
            start()()
            found[name] = torch.equal(flat, values)
        square = values.view(8, 8)
        found["reduce-scatter of shards"] = torch.equal(reduce_scatter_shards(square, view, 1), square)
        found["all-gather of shards"] = torch.equal(all_gather_shards(square, view, 1, 8), square)
        return found


# ── contenders ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _weft(
    shape: DecoderShape,
    batches: list[dict[str, Tensor]],
    device: torch.device,
    precision: str,
    compiled: bool,
    *,
    fused: bool,
) -> Step:
    recipe, plan = _recipe_and_plan(shape, len(batches[0]["tokens"]), device, precision, compiled=compiled, fused=fused)
    training = create_training(recipe, plan, build_decoder(shape), Mesh(plan.mesh, device), Recorder())

    def step(index: int) -> float:
        batch = batches[index % len(batches)]
        return training.stepper([batch], step=index, learning_rate=LEARNING_RATE).loss

    return step


def _recipe_and_plan(
    shape: DecoderShape, batch: int, device: torch.device, precision: str, *, compiled: bool, fused: bool
) -> tuple[Recipe, Plan]:
    recipe = Recipe(
        model=ModelRecipe(shape=shape),
        batch=BatchRecipe(global_batch_size=batch),
        optimizer=OptimizerRecipe(learning_rate=LEARNING_RATE, max_grad_norm=1.0),
        run=RunRecipe(steps=1, seed=SEED),
        permit=PermitRecipe(precision=(precision,)),  # type: ignore[arg-type]
    )
    plan = Plan(
        data_parallel=DataParallelPlan(zero=0),
        microbatch=MicrobatchPlan(size=batch, per_step=1),
        memory=MemoryPlan(fused_loss=fused),
        compute=ComputePlan(precision=precision, compile=compiled, device=device.type),  # type: ignore[arg-type]
    )
    return recipe, plan


def _by_hand(
    shape: DecoderShape, batches: list[dict[str, Tensor]], device: torch.device, precision: str, compiled: bool
) -> Step:
    """What a careful person writes: blocks and loss compiled, bf16 weights with fp32 masters, fused AdamW, clipping."""
    module = _plain_model(build_decoder(shape), device)
    narrow = precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks = list(module.get_submodule("blocks").children())
    for block in blocks if compiled else []:
        block.compile()
    for unit in [*blocks, module]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    loss_of: Callable[[Tensor, Tensor], Tensor] = torch.compile(_mean_loss) if compiled else _mean_loss
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, betas=betas, weight_decay=0.0, fused=True)

    def step(index: int) -> float:
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batches[index % len(batches)].items()}
        optimizer.zero_grad()
        loss = loss_of(module(batch["tokens"]), batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _plain_model(blueprint: Blueprint, device: torch.device) -> nn.Module:
    """The decoder as a plain module with the very weights that Weft gives it, in fp32."""
    module = blueprint.module
    names = {name: ParameterLayout(name=name, shape=held.shape) for name, held in module.named_parameters()}
    materialise(module, blueprint, ModelLayout(names), SEED, device, torch.float32)
    return module.train()


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _warmed_up(make: Callable[[], Step], device: torch.device, steps: int) -> tuple[Step, dict[str, Any]]:
    """Make a contender and run its first steps, which compile.  Its memory is what comes on top of the others'."""
    before, started = _settled_memory(device), time.perf_counter()
    step = make()
    losses = [step(index) for index in range(steps)]
    synchronize(device)
    facts = {
        "first_losses": losses,
        "start_seconds": round(time.perf_counter() - started, 1),
        "rest_bytes": memory_bytes(device) - before,
        "peak_bytes": peak_memory_bytes(device) - before,
    }
    return step, facts


def _timed(step: Step, device: torch.device, first: int, steps: int) -> list[float]:
    """Seconds of each step; a step ends with its loss on the host, so nothing is left in the queue."""
    synchronize(device)
    seconds: list[float] = []
    for index in range(first, first + steps):
        started = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - started)
    return seconds


def _speed(seconds: list[float], blueprint: Blueprint, batch: int, peak: float) -> dict[str, Any]:
    typical = statistics.median(seconds)
    assert blueprint.sequence_length is not None
    flops = blueprint.flops_per_sample * batch / typical
    return {
        "seconds": seconds,
        "median_seconds": typical,
        "tokens_per_second": blueprint.sequence_length * batch / typical,
        "flops_per_second": flops,
        "share_of_measured_peak": flops / peak,
    }


def _batch(shape: DecoderShape, size: int, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED + index)
    tokens = torch.randint(shape.vocabulary_size, (size, shape.sequence_length + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "sample_ids": torch.arange(index * size, (index + 1) * size),
    }


def _settled_memory(device: torch.device) -> int:
    """Memory held now, with the peak set back to it where that can be done."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
    return memory_bytes(device)


def _state_bytes(training: TrainingState) -> int:
    return sum(training.model.stores.model_state_bytes().values()) + training.optimizer.state_bytes()


def _dtype(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
