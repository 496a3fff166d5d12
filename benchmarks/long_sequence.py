"""One sequence of 8,192 tokens on two ranks: context ranks beside tensor ranks and beside one process with two threads.

How much of its messages a ring hides is what its recorder saw: the time inside waits for them, over the time from their
launch to their end.  Beside it stands that time over what the same messages take when nobody computes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._llama import POOL, samples_of, shape_of
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import spread
from benchmarks._weft import LEARNING_RATE, create
from weft.comm.mesh import GroupView
from weft.comm.telemetry import CollectiveLog
from weft.config.plan import (
    ComputePlan,
    ContextParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    Plan,
    TensorParallelPlan,
    dump_plan,
)
from weft.techniques.context.exchange import RingExchange
from weft.techniques.context.token_runs import Shown

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 256, "num_heads": 8, "ffn_size": 1024, "vocabulary_size": 4096,
    "sequence_length": 8192, "batch": 1,
}  # fmt: skip
RING, GATHERED, SWAPPED, TENSOR, ALONE = "ring", "all_gather", "ulysses", "tensor", "one"
_NAMES = {TENSOR: "tensor 2 with sequence parallelism", ALONE: "one process with two threads"}


def plan(name: str) -> Plan:
    """fp32, one sample per step, one thread for each rank of two and two for one alone."""
    ranks = 1 if name == ALONE else 2
    context = name in (RING, GATHERED, SWAPPED)
    return Plan(
        mesh=MeshPlan(context=ranks) if context else MeshPlan(tensor=ranks),
        context_parallel=ContextParallelPlan(scheme=name) if context else ContextParallelPlan(),  # pyright: ignore[reportArgumentType]  the same words
        tensor_parallel=TensorParallelPlan(sequence=name == TENSOR),
        microbatch=MicrobatchPlan(size=1, per_step=1),
        memory=MemoryPlan(fused_loss=True),
        compute=ComputePlan(device="cpu", threads_per_rank=2 // ranks),
    )


def sequence(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A step of Weft's engine.  Rank 0 of a ring also keeps what its messages took, and would take by themselves."""
    training, ours = create(settings), CollectiveLog()
    torch.set_num_threads(int(settings["threads"]))
    pool = [[samples_of(settings, range(index, index + 1))] for index in range(POOL)]
    ring = training.model.mesh["context"]
    by_themselves = _messages_seconds(settings, ring) if settings["plan_name"] == RING else None
    training.model.mesh.watch(ours.add)

    def step(index: int) -> float:
        loss = training.stepper(pool[index % POOL], step=index, learning_rate=LEARNING_RATE).loss
        traffic = ours.end_step().get("context")
        if traffic is not None and by_themselves is not None and ring.index == 0:
            line = {
                "exposed_seconds": traffic.exposed_ns / 1e9,
                "total_seconds": traffic.total_ns / 1e9,
                "bytes": traffic.num_bytes,
                "alone_seconds": by_themselves,
            }
            with Path(settings["seen"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return loss

    return step


def _messages_seconds(settings: Mapping[str, Any], ring: GroupView) -> float:
    """Seconds that the messages of a step take where nobody computes.  Call on every rank."""
    shape = shape_of(settings)
    size = (1, shape.num_heads, shape.sequence_length // ring.size, shape.hidden_size // shape.num_heads)
    key, exchange = torch.zeros(size), RingExchange(ring)
    seconds: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        for _shown in exchange.visit(key, key, Shown(shape.sequence_length, ring.size)):
            pass
        seconds.append(time.perf_counter() - began)
    # Keys go round in the forward and the backward, and their gradients in the latter.
    return 3 * shape.num_layers * median(seconds)


def main() -> None:
    options = options_parser(__doc__, rounds=7).parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.jsonl"
        entries = [_entry(name, seen) for name in (RING, GATHERED, SWAPPED, TENSOR, ALONE)]
        with contenders(entries, warmup_steps=1) as alive:
            blocks = interleave(alive, rounds=options.rounds, steps=1)
        traffic = [json.loads(line) for line in seen.read_text().splitlines()][1:]
    seconds = {name: [median(block.seconds) for block in found] for name, found in blocks.items()}
    for name, found in seconds.items():
        log(f"{name:22s} {median(found):.2f} s, {max(block.peak_bytes for block in blocks[name]) / 2**20:.0f} MiB")
    goals = [_beside(seconds, RING, TENSOR), _beside(seconds, RING, ALONE), *_hidden(traffic)]
    samples = {
        "seconds": seconds,
        "peak_bytes": {name: max(block.peak_bytes for block in found) for name, found in blocks.items()},
        "losses": {name: [block.losses for block in found] for name, found in blocks.items()},
        "messages": traffic,
    }
    about = {"machine": before, "versions": versions(), "settings": SHAPE, "note": options.note}
    write_result("long_sequence", goals=goals, samples=samples, about=about, folder=options.folder)


def _entry(name: str, seen: Path) -> Entry:
    found = plan(name)
    settings = {
        **SHAPE,
        "plan": dump_plan(found, everything=True),
        "plan_name": name,
        "threads": found.compute.threads_per_rank,
        "seen": str(seen),
    }
    return Entry(name=name, target="benchmarks.long_sequence:sequence", settings=settings, ranks=found.mesh.world_size)


def _beside(seconds: Mapping[str, list[float]], mine: str, other: str) -> Goal:
    ratios = [a / b for a, b in zip(seconds[mine], seconds[other], strict=True)]
    return Goal(
        what=f"a step of 8,192 tokens under context 2 ({mine}), over one under {_NAMES[other]}",
        measured=median(ratios),
        goal=1.0,
        better="lower",
        spread=spread(ratios),
        unit="x",
    )


def _hidden(traffic: list[dict[str, float]]) -> list[Goal]:
    shares = [100 * (1 - line["exposed_seconds"] / line["total_seconds"]) for line in traffic]
    waits = [line["exposed_seconds"] for line in traffic]
    alone = median(line["alone_seconds"] for line in traffic)
    log(f"waits for messages: {median(waits) * 1e3:.1f} ms of a step; the messages alone take {alone * 1e3:.1f} ms")
    return [
        Goal(
            what="time of the ring's messages that passes while a rank computes",
            measured=median(shares),
            goal=90.0,
            better="higher",
            spread=spread(shares),
            unit=" %",
        )
    ]


if __name__ == "__main__":
    main()
