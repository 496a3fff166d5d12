"""What it gains to gather updated weights behind the next forward (ZeRO-1), on a link between two hosts.

Two ranks in network namespaces with a limited rate, so root is needed.  Both contenders are Weft under the same plan;
one waits at the end of every step until all weights are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._slow_link import NoNamespacesError, slow_link
from benchmarks._statistics import round_ratios, spread
from benchmarks._weft import LEARNING_RATE, create
from benchmarks._weft import weft as behind
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, dump_plan

RATES = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
SHAPE: Mapping[str, Any] = {
    "num_layers": 6, "hidden_size": 256, "ffn_size": 1024, "vocabulary_size": 2048, "sequence_length": 128, "batch": 8,
}  # fmt: skip


def weft(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A step of Weft's engine as it is."""
    return behind(settings)


def waiting(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """The same, and then a wait for all weights."""
    from benchmarks._llama import pool_of

    training, pool = create(settings), pool_of(settings)

    def step(index: int) -> float:
        loss = training.stepper([pool[index % len(pool)]], step=index, learning_rate=LEARNING_RATE).loss
        training.model.stores.wait_weights()
        return loss

    return step


def plan() -> Plan:
    """ZeRO-1 over two hosts, whose gathers are cut into buckets of 2 MB."""
    return Plan(
        mesh=MeshPlan(shard=2),
        data_parallel=DataParallelPlan(zero=1, bucket_bytes=2_000_000, first_bucket_bytes=1_000_000),
        microbatch=MicrobatchPlan(size=SHAPE["batch"], per_step=1),
        compute=ComputePlan(device="cpu", backend="gloo"),
    )


def main() -> None:
    options = options_parser(__doc__, rounds=10).parse_args()
    before, goals, samples = machine(), list[Goal](), dict[str, Any]()
    settings = {**SHAPE, "plan": dump_plan(plan(), everything=True)}
    for rate, said in RATES.items():
        try:
            with slow_link(rate) as hosts:
                entries = [
                    Entry(name=name, target=f"benchmarks.ahead:{name}", settings=settings, hosts=hosts)
                    for name in ("weft", "waiting")
                ]
                with contenders(entries, warmup_steps=3) as alive:
                    blocks = interleave(alive, rounds=options.rounds, steps=3)
        except NoNamespacesError as problem:
            sys.exit(f"nothing measured: {problem}")
        seconds = {name: [s for block in found for s in block.seconds] for name, found in blocks.items()}
        ratios = round_ratios(seconds["waiting"], seconds["weft"])
        samples[rate] = seconds
        log(f"{rate}: {median(ratios):.2f}x")
        what = f"ZeRO-1 step with weights behind the forward, 2 hosts at {said}, times faster"
        gain = median(ratios)
        goals.append(Goal(what=what, measured=gain, goal=1.0, better="higher", unit="x", spread=spread(ratios)))
    about = {"machine": before, "versions": versions(), "settings": dict(SHAPE), "note": options.note}
    write_result("ahead", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
