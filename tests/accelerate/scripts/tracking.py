"""Numbers go to a tracker of one's own."""

import torch
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


class Notes(GeneralTracker):
    name = "notes"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name):
        self.run_name, self.lines = run_name, []
        super().__init__()

    @property
    def tracker(self):
        return self.lines

    @on_main_process
    def store_init_configuration(self, values):
        self.lines.append(("configuration", sorted(values)))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.lines.append((step, sorted(values)))


def main():
    accelerator = Accelerator(log_with=Notes("a run"))
    set_seed(1)
    accelerator.init_trackers("project", config={"lr": 0.1, "epochs": 2})
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            total += accelerator.gather(loss.detach()).mean().item()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"train_loss": total / len(loader), "epoch": epoch}, step=epoch)
        accelerator.print(f"epoch {epoch} loss {total!r}")
    lines = accelerator.get_tracker("notes", unwrap=True)
    accelerator.print(lines)
    accelerator.end_training()


main()
