"""Three folds, each with a model of its own; predictions of all are averaged."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(45, 6, generator=draw)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    test_loader = DataLoader(Subset(data, range(36, 45)), batch_size=4)
    kept = []
    for fold in range(3):
        held = set(range(fold * 12, fold * 12 + 12))
        loader = DataLoader(Subset(data, [n for n in range(36) if n not in held]), batch_size=8, shuffle=True)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, test_loader)
        for _ in range(2):
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found = []
        model.eval()
        for inputs, _ in tests:
            with torch.no_grad():
                found.append(accelerator.gather_for_metrics(model(inputs).softmax(1)).cpu())
        kept.append(torch.cat(found))
        accelerator.print(f"fold {fold} sum {kept[-1].double()[:, 0].sum().item():.6f} of {float(len(kept[-1]))!r}")
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    labels = data.tensors[1][36:]
    right = (torch.stack(kept).mean(0).argmax(1) == labels).float().mean()
    accelerator.print(f"all {right.item()!r}")


main()
