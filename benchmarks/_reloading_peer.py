"""The peer of `reloading`: torch's distributed checkpoints of the same model.

torchrun --nproc-per-node 2 -m benchmarks._reloading_peer FOLDER LAYOUT save|load

Layouts: `data` (every rank has all), `shard` (FSDP2) and `tensor` (columns of every linear layer).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks._saves_model import build


def laid_out(layout: str) -> nn.Module:
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for block in blocks:
        if layout == "shard":
            fully_shard(block, mesh=mesh)
        elif layout == "tensor":
            parallelize_module(block, mesh, ColwiseParallel())
    if layout == "shard":
        fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    folder, layout, deed = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    model = laid_out(layout)
    optimizer = torch.optim.AdamW(model.parameters())
    get_state_dict(model, optimizer)  # it makes the state of an optimizer that has done no step
    dist.barrier()
    began = time.perf_counter()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if deed == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "seconds").write_text(str(time.perf_counter() - began))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
