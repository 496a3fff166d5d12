"""The peer of `recovery`: the same model in DDP, which loads the newest file of `torch.save` when it starts.

torchrun --standalone --nproc-per-node 2 --max-restarts 100 -m benchmarks._recovery_peer FOLDER SAVE_EVERY
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH = 128, 8, 16


def build() -> nn.Module:
    """Two hidden layers, as the recipe's."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers)


def main() -> None:
    folder, save_every = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), folder / "saved.pt"
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if saved.is_file():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with (folder / f"rank-{rank}").open("a") as said:
        said.write(f"{os.getpid()}\n")
    with (folder / "steps.jsonl").open("a") as lines:
        while True:
            step += 1
            inputs, labels = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.long)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                lines.write(json.dumps({"kind": "step", "step": step, "unix_time_seconds": time.time()}) + "\n")
                lines.flush()
                if step % save_every == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, folder / "new.pt")
                    (folder / "new.pt").replace(saved)


if __name__ == "__main__":
    main()
