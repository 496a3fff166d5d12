"""What a careful person writes by hand on plain torch: a loop, DDP, `fully_shard`.

`settings`: precision (`fp32`, `bf16`), fused (optimizer), compile, tuned (the wrapper's own options), max_grad_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks._llama import mean_loss, plain_model, pool_of, world_size

Step = Callable[[int], float]
LEARNING_RATE = 3e-4


def adamw(module: nn.Module, settings: Mapping[str, Any]) -> torch.optim.AdamW:
    fused = True if settings.get("fused") else None
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)


def compile_blocks(module: nn.Module, settings: Mapping[str, Any]) -> None:
    if settings.get("compile"):
        for block in module.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            block.compile()


def autocast(settings: Mapping[str, Any]) -> torch.autocast:
    """bf16 as torch's own mixed precision does it: fp32 weights, cast where they are used."""
    return torch.autocast("cpu", torch.bfloat16, enabled=settings.get("precision") == "bf16")


def loop(settings: Mapping[str, Any]) -> Step:
    """One process."""
    if world_size() > 1:
        dist.init_process_group("gloo")
    module = plain_model(settings)
    compile_blocks(module, settings)
    return _stepping(module, module, settings, autocast(settings))


def ddp(settings: Mapping[str, Any]) -> Step:
    dist.init_process_group("gloo")
    module = plain_model(settings)
    compile_blocks(module, settings)
    tuned = bool(settings.get("tuned"))
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=tuned, static_graph=tuned)
    return _stepping(wrapped, module, settings, autocast(settings))


def fsdp(settings: Mapping[str, Any]) -> Step:
    """fp32 masters at rest, bf16 weights gathered and used, gradients reduced in fp32."""
    dist.init_process_group("gloo")
    module = plain_model(settings)
    mesh = init_device_mesh("cpu", (world_size(),))
    narrow = settings.get("precision") == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    compile_blocks(module, settings)
    reshard = not settings.get("tuned")  # tuned: weights stay gathered between forward and backward
    for unit in [*module.blocks, module]:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)  # pyright: ignore[reportArgumentType]
    return _stepping(module, module, settings, autocast({}))


def _stepping(wrapped: nn.Module, module: nn.Module, settings: Mapping[str, Any], casting: torch.autocast) -> Step:
    def logits_of(tokens: Tensor) -> Tensor:
        with casting:
            return wrapped(tokens)

    return step_of(logits_of, module, adamw(module, settings), pool_of(settings), settings.get("max_grad_norm"))


def step_of(
    logits_of: Callable[[Tensor], Tensor],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    pool: Sequence[Mapping[str, Tensor]],
    limit: float | None = None,
) -> Step:
    """A plain step of a language model on batches of a pool in turn."""

    def step(index: int) -> float:
        batch = pool[index % len(pool)]
        optimizer.zero_grad()
        logits = logits_of(batch["tokens"])
        loss = mean_loss(logits, batch["labels"])
        loss.backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimizer.step()
        return loss.item()

    return step
