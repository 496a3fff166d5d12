"""A batch size that fits is found by trying, and what is used for it is told."""

import gc
import threading

import torch
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


class Watch:
    def __enter__(self):
        gc.collect()
        self.going = True
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def look(self):
        while self.going:
            threading.Event().wait(0.01)

    def __exit__(self, *_):
        self.going = False
        self.thread.join()


def main():
    accelerator = Accelerator()
    set_seed(1)

    @find_executable_batch_size(starting_batch_size=32)
    def inner(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        set_seed(1)
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(32, 4, generator=draw)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.print(f"tries {float(batch_size)!r}")
        with Watch():
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if batch_size > 16:
                    raise RuntimeError("CUDA out of memory.")
                optimizer.step()
                optimizer.zero_grad()
                shown = accelerator.gather_for_metrics(loss.detach().repeat(batch_size)).mean().item()
                accelerator.print(f"loss {shown:.6f}")

    inner()


main()
