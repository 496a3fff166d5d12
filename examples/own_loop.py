"""A training loop of one's own, on scikit-learn's handwritten digits.

    python examples/own_loop.py                           # one process
    weft launch -n 2 examples/own_loop.py                 # two, on this machine
    torchrun --nproc-per-node 2 examples/own_loop.py      # the same, started by torchrun

All three print the same losses: the loader's batch size is the global batch, however many processes share it.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def loss_fn(logits: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    """A sum and how many samples it is over: so microbatches and ranks of any size are weighted right."""
    _, labels = batch
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="auto", help="plan.toml, or auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", help="where to save")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, validation = load_data()
    loader = DataLoader(train, batch_size=60, shuffle=True)

    with weft.session(plan=arguments.plan, folder=arguments.folder) as session:
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs)
        for epoch in range(arguments.epochs):
            for batch in state.batches():  # this rank's share of one epoch, freshly shuffled
                step = state.step(batch)
            schedule.step()
            held_out = state.evaluate(DataLoader(validation, batch_size=60))
            if session.rank == 0:
                print(f"epoch {epoch + 1}  step {step.step}  loss {step.loss:.4f}  held out {held_out:.4f}")
        state.save()


if __name__ == "__main__":
    main()
