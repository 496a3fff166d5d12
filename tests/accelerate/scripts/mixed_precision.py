"""Forwards in bf16 under autocast, with the loss in it, too."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=draw)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            outputs = model(inputs)
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item()!r} {outputs.dtype}")


main()
