"""Pairs of sentences that say the same or not: padded batches of dictionaries, a linear schedule, an evaluation."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator, DistributedType


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(50, 16), nn.Linear(16, 32)
        self.norm, self.outer, self.head = nn.LayerNorm(16), nn.Linear(32, 16), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.embedding(input_ids)
        hidden = self.norm(hidden + self.outer(torch.nn.functional.gelu(self.inner(hidden))))
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        logits = self.head((hidden * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if labels is not None else {"logits": logits}


def sentences(number, seed):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        length = int(torch.randint(3, 9, (1,), generator=draw))
        words = torch.randint(1, 50, (length,), generator=draw)
        made.append({"input_ids": words.tolist(), "labels": int(words.sum() % 2)})
    return made


def get_dataloaders(accelerator, batch_size):
    def collate_fn(examples):
        longest = max(len(each["input_ids"]) for each in examples)
        if accelerator.distributed_type == DistributedType.XLA:
            longest = 128
        ids = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in examples]
        ids = torch.tensor(ids)
        labels = torch.tensor([each["labels"] for each in examples])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    with accelerator.main_process_first():
        train, test = sentences(44, 1), sentences(19, 2)
    train_dataloader = DataLoader(train, shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True)
    eval_dataloader = DataLoader(test, shuffle=False, collate_fn=collate_fn, batch_size=8)
    return train_dataloader, eval_dataloader


def training_function(config):
    accelerator = Accelerator(cpu=True, mixed_precision=None)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, config["batch_size"])
    model = Classifier()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    steps = len(train_dataloader) * config["num_epochs"]
    lr_scheduler = LambdaLR(optimizer, lambda step: min(step / 4, 1.0) * max(1.0 - step / steps, 0.0))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device) if hasattr(batch, "to") else None
            outputs = model(**batch)
            loss = outputs["loss"]
            shown = accelerator.gather(loss.detach()).mean()
            accelerator.print(f"step {step} loss {shown.item()!r}")
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        for batch in eval_dataloader:
            labels = batch.pop("labels")
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs["logits"].argmax(dim=-1), labels))
            right += (predictions == references).tolist()
        accelerator.print(f"epoch {epoch}: {sum(right) / len(right)!r} of {len(right)}.0")


def main():
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 8})


if __name__ == "__main__":
    main()
