"""What the routers of a model did in a step, over the whole batch: their load, their entropy, and balance by a bias.

A hook on each router notes counts of the choices of a microbatch.  It notes them under the microbatch's state, which
recomputation puts back, so that a forward which runs again counts once.  At the end of a step the counts of all ranks
are summed, those of tensor ranks that see the same tokens once, because they route alike; whole numbers have one sum,
whatever the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.model.blueprint import Blueprint
from weft.techniques.core._context import MicrobatchState, StepContext
from weft.techniques.core._part import ModelPart, is_own


@dataclass(frozen=True, slots=True)
class RouterReport:
    """A router's step."""

    load: Sequence[float]
    """Share of the choices that each expert had."""
    entropy: float
    """Mean over tokens of the entropy of the router's scores, in nats: at most log(experts)."""


@final
class RouterWatch:
    """The routers of this rank's parts.  Create it on every rank, and call its methods on every rank alike."""

    def __init__(self, parts: Sequence[ModelPart], blueprint: Blueprint, mesh: Mesh) -> None:
        assert blueprint.routers is not None, "a model without routers is not watched"
        self._table, self._mesh = blueprint.routers, mesh
        self._rows = {name: row for row, name in enumerate(self._table.names)}
        self._asked = False
        self._seen: dict[tuple[str, int], tuple[MicrobatchState, Tensor]] = {}
        self._mine: dict[str, nn.Module] = {}
        for part in parts:
            for name, module in part.module.named_modules():
                if name in self._rows and is_own(part.module, blueprint, name):
                    self._mine[name] = module
                    module.register_forward_hook(partial(self._note, name, part.context))

    def begin_step(self, *, asked: bool) -> None:
        """A step begins, whose reports are asked for or not."""
        self._asked = asked
        self._seen.clear()

    def end_step(self, *, applied: bool) -> dict[str, RouterReport]:
        """Sum up the step, and set biases unless its update was left out.  Returns reports, where they were asked for,
        of all routers by name."""
        if not (self._asked or self._table.balance_rate):
            return {}
        sums = self._summed()
        if applied and self._table.balance_rate:
            self._balance(sums)
        return self._reports(sums) if self._asked else {}

    def _note(self, name: str, context: StepContext, module: nn.Module, args: Any, output: Any) -> None:
        state = context.current
        if state is None or not module.training or not (self._asked or self._table.balance_rate):
            return
        with torch.no_grad():
            logits, _, chosen = output
            counts = chosen.new_zeros(self._table.num_experts).scatter_add_(
                0, chosen.flatten(), torch.ones_like(chosen).flatten()
            )
            entropy = self._entropy(logits) if self._asked else counts.new_zeros((), dtype=torch.float64)
            self._seen[name, id(state)] = state, torch.cat([counts.double(), entropy.double().view(1)])

    def _entropy(self, logits: Tensor) -> Tensor:
        if self._table.scoring == "softmax":
            logs = logits.log_softmax(-1)
        else:
            logs = torch.nn.functional.logsigmoid(logits)
            logs = logs - logs.logsumexp(-1, keepdim=True)
        return -(logs.exp() * logs).sum()

    def _summed(self) -> Tensor:
        """(routers, experts + 1): choices of each expert, and entropies, of the whole batch."""
        sums = torch.zeros(len(self._rows), self._table.num_experts + 1, dtype=torch.float64, device=self._mesh.device)
        if self._mesh.loss_replicas.index == 0:
            for (name, _), (_, noted) in self._seen.items():
                sums[self._rows[name]] += noted
        self._seen.clear()
        world = self._mesh["world"]
        if world.group is not None:
            dist.all_reduce(sums, group=world.group)
        return sums

    @torch.no_grad()
    def _balance(self, sums: Tensor) -> None:
        """Source: Wang et al. 2024, https://arxiv.org/abs/2408.15664, algorithm 1."""
        for name, router in self._mine.items():
            counts = sums[self._rows[name], :-1]
            bias = router.get_buffer(self._table.bias)
            bias += (self._table.balance_rate * (counts.mean() - counts).sign()).to(bias.dtype)

    def _reports(self, sums: Tensor) -> dict[str, RouterReport]:
        reports: dict[str, RouterReport] = {}
        for name, row in self._rows.items():
            *counts, entropy = sums[row].tolist()
            choices = sum(counts)
            if choices:
                load = [count / choices for count in counts]
                reports[name] = RouterReport(load, entropy * self._table.top_k / choices)
        return reports
