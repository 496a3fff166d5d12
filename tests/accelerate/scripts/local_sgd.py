"""Steps that processes take by themselves between averages."""

import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator(gradient_accumulation_steps=1)
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        accelerator.print(f"epoch {epoch} loss {accelerator.gather(loss.detach()).mean().item()!r}")


main()
