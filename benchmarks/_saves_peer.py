"""The peer of `saves`: the same model in DDP, saved by torch's distributed checkpoints.

torchrun --nproc-per-node 2 -m benchmarks._saves_peer FOLDER STEPS SAVE_EVERY save|async_save

A save of `async_save` that is not done yet is waited for before the next, as its documentation asks for.  It has a
group of its own: its thread sends while the training does, and on one group of Gloo's both would wait for ever.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from benchmarks._saves_model import WIDTH, build

BATCH = 8


def main() -> None:
    folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    is_async = sys.argv[4] == "async_save"
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    group = dist.new_group(backend="gloo")
    under_way: Any = None
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters())
    stalls, step_seconds = list[float](), list[float]()
    for step in range(1, steps + 1):
        began = time.perf_counter()
        inputs = torch.randn(BATCH, WIDTH)
        nn.functional.cross_entropy(model(inputs), torch.zeros(BATCH, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        step_seconds.append(time.perf_counter() - began)
        if step % save_every:
            continue
        began = time.perf_counter()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state, where = {"model": model_state, "optimizer": optimizer_state}, folder / str(step)
        if is_async:
            if under_way is not None:
                under_way.result()
            under_way = dcp.async_save(state, checkpoint_id=where, process_group=group)
        else:
            dcp.save(state, checkpoint_id=where)
        dist.barrier()
        stalls.append(time.perf_counter() - began)
    if under_way is not None:
        under_way.result()
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps({"stalls": stalls, "steps": step_seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
