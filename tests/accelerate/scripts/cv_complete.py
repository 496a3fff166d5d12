"""Images in three classes: a small convolutional network, a one-cycle schedule, and an accuracy over all of them."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator


class Pictures(Dataset):
    def __init__(self, number, seed):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (number,), generator=draw)
        self.images = torch.randn(number, 3, 8, 8, generator=draw) + self.labels[:, None, None, None] * 0.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8 * 3 * 3, 3)

    def forward(self, image):
        hidden = torch.relu(self.second(torch.relu(self.first(image))))
        return self.head(hidden.flatten(1))


def training_function():
    accelerator = Accelerator()
    set_seed(42)
    train_dataloader = DataLoader(Pictures(42, 1), batch_size=8, shuffle=True)
    eval_dataloader = DataLoader(Pictures(21, 2), batch_size=8, shuffle=False)
    model = Net().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 / 25)
    lr_scheduler = OneCycleLR(optimizer, max_lr=2e-3, epochs=2, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(2):
        model.train()
        for batch in train_dataloader:
            outputs = model(batch["image"])
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            shown = accelerator.gather_for_metrics(loss.detach().repeat(8)).mean()
            accelerator.print(f"loss {shown.item()!r} rate {lr_scheduler.get_last_lr()[0]!r}")
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right, total = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(batch["image"])
            guesses, labels = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            right += (guesses == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch} accuracy {right / total!r} of {float(total)!r}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
