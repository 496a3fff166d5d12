"""How long pipelines wait, on stages made of sleeps: no stage computes, so two cores distort nothing.

Every stage sleeps for a forward, an input gradient and a weight gradient.  A rank's bubble is the time it waits for
messages, or for the others to end; that of the step is the busiest rank's (`Timeline.bubble_seconds`).  Beside it stand
(p − 1) / (m + p − 1) for GPipe and 1F1B, each schedule's own formula, and the simulation of its order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._llama import rank, world_size
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import summary
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, PipelineParallelPlan, Plan
from weft.model.blueprint import Batch, Blueprint
from weft.model.families import CutTable
from weft.model.losses import token_loss
from weft.techniques.core import StepContext
from weft.techniques.pipeline.cost import bubble_seconds
from weft.techniques.pipeline.orders import Action, schedule_orders, simulate
from weft.techniques.pipeline.parts import cut_parts
from weft.techniques.pipeline.runner import PipelineRunner
from weft.techniques.pipeline.schedules import Schedule

SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 1),
    ("zbv", 2),
    ("dualpipev", 2),
)
_PASS_SECONDS = 0.4
"""Of each pass of a rank's whole share; with chunks a stage sleeps for its part of it.  Long beside the 1 to 2 ms that
a pass takes without its sleep on 2 cores: with 0.06 s these were as much as the bubble of the V-shaped schedules."""
_MICROBATCHES_PER_RANK = 2
_VOCABULARY, _HIDDEN = 8, 4


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepyBlock(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(_HIDDEN, _HIDDEN, bias=False)

    def sleep_at_weight_gradient(self) -> None:
        """Sleep when the weight's gradient arrives: in a whole backward at once, in a split one in the weight pass.

        To be called on the stage's own module, whose parameters are not those of the model that it was cut from.
        """
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(self.seconds))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(_Sleep.apply(hidden, self.seconds), self.linear.weight)  # pyright: ignore[reportArgumentType]


class SleepyModel(nn.Module):
    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _HIDDEN)
        self.blocks = nn.ModuleList(SleepyBlock(seconds) for _ in range(blocks))
        self.head = nn.Linear(_HIDDEN, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class _Silent:
    """Nobody owns the gradients here."""

    def on_microbatch(self, remaining: int) -> None: ...

    def on_last_forward(self, part: int) -> None: ...

    def on_last_backward(self, part: int) -> None: ...


class _Waiting:
    """Adds up how long a function of the transport takes: that is a pipeline rank's only way to wait."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def pipeline(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A contender whose `loss` is the bubble of a step, in seconds."""
    dist.init_process_group("gloo")
    chunks, microbatches = int(settings["chunks"]), int(settings["microbatches"])
    plan = Plan(
        mesh=MeshPlan(pipeline=world_size()),
        pipeline_parallel=PipelineParallelPlan(schedule=settings["schedule"], chunks_per_rank=chunks),
    )
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = _blueprint(world_size() * chunks, _PASS_SECONDS / chunks)
    parts = cut_parts(blueprint, plan, mesh, StepContext())
    for part in parts:
        for module in part.module.modules():
            if isinstance(module, SleepyBlock):
                module.sleep_at_weight_gradient()
    runner = PipelineRunner(parts, blueprint, plan, mesh)
    waiting = _Waiting()
    transport = runner._transport  # pyright: ignore[reportPrivateUsage]  the benchmark looks inside on purpose
    transport.receive = waiting.around(transport.receive)  # pyright: ignore[reportAttributeAccessIssue]
    transport.finish = waiting.around(transport.finish)  # pyright: ignore[reportAttributeAccessIssue]
    batch: Batch = {"tokens": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.zeros(1, 2, dtype=torch.int64)}
    batches = [{**batch, "sample_ids": torch.tensor([index])} for index in range(microbatches)]

    def step(index: int) -> float:
        dist.barrier()
        waiting.seconds, start = 0.0, time.perf_counter()
        runner.forward_backward(batches, step=index, seed=0, scale=1.0, observer=_Silent())
        taken = time.perf_counter() - start
        figures = torch.zeros(2, world_size(), dtype=torch.float64)
        figures[:, rank()] = torch.tensor([taken, taken - waiting.seconds], dtype=torch.float64)
        dist.all_reduce(figures)
        return float(figures[0].max() - figures[1].max())

    return step


def _blueprint(stages: int, seconds: float) -> Blueprint:
    return Blueprint(
        module=SleepyModel(stages, seconds),
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=None,
        cut=CutTable(entry="embedding", blocks=tuple(f"blocks.{index}" for index in range(stages)), tail=("head",)),
    )


def expected(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> dict[str, float]:
    """Bubble of a step by formula and by simulation, in seconds."""
    part = _PASS_SECONDS / chunks

    def cost(action: Action) -> float:
        return 2 * part if action.kind == "B" else part

    orders = schedule_orders(schedule, stages, chunks, microbatches)
    found = {
        "formula": bubble_seconds(schedule, stages, part, part, part),
        "simulated": simulate(orders, cost).bubble_seconds,
    }
    if schedule in ("gpipe", "1f1b"):
        whole = 3 * _PASS_SECONDS * (microbatches + stages - 1)
        found["(p-1)/(m+p-1)"] = whole * (stages - 1) / (microbatches + stages - 1)
    return found


def main() -> None:
    parser = options_parser(__doc__, rounds=3)
    options = parser.parse_args()
    before, goals = machine(), list[Goal]()
    samples: dict[str, Any] = {}
    for stages in (2, 4):
        microbatches = _MICROBATCHES_PER_RANK * stages
        for schedule, chunks in SCHEDULES:
            name = f"{schedule} p={stages} m={microbatches}"
            settings = {"schedule": schedule, "chunks": chunks, "microbatches": microbatches}
            entry = Entry(name=name, target="benchmarks.bubble:pipeline", settings=settings, ranks=stages)
            with contenders([entry], warmup_steps=1) as alive:
                blocks = interleave(alive, rounds=options.rounds, steps=1)[name]
            measured = [block.losses[0] for block in blocks]
            wanted = expected(schedule, stages, chunks, microbatches)
            busy = 3 * _PASS_SECONDS * microbatches
            off = (median(measured) / wanted["formula"] - 1) * 100
            samples[name] = {
                "bubble_seconds": measured,
                "expected_seconds": wanted,
                "busy_seconds": busy,
                "bubble_share": median(measured) / (median(measured) + busy),
                "off_percent": off,
                "step": summary([block.seconds[0] for block in blocks]),
            }
            log(f"{name}: {median(measured):.3f} s, formula {wanted['formula']:.3f}, {off:+.1f} %")
    worst = max(samples, key=lambda name: abs(samples[name]["off_percent"]))
    goals.append(
        Goal(
            what=f"bubble off its schedule's formula, worst of {len(samples)} ({worst})",
            measured=abs(samples[worst]["off_percent"]),
            goal=10.0,
            better="lower",
            unit=" %",
        )
    )
    about = {
        "machine": before,
        "versions": versions(),
        "settings": {"pass_seconds": _PASS_SECONDS, "microbatches_per_rank": _MICROBATCHES_PER_RANK},
        "note": options.note,
    }
    write_result("bubble", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
