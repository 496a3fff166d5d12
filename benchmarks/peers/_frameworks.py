"""Accelerate, Lightning Fabric and DeepSpeed as their documentation has them; run in the peers' environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._handwritten import adamw, autocast, compile_blocks
from benchmarks._llama import mean_loss, plain_model, pool_of, world_size

Step = Callable[[int], float]


def accelerate(settings: Mapping[str, Any]) -> Step:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    tuned = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)]
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if settings.get("precision") == "bf16" else "no",
        kwargs_handlers=tuned if settings.get("tuned") else None,
    )
    assert accelerator.num_processes == world_size(), "Accelerate did not see the other rank"
    module, pool = plain_model(settings), pool_of(settings)
    compile_blocks(module, settings)
    wrapped, optimizer = accelerator.prepare(module, adamw(module, settings))

    def step(index: int) -> float:
        batch = pool[index % len(pool)]
        optimizer.zero_grad()
        loss = mean_loss(wrapped(batch["tokens"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def fabric(settings: Mapping[str, Any]) -> Step:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    options = {"gradient_as_bucket_view": True, "static_graph": True} if settings.get("tuned") else {}
    fabric = Fabric(
        accelerator="cpu",
        devices=world_size(),
        strategy=DDPStrategy(process_group_backend="gloo", **options),
        precision="bf16-mixed" if settings.get("precision") == "bf16" else "32-true",
    )
    fabric.launch()
    assert fabric.world_size == world_size(), "Fabric did not see the other rank"
    torch.set_num_threads(int(settings.get("threads", 1)))
    module, pool = plain_model(settings), pool_of(settings)
    compile_blocks(module, settings)
    wrapped, optimizer = fabric.setup(module, adamw(module, settings))

    def step(index: int) -> float:
        batch = pool[index % len(pool)]
        optimizer.zero_grad()
        loss = mean_loss(wrapped(batch["tokens"]), batch["labels"])
        fabric.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def deepspeed(settings: Mapping[str, Any]) -> Step:
    import deepspeed

    module, pool = plain_model(settings), pool_of(settings)
    narrow = settings.get("precision") == "bf16"
    if settings.get("compile"):
        compile_blocks(module, settings)
    zero: dict[str, Any] = {"stage": settings["stage"]}
    if settings.get("tuned"):
        zero |= {"overlap_comm": False, "contiguous_gradients": settings["stage"] > 1}
        zero |= {"reduce_bucket_size": 25_000_000, "allgather_bucket_size": 25_000_000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.get("batch", 8),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": narrow},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    assert dist.get_world_size() == world_size(), "DeepSpeed did not see the other rank"
    engine, _, _, _ = deepspeed.initialize(
        model=module, optimizer=adamw(module, settings), config=config, dist_init_required=False
    )
    torch.set_num_threads(int(settings.get("threads", 1)))
    casting = autocast({})  # DeepSpeed's bf16 casts the weights themselves

    def step(index: int) -> float:
        batch = pool[index % len(pool)]
        with casting:
            loss = mean_loss(engine(batch["tokens"]), batch["labels"])
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step
