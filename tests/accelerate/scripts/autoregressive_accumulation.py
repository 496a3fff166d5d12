"""A language model whose loss is a mean over the tokens of all batches of a step."""

import contextlib
import math

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(20, 12), nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids):
        return self.head(self.recurrent(self.embedding(input_ids))[0])


def texts(number):
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 10, (number,), generator=draw).tolist()
    return [torch.randint(1, 20, (length,), generator=draw) for length in lengths]


def collate(batch):
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def main():
    gradient_accumulation_steps = 2
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
    set_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(texts(44), batch_size=8, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    for _ in range(2):
        model.train()
        iterator = iter(loader)
        remainder = len(loader) % gradient_accumulation_steps or gradient_accumulation_steps
        updates = math.ceil(len(loader) / gradient_accumulation_steps)
        for update in range(updates):
            batches = []
            for _ in range(remainder if update == updates - 1 else gradient_accumulation_steps):
                batches.append(next(iterator))
            counts = torch.tensor(sum(int((each["labels"][:, 1:] != -100).sum()) for each in batches))
            counts = accelerator.gather(counts.to(accelerator.device)).sum().item()
            total = 0.0
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                context = contextlib.nullcontext() if last else accelerator.no_sync(model)
                with context:
                    logits = model(batch["input_ids"])[:, :-1]
                    loss = criterion(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
                    loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / counts
                    accelerator.backward(loss)
                total += accelerator.gather(loss.detach()).mean().item() / gradient_accumulation_steps
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"tokens {float(counts)!r} loss {total:.6f}")


main()
