"""Drawn models of a few blocks, clusters of a few devices, and parts of their spaces that can be priced whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from random import Random
from typing import Any

from brute_force import all_layouts
from search_kit import cluster_of

from weft.config.cluster import Cluster
from weft.config.plan import AXES
from weft.config.recipe import PermitRecipe
from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import CostModel
from weft.planning.search import Objective, Space, space_of
from weft.techniques.cost_terms import DATASHEET, FITTED, Layout

MODELS = (
    "llama-3.2-1b", "gpt2", "llama-2-7b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b", "bert-base", "falcon-40b",
    "opt-13b", "qwen3-30b-a3b",
)  # fmt: skip
SPECS = (
    "4xh100", "2x2xh100", "8xh100", "2x4xa100-80gb", "4x2xh100", "3xh100", "2x3xa100-40gb", "8x1xh100", "7xh100",
    "2xh200", "1xh100", "6xa100-40gb", "5xh100",
)  # fmt: skip
CORES = ("4xcpu", "2x2xcpu", "3xcpu", "2x1xcpu", "4x1xcpu")
WIDE = ("2x8xh100", "4x4xa100-40gb", "4x8xh100", "3x8xh100", "5x4xh100", "16x1xh100")
_CHOSEN = (
    "pipelines", "tensors", "contexts", "experts", "microbatch_sizes", "schedules", "zeros", "recomputes", "offloads",
    "sequence_parallels", "fused_losses", "precisions", "tensor_schemes", "context_schemes",
    "expert_exchanges", "algorithms",
)  # fmt: skip
MEBI = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A space with all of its layouts."""

    profile: Profile
    cluster: Cluster
    batch: int
    space: Space
    cost_model: CostModel
    objective: Objective
    layouts: list[Layout]

    def __str__(self) -> str:
        whole = Space(pipelines=(1,), tensors=(1,), contexts=(1,), experts=(1,), microbatch_sizes=(1,))
        names = [field.name for field in fields(Space)]
        said = [f"{name}={getattr(self.space, name)}" for name in names if self._is_said(name, whole)]
        devices = f"{self.cluster.num_nodes} nodes of {self.cluster.num_devices} devices"
        usable = f"{self.cluster.usable_memory_bytes / 1e9:.4g} GB"
        blocks = f"{self.profile.name} of {len(self.profile.blocks)} blocks of {self.profile.sequence_length}"
        return f"{blocks} on {devices} with {usable}, batch {self.batch}, {self.objective.quantity}: {', '.join(said)}"

    def _is_said(self, name: str, whole: Space) -> bool:
        return getattr(self.space, name) != getattr(whole, name)


def drawn(seed: object, *, specs: tuple[str, ...] = SPECS, most: int, least: int = 20, exact: bool = True) -> Drawn:
    """Return a case of `least` to `most` layouts, with memory for only some of them.

    Args:
        exact: leave out what loops cannot list: buckets that are chosen, and mixtures of recomputation.
    """
    random = Random(str(seed))
    while True:
        profile, spec, batch = _model(random), random.choice(specs), random.choice((2, 4, 6, 8, 12, 16, 5, 7))
        objective = Objective(quantity=random.choice(("throughput", "throughput", "throughput", "cost")))
        cluster = cluster_of(spec, bandwidth=random.choice((0.05, 0.3, 1.0, 1.0, 4.0)))
        space = _part(random, space_of(profile, cluster, global_batch_size=batch, permit=_permit(random)), exact)
        if objective.quantity == "cost":
            space = replace(space, fewer_devices=True)
        layouts = list(islice(all_layouts(profile, cluster, space, batch), most + 1))
        if not least <= len(layouts) <= most:
            continue
        cluster = _with_memory(random, profile, cluster, layouts)
        return Drawn(
            profile=profile,
            cluster=cluster,
            batch=batch,
            space=space,
            cost_model=_cost_model(profile, cluster),
            objective=objective,
            layouts=layouts,
        )


def _cost_model(profile: Profile, cluster: Cluster) -> CostModel:
    return CostModel(profile, cluster, calibration=FITTED if cluster.has_accelerators else DATASHEET)


def _permit(random: Random) -> PermitRecipe:
    return PermitRecipe(precision=random.choice((("bf16",), ("fp32",), ("bf16", "fp32"), ("bf16",))))


def _model(random: Random) -> Profile:
    blocks, length = random.choice((2, 3, 4, 4, 5, 6)), random.choice((512, 1024, 2048, 4096, 8192))
    if random.random() < 0.7:
        return profile_of_sizes(replace(known_model(random.choice(MODELS)).sizes, num_layers=blocks), length)
    heads = random.choice((4, 6, 8, 16))
    mixture = {"num_experts": random.choice((4, 8)), "top_k": 2, "expert_ffn_size": 512 * random.randint(1, 8)}
    return profile_of_sizes(
        ModelSizes(
            name="drawn",
            num_layers=blocks,
            hidden_size=heads * 64 * random.randint(1, 4),
            num_heads=heads,
            num_kv_heads=heads // 2,
            ffn_size=heads * 256 * random.randint(1, 6),
            vocabulary_size=random.choice((1000, 32_000, 250_000)),
            sequence_length=length,
            tied=random.random() < 0.3,
            **mixture if random.random() < 0.3 else {},
        )
    )


def _part(random: Random, space: Space, exact: bool) -> Space:
    """Up to three values of each setting, and one or two restrictions of what the whole space leaves open."""
    changes: dict[str, Any] = {}
    for name in _CHOSEN:
        values: tuple[Any, ...] = getattr(space, name)
        count = min(len(values), random.choice((1, 1, 2, 2, 3)))
        changes[name] = tuple(values[place] for place in sorted(random.sample(range(len(values)), count)))
    if exact:
        changes |= {"per_block_recompute": False, "bucket_bytes": random.choice(((25 * MEBI,), (MEBI, 200 * MEBI)))}
    for name, value in random.sample(list(_restrictions(random)), random.choice((0, 1, 1, 2))):
        changes[name] = value
    return replace(space, **changes)


def _restrictions(random: Random) -> Iterator[tuple[str, Any]]:
    yield "compressions", random.choice((("int8",), ("none", "bf16"), ("topk",), ("powersgd", "fp8")))
    yield "shards", random.choice(((2,), (4,), (2, 4)))
    yield "reductions", random.choice((("step",), ("microbatch",), ("auto",), ("step", "microbatch")))
    yield "chunks", random.choice(((1,), (2,), (1, 3)))
    yield "datas", random.choice(((1,), (2,), (1, 3), (2, 4)))
    yield "replicas", False
    yield "even_shares", True
    yield "node_size", 2
    yield "first_bucket_bytes", (random.choice((MEBI // 4, 6 * MEBI)),)
    inner = random.sample(("pipeline", "replicate", "shard", "context", "tensor"), 5)
    inner.insert(max(inner.index("replicate"), inner.index("shard")) + 1, "expert")
    yield "orders", random.choice(((AXES,), (tuple(inner),), (AXES, tuple(inner))))


def _with_memory(random: Random, profile: Profile, cluster: Cluster, layouts: list[Layout]) -> Cluster:
    """The cluster with memory for a drawn share of the layouts."""
    cost_model = _cost_model(profile, cluster)
    needs = sorted(
        cost_model.predict(layout).fullest.device for layout in random.sample(layouts, min(40, len(layouts)))
    )
    wanted = random.choice(needs) * random.choice((1.0, 1.0, 1.3, 10.0))
    share = wanted / cluster.usable_memory_bytes
    nodes = tuple(
        replace(node, devices=replace(node.devices, memory_bytes=int(node.devices.memory_bytes * share) + 1))
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)
