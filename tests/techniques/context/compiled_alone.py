"""Attention that one rank shares with nobody, in compiled blocks and not: `python compiled_alone.py CASE …`.

Prints a line of JSON per case: graphs, where they end, and the largest difference of gradients.  In a process of its
own, because Dynamo leaves references behind.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.model.attention.call import MaskPattern, attend
from weft.techniques.compute.compiling import number_calls
from weft.techniques.context.attention import AttentionModule, VisitedAttention, wrap_attention
from weft.techniques.context.exchange import GatherExchange
from weft.techniques.context.operators import make_known
from weft.techniques.context.token_runs import runs_of
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness.keyed_dropout import KeyedDropout

HEADS, SIZE, BLOCKS = 4, 8, 3
CASES = ("plain", "documents", "grouped", "dropping", "window", "dropping_window", "lengths")


class Attention(nn.Module):
    """Calls attention as the case says."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.keys = case, HEADS // 2 if case == "grouped" else HEADS
        self.query, self.output = (nn.Linear(HEADS * SIZE, HEADS * SIZE) for _ in range(2))
        self.key, self.value = (nn.Linear(HEADS * SIZE, self.keys * SIZE) for _ in range(2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = (linear(hidden) for linear in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in projected)
        if self.case == "dropping" or "window" in self.case:
            pattern = MaskPattern(causal=True, window=4 if "window" in self.case else None)
            dropout = self.dropout if "dropping" in self.case else None
            mixed = attend(query, key, value, pattern, dropout=dropout)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.keys < HEADS)
        return hidden + self.output(mixed.transpose(1, 2).flatten(2))


def build(case: str, context: StepContext) -> nn.Sequential:
    """Three blocks, whose attention one rank shares with nobody."""
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Attention(case) for _ in range(BLOCKS))).double()
    alone = GroupView((0,), 0, None)
    share = VisitedAttention(alone, GatherExchange(alone))
    for index, block in enumerate(blocks):
        block.dropout = KeyedDropout(0.3, f"{index}.dropout", context)
        block.forward = wrap_attention(block.forward, AttentionModule(str(index), share, is_causal=True), context)
    return blocks


def gradients(blocks: nn.Sequential, context: StepContext, step: int, length: int, *, apart: bool) -> list[Tensor]:
    """Of every weight, at one step."""
    documents = torch.arange(length).expand(2, -1) // 5 if apart else None
    tokens = LocalTokens(length=length, runs=runs_of(length, 1, 0), documents=documents)
    ids = torch.arange(2) + 2 * step
    torch.manual_seed(step)
    state = MicrobatchState(seed=1, step=step, sample_ids=ids, sequence_length=length, tokens=tokens)
    with context.entered(state):
        blocks(torch.randn(2, length, HEADS * SIZE, dtype=torch.float64)).square().sum().backward()
    found = [weight.grad.clone() for weight in blocks.parameters() if weight.grad is not None]
    blocks.zero_grad()
    return found


def compare(case: str) -> dict[str, Any]:
    """Three steps of blocks that are compiled and of those that are not."""
    from torch._dynamo.utils import counters

    counters.clear()
    context = StepContext()
    plain, compiled = build(case, context), build(case, context)
    compiled.load_state_dict(copy.deepcopy(plain.state_dict()))
    for block in compiled:
        number_calls(block)
        block.compile(backend="aot_eager")
    apart, most = case == "documents", 0.0
    for step in range(5 if case == "lengths" else 3):
        length = 11 + 2 * step if case == "lengths" else 11
        made = (gradients(blocks, context, step, length, apart=apart) for blocks in (plain, compiled))
        pairs = list(zip(*made, strict=True))
        most = max(most, *(float((one - other).abs().max() / one.abs().max().clamp(1e-9)) for one, other in pairs))
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": [*counters["graph_break"]],
        "difference": most,
        "weights": len(pairs),
    }


if __name__ == "__main__":
    make_known()
    for chosen in sys.argv[1:] or CASES:
        torch._dynamo.reset()
        print(json.dumps({chosen: compare(chosen)}), flush=True)
