"""Adapters alone are trained, and their weights are put together."""

import torch
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.query, self.value = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        hidden = hidden + self.value(torch.tanh(self.query(hidden)))
        return self.head(hidden.mean(1))


def main():
    accelerator = Accelerator()
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (32, 5), generator=draw)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], lora_dropout=0.0)
    model = get_peft_model(Net(), config)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    loader = DataLoader(TensorDataset(ids, ids.sum(1) % 2), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item():.6f}")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        kept = get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=state)
        print(len(kept), f"sum {sum(each.double().abs().sum().item() for each in kept.values()):.4f}")


main()
