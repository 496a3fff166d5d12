"""A policy that learns to walk to the end of a corridor: it plays, and then learns from what it played."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH, GAMES = 6, 12


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(LENGTH, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, places):
        hidden = torch.tanh(self.body(places))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


@torch.no_grad()
def play(model, draw):
    """States, actions and discounted rewards of some games."""
    places, seen = torch.zeros(GAMES, dtype=torch.long), []
    for _ in range(8):
        states = nn.functional.one_hot(places, LENGTH).to(torch.get_default_dtype())
        chances = model(states)[0].softmax(-1)[:, 1]
        actions = (torch.rand(GAMES, generator=draw) < chances).long()
        places = (places + 2 * actions - 1).clamp(0, LENGTH - 1)
        seen.append((states, actions, (places == LENGTH - 1).to(states.dtype)))
    states, actions, rewards = (torch.stack(each) for each in zip(*seen, strict=True))
    for step in reversed(range(7)):
        rewards[step] += 0.9 * rewards[step + 1]
    return states.flatten(0, 1), actions.flatten(), rewards.flatten()


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(17)
    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, eps=1e-5)
    model, optimizer = fabric.setup(model, optimizer)
    draw = torch.Generator().manual_seed(1)

    returns = []
    for _ in range(4):
        played = play(model, draw)
        returns.append(played[2].mean().item())
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*played), batch_size=32))
        for states, actions, rewards in loader:
            logits, values = model(states)
            chosen = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
            advantages = rewards - values
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
            loss = (-chosen * advantages.detach() + 0.5 * advantages.square() - 0.01 * entropy).mean()
            optimizer.zero_grad(set_to_none=True)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
    return returns
