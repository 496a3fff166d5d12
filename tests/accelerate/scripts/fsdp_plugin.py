"""Weights are sharded by the plugin."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy="FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=draw)
    model = accelerator.prepare(Net())
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item()!r}")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        print(len(state), f"sum {sum(each.double().sum().item() for each in state.values()):.5f}")


main()
