"""An optimizer of one's own with two sets of weights, between which `train()` and `eval()` change."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


class Averaging(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.is_training = True

    def swap(self):
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if "mean" in state:
                    held = each.data.clone()
                    each.data.copy_(state["mean"])
                    state["mean"].copy_(held)

    def train(self):
        if not self.is_training:
            self.swap()
        self.is_training = True

    def eval(self):
        if self.is_training:
            self.swap()
        self.is_training = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if "mean" not in state:
                    state["mean"], state["count"] = each.clone(), 0
                state["count"] += 1
                each.add_(each.grad, alpha=-group["lr"])
                state["mean"].lerp_(each, 1.0 / (state["count"] + 1))


def main():
    accelerator = Accelerator()
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = Averaging(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        model.train()
        optimizer.train()
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item()!r}")
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            accelerator.print(f"evaluated {nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()!r}")


main()
