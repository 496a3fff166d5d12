"""Trains a recipe as ranks with compressed gradients do: on those ranks, and in one process that plays all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cells
import torch
from compressed import ROWS, Memory, Row, no_memory, summed
from parity_run import Result
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.config.recipe import Recipe, learning_rate
from weft.model.build import build_model
from weft.run.engine import TrainingState
from weft.techniques.compression.codecs import CodecSpec, Frame
from weft.verify.numerics import Trial, TrialData, run_trial

STEPS = 5
Gradients = Mapping[str, Tensor]


def recipe(plan: Plan) -> Recipe:
    """A tied decoder whose matrices are multiples of nothing, in fp64; clipped, where that can be."""
    model = cells.decoder(num_layers=2, hidden_size=36, num_heads=3, num_kv_heads=3, ffn_size=53, vocabulary_size=61)
    settings = {"max_grad_norm": None} if plan.data_parallel.compression == "onebit" else {}
    made = cells.recipe_of(model, "fp64", **settings)
    return replace(made, permit=replace(made.permit, compression=tuple(ROWS)))


def compressed(codec: str, **settings: Any) -> Plan:
    """A plan with a codec, in buckets of a few parameters each."""
    plan = cells.plan(**settings, bucket_bytes=30_000)
    data = replace(plan.data_parallel, compression=codec, **ROWS[codec].settings)
    return replace(plan, data_parallel=data)


def run_ranks(plans: Mapping[str, Plan]) -> dict[str, tuple[Trial, list[Frame]]]:
    """On this rank: what each plan's training saw, and how its compressed buckets are laid out."""
    (axes,) = {plan.mesh for plan in plans.values()}
    mesh = Mesh(axes, torch.device("cpu"))
    found: dict[str, tuple[Trial, list[Frame]]] = {}
    for name, plan in plans.items():
        frames = list[Frame]()

        def note(training: TrainingState, frames: list[Frame] = frames) -> None:
            for store in training.model.stores.stores:
                frames += [state.reduction._frame for state in store._states if state.reduction is not None]

        trial = run_trial(recipe(plan), plan, partial(build_model, recipe(plan)), steps=STEPS, mesh=mesh, inspect=note)
        found[name] = trial, frames
    return found


@dataclass(frozen=True, slots=True)
class Mistake:
    """A way to go wrong, which the comparison must notice."""

    exact: bool = False
    """The codec does nothing."""
    forgets: bool = False
    """Nothing is owed to the next step."""
    swaps: bool = False
    """Ranks take one another's residuals."""
    drops: bool = False
    """Only the last microbatch's gradients are sent."""


class OneProcess:
    """Plays all ranks of a plan, one after the other."""

    def __init__(
        self, plan: Plan, frames: Sequence[Frame], initial: Mapping[str, Tensor], row: Row, mistake: Mistake
    ) -> None:
        self._recipe, self._plan, self._mistake, self._row = recipe(plan), plan, mistake, row
        self._world, data = plan.mesh.data, plan.data_parallel
        self._compression = CodecSpec(
            codec=data.compression,  # type: ignore[arg-type]
            powersgd_rank=data.powersgd_rank,
            topk_share=data.topk_share,
            randomk_share=data.randomk_share,
            seed=self._recipe.run.seed,
            onebit_warmup_steps=data.onebit_warmup_steps,
            onebit_decay=self._recipe.optimizer.betas[0],
        )
        self._frames = list(frames)
        self._memories = [no_memory(frame, self._compression, self._world) for frame in frames]
        self._blueprint = build_model(self._recipe)
        self._module = _with_weights(self._blueprint.module, initial)
        self._trained = dict(self._module.named_parameters())
        seed = self._recipe.run.seed
        self._data = [TrialData(self._blueprint, plan, data_index=rank, seed=seed) for rank in range(self._world)]
        settings = self._recipe.optimizer
        every = list(self._trained.values())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in every if p.ndim >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.epsilon,
        )

    def train(self) -> Result:
        """First gradients, and all that five steps leave behind."""
        rounds, *_ = self._backward(0, 1.0 / self._recipe.batch.global_batch_size)
        gradients, _ = self._reduce(rounds)
        losses, norms = list[float](), list[float]()
        for step in range(STEPS):
            loss, norm = self._step(step)
            losses.append(loss)
            norms.append(norm)
        with torch.no_grad():
            validation = sum(float(self._loss(batch)[0]) for data in self._data for batch in data.microbatches(0))
        return Result(
            gradients={f"gradient/{name}": tensor for name, tensor in gradients.items()},
            state={f"model/{name}": tensor.detach() for name, tensor in self._trained.items()},
            losses=losses,
            norms=norms,
            validation=validation,
        )

    def _step(self, step: int) -> tuple[float, float]:
        sequence = self._blueprint.sequence_length
        assert sequence is not None
        nominal = self._recipe.batch.global_batch_size * sequence
        rounds, loss, count = self._backward(step, 1.0 / nominal)
        sums, self._memories = self._reduce(rounds)
        for name, parameter in self._trained.items():
            parameter.grad = sums[name] * (nominal / count)
        limit = self._recipe.optimizer.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), limit)
        self._update(learning_rate(self._recipe, step), step)
        return loss / count, float(norm)

    def _update(self, learning_rate: float, step: int) -> None:
        """AdamW, or 1-bit Adam's rule once its variance is frozen."""
        frozen_after = self._plan.data_parallel.onebit_warmup_steps
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self._compression.codec != "onebit" or step < frozen_after:
            self._optimizer.step()
            return
        first, second = self._recipe.optimizer.betas
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    state = self._optimizer.state[parameter]
                    state["exp_avg"].lerp_(parameter.grad, 1 - first)
                    size = (state["exp_avg_sq"] / (1 - second**frozen_after)).sqrt() + group["eps"]
                    move = state["exp_avg"] / (1 - first ** (step + 1)) / size
                    parameter.mul_(1 - learning_rate * group["weight_decay"])
                    parameter.sub_(learning_rate * torch.where(state["exp_avg_sq"] > 0, move, 0))

    def _loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        inputs = {keyword: batch[name] for keyword, name in self._blueprint.inputs.items()}
        return self._blueprint.loss(self._module(**inputs), batch)

    def _backward(self, step: int, scale: float) -> tuple[list[list[Gradients]], float, float]:
        """Gradients by round and rank, the loss sum and the count; ZeRO-2 has a round for each microbatch."""
        rounds: list[list[Gradients]] = []
        loss = count = 0.0
        for data in self._data:
            batches = data.microbatches(step)
            groups = [[batch] for batch in batches] if self._plan.data_parallel.zero == 2 else [batches]
            rounds += [[] for _ in groups[len(rounds) :]]
            for mine, group in zip(rounds, groups, strict=True):
                for parameter in self._trained.values():
                    parameter.grad = None
                for batch in group:
                    if self._mistake.drops:
                        for parameter in self._trained.values():
                            parameter.grad = None
                    total, number = self._loss(batch)
                    (total * scale).backward()
                    loss, count = loss + float(total.detach()), count + float(number)
                mine.append({name: _gradient(parameter) for name, parameter in self._trained.items()})
        return rounds, loss, count

    def _reduce(self, rounds: Sequence[Sequence[Gradients]]) -> tuple[dict[str, Tensor], list[Memory]]:
        """The sums over rounds and ranks, and what is kept if the step is applied."""
        sums = {name: summed([summed([g[name] for g in ranks]) for ranks in rounds]) for name in self._trained}
        memories = list[Memory]()
        for frame, memory in zip(self._frames, self._memories, strict=True):
            total = torch.zeros(frame.num_elements, dtype=torch.float64)
            for ranks in rounds:
                part, memory = self._reduce_bucket(frame, memory, ranks)
                total += part
            for span in frame.spans:
                sums[span.name] = total[span.offset : span.stop].view(span.shape)
            memories.append(memory)
        return sums, memories

    def _reduce_bucket(self, frame: Frame, memory: Memory, ranks: Sequence[Gradients]) -> tuple[Tensor, Memory]:
        shares = list[Tensor]()
        for gradients, owed in zip(ranks, memory.owed, strict=True):
            flat = torch.zeros(frame.num_elements, dtype=torch.float64)
            for span in frame.spans:
                flat[span.offset : span.stop] = gradients[span.name].flatten()
            shares.append(flat + owed)
        total, after = self._row.reduce(shares, frame, self._compression, memory)
        owed = after.owed
        if not self._row.has_feedback or self._mistake.forgets:
            owed = [torch.zeros_like(one) for one in owed]
        return total, replace(after, owed=owed[::-1] if self._mistake.swaps else owed)


def _with_weights(module: nn.Module, initial: Mapping[str, Tensor]) -> nn.Module:
    """The blueprint's module in fp64 on the weights that the ranks began with."""
    module = module.to_empty(device="cpu").double().train()
    missing = module.load_state_dict(dict(initial), strict=False).missing_keys
    assert missing == ["head.weight"], missing
    module.head.weight = module.embedding.weight  # `to_empty` unties, without a word
    return module


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
