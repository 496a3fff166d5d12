"""`plan = "auto"`: the plan that search finds best among those that run here, with the reason of each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.config.cluster import Cluster, table_links
from weft.config.plan import DataParallelPlan, ModelFacts, Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.formatting import format_memory, format_number, format_seconds
from weft.model.profile import Profile
from weft.planning.price import CostModel
from weft.planning.search._pins import has_pins
from weft.planning.search._recipe_space import recipe_space
from weft.planning.search._refusal import no_plan
from weft.planning.search._result import Candidate
from weft.planning.search._search import search
from weft.planning.search._space import Space, divisors
from weft.techniques.check import check_plan
from weft.techniques.compute.settings import THREADS
from weft.techniques.cost_terms import DATASHEET, Calibration

_MOST_WORLDS = 64
"""Processes up to which every split of exactly that many is searched one by one."""
_CLOSE = 0.2
"""Predictions closer than this share of their spread cannot be told apart; of those the simplest plan is taken."""
_ZERO_SIMPLICITY = (1, 0, 2, 3)
"""ZeRO stages, the simplest that saves memory first."""


_UNCERTAIN = 0.8
"""Share of the usable memory above which a prediction is tried: of 117 published peaks 6 % were predicted more than a
fifth too low (`python -m benchmarks.planner validate --mode fitted` on the shipped runs, 2026-11-22)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A plan and what it was chosen from."""

    plan: Plan
    reasons: Mapping[str, str]
    """Dotted key → why."""
    rivals: tuple[Candidate, ...] = ()
    """Predictions, best first, the chosen plan first of all; empty where nothing could be predicted."""

    @property
    def is_tight(self) -> bool:
        """Whether a plan that is predicted to fit may not, and its microbatch is not one that the user has given."""
        if not self.rivals or "microbatch.size" in self.plan.origins:
            return False
        prediction = self.rivals[0].prediction
        return prediction.fullest.device > _UNCERTAIN * prediction.device_bytes


def choose_plan(
    recipe: Recipe,
    cluster: Cluster,
    facts: ModelFacts,
    processes: int | None = None,
    *,
    profile: Profile,
    pins: Plan | None = None,
    calibration: Calibration = DATASHEET,
    top: int = 8,
) -> PlanChoice:
    """Choose a plan that the engine can run: the fastest that search finds and `check_plan` accepts.

    Needs no torch.  Where no plan has all the given settings that search could choose, it is the fastest that has the
    given axes, and the rest is for the caller to lay over it.

    Args:
        processes: exactly so many ranks; None: as many of the cluster's devices as are of use.
        profile: of the recipe's model.
        given: a plan whose `origins` name settings that are fixed: search chooses the others.  Those that search does
            not choose, such as `compile`, are for the caller to lay over the plan.

    Raises:
        PlanError: nothing fits, or the batch cannot be divided over the processes.
    """
    if processes is not None and processes < 1:
        raise PlanError(f"processes = {processes} is too few. Use 1 or more.")
    pins = pins or Plan()
    if processes is None and recipe.run.max_devices is not None and recipe.run.max_devices < cluster.num_devices:
        processes = recipe.run.max_devices
    processes = _enough_processes(pins, cluster, processes)

    def find(cluster: Cluster, processes: int | None, pins: Plan = pins) -> list[Candidate]:
        return find_candidates(recipe, cluster, facts, processes, profile, pins, calibration, top)

    rivals = find(cluster, processes)
    axes = replace(pins, origins={key: where for key, where in pins.origins.items() if key.startswith("mesh.")})
    known = rivals if rivals or axes == pins else find(cluster, processes, axes)
    if not known:
        raise no_plan(find, cluster, processes, profile, recipe.batch.global_batch_size, pins)
    best = known[0]
    assert best.plan is not None
    reasons = _unless_given(explain_settings(best.plan, recipe, cluster, known), pins)
    return PlanChoice(plan=best.plan, reasons=reasons, rivals=tuple(rivals))


def _enough_processes(pins: Plan, cluster: Cluster, processes: int | None) -> int | None:
    """Return `processes`; where none are given and given axes make up more ranks than there are devices, so many.

    Raises:
        PlanError: the given axes do not divide the processes.
    """
    mesh = pins.mesh
    model_ranks = mesh.pipeline * mesh.context * mesh.tensor
    if processes is None:
        return mesh.world_size if mesh.world_size > cluster.num_devices else None
    if processes % model_ranks:
        raise PlanError(
            f"--processes {processes} is no multiple of the {model_ranks} ranks that pipeline {mesh.pipeline} ×"
            f" context {mesh.context} × tensor {mesh.tensor} (from --set) need."
            f" Use --processes {max(1, processes // model_ranks) * model_ranks}."
        )
    return processes


def _unless_given(reasons: Mapping[str, str], pins: Plan) -> dict[str, str]:
    return {key: why for key, why in reasons.items() if key not in pins.origins}


def find_candidates(
    recipe: Recipe,
    cluster: Cluster,
    facts: ModelFacts,
    processes: int | None,
    profile: Profile,
    pins: Plan,
    calibration: Calibration,
    top: int,
) -> list[Candidate]:
    """Return candidates that can be run with exactly so many processes (None: any number), best first."""
    if processes is not None and processes > cluster.num_devices and not cluster.has_accelerators:
        cluster = crowded(cluster, processes)
    cost_model = CostModel(profile, cluster, calibration=calibration)
    candidates: list[Candidate] = []
    for space in _spaces(recipe, cluster, processes, profile, facts, pins):
        result = search(
            profile,
            cluster,
            global_batch_size=recipe.batch.global_batch_size,
            permit=recipe.permit,
            space=space,
            optimizer=recipe.optimizer,
            calibration=calibration,
            cost_model=cost_model,
            top=top,
        )
        candidates += [_with_threads(candidate, cluster) for candidate in result.best]
    fitting = [candidate for candidate in candidates if _is_accepted(candidate, recipe, facts, processes, pins)]
    return _simplest_first(sorted(fitting, key=lambda candidate: (candidate.score, candidate.layout.world_size)))[:top]


def crowded(cluster: Cluster, processes: int) -> Cluster:
    """Return a cluster of cores with more devices than cores: ranks that share them, and the memory."""
    count = -(-processes // cluster.num_nodes)
    nodes = [
        replace(node, devices=replace(node.devices, count=count, memory_bytes=node.memory_bytes // count))
        for node in cluster.nodes
    ]
    links = cluster.links or table_links("cpu", cluster.num_nodes, count)
    grown = [replace(tier, devices=max(tier.devices, count)) for tier in links[:1]]
    grown += [replace(tier, devices=max(tier.devices, count * cluster.num_nodes)) for tier in links[1:]]
    return replace(cluster, nodes=tuple(nodes), links=tuple(grown))


def _simplest_first(ranked: list[Candidate]) -> list[Candidate]:
    """Put the simplest of those that cannot be told apart from the first to the front."""
    if not ranked:
        return []
    limit = ranked[0].score * (1 + _CLOSE * ranked[0].prediction.spread)
    close = [candidate for candidate in ranked if candidate.score <= limit]
    first = min(close, key=_complexity)
    return [first, *(candidate for candidate in ranked if candidate is not first)]


def _complexity(candidate: Candidate) -> tuple[object, ...]:
    layout = candidate.layout
    axes = (layout.pipeline, layout.tensor, layout.context, layout.chunks, layout.recompute != "none")
    return (*axes, _ZERO_SIMPLICITY.index(layout.zero), layout.world_size, -layout.microbatch_size, candidate.score)


def _spaces(
    recipe: Recipe, cluster: Cluster, processes: int | None, profile: Profile, facts: ModelFacts, pins: Plan
) -> Iterator[Space]:
    """One space, or one per split of a given number of processes."""
    batch = recipe.batch.global_batch_size
    # Offloading is for the user to choose: what waits elsewhere is slow where the price of its links is not measured.
    space = replace(recipe_space(recipe, profile, facts, cluster, pins), offloads=(pins.memory.offload,))
    if processes is None:
        yield space
        return
    for tensor in (size for size in divisors(processes) if size in space.tensors and processes <= _MOST_WORLDS * size):
        for pipeline in (size for size in divisors(processes // tensor) if size in space.pipelines):
            rest = processes // (tensor * pipeline)
            for context in (size for size in divisors(rest) if size in space.contexts):
                data = rest // context
                if data <= batch and (space.datas is None or data in space.datas):
                    yield replace(space, tensors=(tensor,), pipelines=(pipeline,), contexts=(context,), datas=(data,))


def _with_threads(candidate: Candidate, cluster: Cluster) -> Candidate:
    """The candidate with what a layout does not say: the cores of a rank."""
    if candidate.plan is None:
        return candidate
    per_node = -(-candidate.plan.mesh.world_size // cluster.num_nodes)
    if cluster.has_accelerators:  # the other devices' ranks may be another job's
        per_node = max(per_node, *(node.devices.count for node in cluster.nodes))
    threads = max(1, min(node.cores for node in cluster.nodes) // per_node)
    compute = candidate.plan.compute.with_threads(threads)
    return replace(candidate, plan=replace(candidate.plan, compute=compute))


def _is_accepted(candidate: Candidate, recipe: Recipe, facts: ModelFacts, processes: int | None, pins: Plan) -> bool:
    if candidate.plan is None or not has_pins(candidate.plan, pins):
        return False
    try:
        check_plan(candidate.plan, recipe, facts, processes)
    except PlanError:
        return False
    return True


def explain_settings(plan: Plan, recipe: Recipe, cluster: Cluster, rivals: Sequence[Candidate]) -> dict[str, str]:
    """Return why each setting of the best of `rivals` is as it is, by dotted key."""
    best, world = rivals[0], plan.mesh.world_size
    prediction = best.prediction
    memory = f"{format_number(prediction.fullest.device / 2**30, 2)} of {format_memory(prediction.device_bytes)}"
    seconds = format_seconds(prediction.step_seconds)
    count = f"{world} processes" if world > 1 else "1 process"
    axis = next(
        (axis for axis in ("shard", "replicate", "tensor", "context", "pipeline") if getattr(plan.mesh, axis) > 1), None
    )
    shares = plan.microbatch.shares(plan.mesh.data)
    listed = f"{shares[0]} × {plan.mesh.data} data rank{'s' if plan.mesh.data > 1 else ''}"
    if len(set(shares)) > 1:
        listed = f"({' + '.join(map(str, shares))})"
    reasons = {
        f"mesh.{axis or 'replicate'}": f"predicted {seconds} per step, {memory} per process{_margin(rivals)}",
        "microbatch.size": f"{plan.microbatch.size} × {listed} = the recipe's {recipe.batch.global_batch_size}",
        THREADS: f"{cluster.num_cores:,} cores over {count}",
        "compute.precision": "the fastest here that the recipe permits",
    }
    if plan.mesh.data > 1:
        reasons["data_parallel.zero"] = _other_stage(rivals)
    if plan.data_parallel.reduce_every == "microbatch":
        reasons["data_parallel.reduce_every"] = "gradients kept whole do not fit, or only slower plans do"
    elif plan.data_parallel.reduce_every == "step":
        reasons["data_parallel.reduce_every"] = "whole gradients fit until the step ends, and travel once"
    usual = DataParallelPlan().bucket_bytes
    if plan.data_parallel.bucket_bytes > usual:
        reasons["data_parallel.bucket_bytes"] = "gradients travel in fewer, larger messages"
    elif plan.data_parallel.bucket_bytes < usual:
        reasons["data_parallel.bucket_bytes"] = "less is left to wait for when backward and the optimizer end"
    if plan.memory.recompute != "none":
        reasons["memory.recompute"] = "without it the activations do not fit, or only slower plans do"
    return reasons


def _margin(rivals: Sequence[Candidate]) -> str:
    """How far the next plan with other axes is."""
    first = rivals[0]
    for rival in rivals[1:]:
        if rival.plan is not None and first.plan is not None and _sizes(rival.plan) != _sizes(first.plan):
            sizes = [f"{name} {size}" for name, size in _sizes(rival.plan) if size > 1] or ["1 process"]
            return f"; {' × '.join(sizes)} {_compared(rival, first)}"
    return ""


def _sizes(plan: Plan) -> tuple[tuple[str, int], ...]:
    return (("data", plan.mesh.data), ("tensor", plan.mesh.tensor), ("pipeline", plan.mesh.pipeline))


def _other_stage(rivals: Sequence[Candidate]) -> str:
    """Why this ZeRO stage: what the best plan with another one would take."""
    first = rivals[0]
    for rival in rivals[1:]:
        if rival.layout.zero != first.layout.zero and rival.layout.data == first.layout.data:
            return f"ZeRO-{rival.layout.zero} {_compared(rival, first)}"
    return "no other stage is among the best"


def _compared(rival: Candidate, first: Candidate) -> str:
    """`is 12 % slower`; what is within the predictions' spread cannot be told apart."""
    slower = (rival.prediction.step_seconds / first.prediction.step_seconds - 1) * 100
    if slower < _CLOSE * first.prediction.spread * 100:
        return "is predicted as fast"
    return f"is {slower:,.0f} % slower" if slower >= 10 else f"is {slower:.2g} % slower"
