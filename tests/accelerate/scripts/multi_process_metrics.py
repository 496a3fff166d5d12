"""Metrics over samples that do not divide: tensors, nested ones, and texts."""

import torch
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(29, 4, generator=draw)
    loader = DataLoader(TensorDataset(x, torch.arange(29)), batch_size=8)
    model, loader = accelerator.prepare(nn.Linear(4, 3), loader)
    model.eval()
    order, sums, words, lengths = [], 0.0, [], []
    for inputs, numbers in loader:
        with torch.no_grad():
            logits = model(inputs)
        found = accelerator.gather_for_metrics({"numbers": numbers, "nested": (logits, [numbers * 2])})
        order += found["numbers"].tolist()
        lengths.append(len(found["nested"][1][0]))
        sums += found["nested"][0].double().sum().item()
        words += accelerator.gather_for_metrics([f"sample {number}" for number in numbers.tolist()])
        losses = nn.functional.cross_entropy(logits, numbers % 3)
        sums += accelerator.gather_for_metrics(losses.repeat(8)).double().mean().item()
    accelerator.print(order, lengths, words[-1], len(words), f"sum {sums:.5f}")
    accelerator.print(len(gather_object([accelerator.process_index])) == accelerator.num_processes)
    padded = accelerator.pad_across_processes(torch.ones(2 + accelerator.process_index, 3), dim=0)
    accelerator.print(padded.shape[0] == 1 + accelerator.num_processes)
    with accelerator.split_between_processes(list(range(10))) as part:
        mine = torch.tensor([float(sum(part))])
    accelerator.print(f"total {accelerator.reduce(mine, 'sum').item()!r}")


main()
