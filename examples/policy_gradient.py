"""Reinforcement learning with generation in the loop: a policy learns to say a row of digits backwards.

    python examples/policy_gradient.py
    weft launch -n 2 examples/policy_gradient.py

For every batch of prompts the policy under training generates an answer, is rewarded for each digit in its place, and
takes one step with two losses: the policy gradient, with what its own value head expected as the baseline, and the
error of that head.  Answers are drawn with numbers that are keyed by sample, so that any number of ranks generates the
same ones.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft

DIGITS, LENGTH = 6, 3
Batch = dict[str, Tensor]


class Prompts(Dataset[Batch]):
    """Rows of digits, pure functions of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Batch:
        return {"prompt": torch.randint(0, DIGITS, (LENGTH,), generator=torch.Generator().manual_seed(index))}


class Policy(nn.Module):
    """Logits of the next digit, and the reward that it expects from there, after each digit so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.logits = nn.Linear(64, DIGITS)
        self.value = nn.Linear(64, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.logits(hidden), self.value(hidden).squeeze(-1)


@torch.no_grad()
def answered(policy: nn.Module, prompt: Tensor, uniform: Tensor) -> Tensor:
    """Prompts with answers behind them, (samples, 2 · LENGTH), drawn from the policy by uniform numbers (samples,
    LENGTH, DIGITS): the largest of logits with Gumbel noise is a draw from their softmax."""
    tokens, noise = prompt, -(-uniform.clamp_min(1e-9).log()).log()
    for place in range(LENGTH):
        logits, _ = policy(tokens)
        tokens = torch.cat([tokens, (logits[:, -1] + noise[:, place]).argmax(-1, keepdim=True)], dim=1)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    policy = Policy()
    loader = DataLoader(Prompts(), batch_size=128, shuffle=True)
    with weft.session(quiet=True, record=False) as session:
        optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
        state = session.prepare(
            policy, optimizer, loader, loss=lambda outputs, batch: (outputs[1].sum(), 1), inputs={"tokens": "prompt"}
        )
        for batch in state.batches(arguments.steps):
            prompt = batch["prompt"].to(session.device)
            tokens = answered(state.model, prompt, state.rand(batch, LENGTH, DIGITS))
            rewards = (tokens[:, LENGTH:] == prompt.flip(1)).to(torch.get_default_dtype())
            with state.manual_step({"tokens": tokens, "rewards": rewards}) as step:
                for part in step.parts():
                    logits, values = state.model(part["tokens"][:, :-1])
                    logits, values = logits[:, LENGTH - 1 :], values[:, LENGTH - 1 :]
                    said = logits.log_softmax(-1).gather(-1, part["tokens"][:, LENGTH:, None]).squeeze(-1)
                    advantage = part["rewards"] - values.detach()
                    step.backward(-(advantage * said).mean(), retain_graph=True)
                    step.backward((part["rewards"] - values).square().mean())
            if step.event.step % 50 == 0:
                right = state.gather(rewards).mean()
                session.print(f"step {step.event.step:4d}  loss {step.event.loss:.6f}  right {right:.1%}")


if __name__ == "__main__":
    main()
