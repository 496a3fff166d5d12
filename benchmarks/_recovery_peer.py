"""The peer of `recovery`: a DDP loop under torchrun with torch's distributed checkpoints, from which it goes on.

torchrun --nproc-per-node 2 --max-restarts 9 _recovery_peer.py FOLDER STEPS SAVE_EVERY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

WIDTH, BLOCKS, BATCH = 128, 4, 16


def main() -> None:
    folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [layer for _ in range(BLOCKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    first = max((int(path.name) for path in (folder / "saves").glob("*") if (path / ".metadata").exists()), default=0)
    if first:
        dcp.load(state, checkpoint_id=folder / "saves" / str(first))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    for step in range(first + 1, steps + 1):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with (folder / "steps").open("a") as log:
                log.write(f"{step} {time.time()}\n")
        if step % save_every == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            saved = folder / "saves" / str(step)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=saved)
        time.sleep(0.005)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
