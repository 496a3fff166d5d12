"""Pairs of a model and a cluster, and every restriction of one setting of their spaces."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from time import process_time
from typing import Any

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import AXES, Plan
from weft.model.profile import Profile, profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import CostModel
from weft.planning.search import Space, search, space_of
from weft.techniques.cost_terms import DATASHEET, FITTED

PAIRS: dict[str, tuple[str, str, int, int | None]] = {
    f"{model} on {spec}" + (f", {length}" if length else ""): (model, spec, batch, length)
    for model, spec, batch, length in [
        ("llama-3.1-405b", "2048x8xh100", 2048, None), ("llama-3.1-70b", "48x8xa100-80gb", 128, None),
        ("llama-2-13b", "3x8xa100-40gb", 256, None), ("llama-2-7b", "8xa100-40gb", 256, None),
        ("deepseek-v3", "256x8xh100", 1024, None), ("mixtral-8x7b", "8x8xh100", 512, None),
        ("mixtral-8x22b", "16x8xa100-80gb", 256, None), ("qwen3-30b-a3b", "4x8xh100", 256, None),
        ("gpt2", "4xcpu", 64, None), ("gpt2", "2x2xcpu", 32, None), ("gpt2-medium", "8xcpu", 32, None),
        ("pythia-6.9b", "2x8xa100-40gb", 128, None), ("gpt-neox-20b", "12x8xa100-40gb", 768, None),
        ("bloom-176b", "48x8xa100-80gb", 2048, None), ("opt-175b", "124x8xa100-80gb", 1024, None),
        ("gpt3-175b", "64x8xa100-80gb", 1536, None), ("megatron-145b", "192x8xa100-80gb", 2304, None),
        ("llama-3.1-8b", "16x8xh100", 128, 131072), ("llama-3.1-8b", "2xh100", 16, 32768),
        ("qwen2.5-32b", "4x8xh200", 64, None), ("qwen2.5-72b", "8x8xh100", 32, 65536),
        ("gemma-2-9b", "8xh100", 64, None), ("mistral-7b", "5xa100-40gb", 40, None),
        ("falcon-40b", "6x8xa100-40gb", 144, None), ("nemotron-4-15b", "2x8xb200", 96, None),
        ("bert-base", "3xa100-40gb", 96, None), ("llama-3.2-1b", "4xh100", 32, None),
        ("llama-3.2-3b", "7xh100", 91, None), ("opt-13b", "8xa100-40gb", 64, None),
        ("yi-34b", "3x8xh100", 60, None), ("deepseek-v2-lite", "2x8xh100", 128, None),
        ("gpt-oss-120b", "8x8xh100", 256, None),
    ]
}  # fmt: skip
SETTINGS = (
    "pipelines", "tensors", "contexts", "experts", "microbatch_sizes", "schedules", "zeros", "recomputes", "offloads",
    "sequence_parallels", "fused_losses", "tensor_schemes", "context_schemes", "expert_exchanges", "algorithms",
)  # fmt: skip

REFUSALS: dict[str, Callable[[Plan], str]] = {
    "sequence parallelism": lambda plan: "no" if plan.tensor_parallel.sequence else "",
    "waiting elsewhere": lambda plan: "no" if plan.memory.offloads else "",
    "fused losses": lambda plan: "no" if plan.memory.fuses_loss else "",
    "context ranks": lambda plan: "no" if plan.mesh.context > 1 else "",
    "grids": lambda plan: "no" if plan.tensor_parallel.scheme != "1d" else "",
    "other schedules": lambda plan: "no" if plan.pipeline_parallel.schedule != "1f1b" else "",
}
"""What a training may refuse, and how it says so."""

_OFF_THE_LADDER = 2e-3
"""Buckets are searched in sizes that people can read, four per octave up to 400 MiB.  Of 150 drawn sizes per pair those
between won 9e-5 at most, those beyond 1.2e-3 (22 pairs, 24 November 2026)."""


def is_better(part: float, whole: float, what: str) -> bool:
    """Whether a score under the restriction `what` contradicts the search without it."""
    return part < whole * (1 - (_OFF_THE_LADDER if what.startswith("bucket_bytes") else 1e-9))


class Case:
    """One pair, its space, and a cost model that all of its searches share."""

    def __init__(self, name: str) -> None:
        model, spec, self.batch, length = PAIRS[name]
        self.profile: Profile = profile_of_sizes(known_model(model).sizes, length)
        self.cluster: Cluster = parse_cluster_spec(spec)
        calibration = FITTED if self.cluster.has_accelerators else DATASHEET
        self.cost_model = CostModel(self.profile, self.cluster, calibration=calibration)
        self.space = space_of(self.profile, self.cluster, global_batch_size=self.batch)

    def best(self, space: Space) -> float:
        """The score of the best plan of a space; infinite where nothing fits."""
        result = search(
            self.profile, self.cluster, global_batch_size=self.batch, space=space, cost_model=self.cost_model,
            calibration=self.cost_model.calibration, top=1,
        )  # fmt: skip
        return result.best[0].score if result.best else float("inf")


def restrictions(space: Space) -> Iterator[tuple[str, Space]]:
    """Every part of a space that has one value of one setting, and parts of which something is refused."""
    for axis in SETTINGS:
        values: tuple[Any, ...] = getattr(space, axis)
        for value in values if len(values) > 1 else ():
            changes: dict[str, Any] = {axis: (value,)}
            if axis == "recomputes":
                changes["per_block_recompute"] = False  # as a pin does
            yield f"{axis}={value}", replace(space, **changes)
    for chunks in range(1, 9):
        yield f"chunks={chunks}", replace(space, chunks=(chunks,))
    yield "per_block_recompute=False", replace(space, per_block_recompute=False)
    for shards in (2, 4, 8, 16):
        yield f"shards={shards}", replace(space, shards=(shards,))
    for every in ("step", "microbatch"):
        yield f"reductions={every}", replace(space, reductions=(every,))
    for data in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128):
        yield f"datas={data}", replace(space, datas=(data,))
    for size in (1 << 20, 25 << 20, 300_000_000):
        yield f"bucket_bytes={size}", replace(space, bucket_bytes=(size,))
    for order in (AXES, ("tensor", "pipeline", "replicate", "shard", "expert", "context"), tuple(reversed(AXES))):
        yield f"orders={order}", replace(space, orders=(order,))
    yield "replicas=False", replace(space, replicas=False)
    yield "even_shares=True", replace(space, even_shares=True)
    for what, refuses in REFUSALS.items():
        yield f"refused: {what}", replace(space, refuses=refuses)


def drawn(cases: list[tuple[str, Space]], count: int, random: Random) -> list[tuple[str, Space]]:
    return random.sample(cases, min(count, len(cases)))


def sweep(names: list[str], count: int | None, seed: int = 0) -> int:
    """Print what every restriction loses or wins; return how many win.  `count`: so many drawn ones of a pair."""
    wrong = total = 0
    for name in names:
        case, start = Case(name), process_time()
        whole = case.best(case.space)
        took = process_time() - start
        cases = list(restrictions(case.space))
        cases = cases if count is None else drawn(cases, count, Random(f"{seed} {name}"))
        won = {what: part / whole - 1 for what, space in cases if is_better(part := case.best(space), whole, what)}
        wrong, total = wrong + len(won), total + len(cases)
        print(f"{name}: {whole:.4g} in {took:.1f} s, {len(won)} of {len(cases)} restrictions are better", flush=True)
        for what, share in sorted(won.items(), key=lambda pair: pair[1]):
            print(f"    {what}: {100 * share:.2f} %", flush=True)
    print(f"{wrong} of {total}")
    return wrong


if __name__ == "__main__":
    assert dataclasses.is_dataclass(Space)
    arguments = sys.argv[1:]
    limit = int(arguments[0]) if arguments else None
    raise SystemExit(bool(sweep([name for name in PAIRS if len(arguments) < 2 or arguments[1] in name], limit)))
