"""ZeRO and clipping by DeepSpeed's own words."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin


def main():
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=draw)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item():.6f}")
    accelerator.print(accelerator.state.deepspeed_plugin.zero_stage, accelerator.gradient_accumulation_steps)


main()
