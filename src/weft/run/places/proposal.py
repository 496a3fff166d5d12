"""Submitting a run: from a recipe and a pool to what the pool's place is asked, and to a job there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from weft.config.cluster import Cluster, cluster_of_hosts, known_machine, resolve_cluster
from weft.config.plan import Plan, apply_overrides, load_plan
from weft.config.pool import Pool
from weft.config.recipe import Recipe, load_recipe
from weft.errors import ClusterError, LaunchError, PlanError
from weft.formatting import format_percent, format_seconds
from weft.model.description import Description
from weft.planning.price import CostModel, PricedBlock, price_blocks
from weft.planning.search import choose_plan
from weft.run.hosts.signed import SECRET, JobSecret
from weft.run.places import place_of
from weft.run.places.contract import Gang, GangBlock, Job, PlacedJob, PlaceState, PlaceVerdict, Request, read_nodes
from weft.run.places.submission import (
    FOLDER,
    JobOrder,
    LaunchOrder,
    Submission,
    TrainOrder,
    ask_to_stop,
    forget_attempts,
    job_name,
)
from weft.techniques.cost_terms import Layout

_MUST = 0.1
"""Share of the step's time that splitting a block costs, from which the place must keep it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProposal:
    """A run as it would be submitted."""

    order: JobOrder
    job: Job
    request: Request
    plan: Plan | None
    """The plan that is expected; with `auto` the leader searches again, with the machines that are there.  None: the
    session of a script says it."""
    cluster: Cluster
    """The machines as the planner sees them."""
    step_seconds: float
    """Predicted time of a step; 0 where the cluster's devices have no known speed."""

    def check(self) -> PlaceVerdict:
        """Ask the place.  Starts nothing.

        Raises:
            LaunchError: the place does not answer.
        """
        order = self.order
        return place_of(order.pool.place).check(self.request, order.gang, self.job, order.pool)

    def lines(self) -> list[str]:
        """The proposal for people, without the request's own text."""
        pool, gang = self.order.pool, self.order.gang
        likeness = "" if pool.cluster else "; as if each were like this one: the pool names no cluster"
        time = f"predicted {format_seconds(self.step_seconds)} per step" if self.step_seconds else "not predicted"
        what = gang.accelerator or "process" + ("es" if gang.num_devices > 1 else "")
        plan = "as the script's session says" if self.plan is None else f"{_axes(self.plan)}, {time}{likeness}"
        lines = [
            f"pool      {pool.name} ({pool.place})",
            f"plan      {plan}",
            f"gang      {gang.nodes} machine{'s' if gang.most > 1 else ''} × {gang.num_devices} {what}",
        ]
        for block in gang.blocks:
            lines.append(f"          {_block_line(block)}")
        return lines


def propose(
    train: TrainOrder,
    pool: Pool,
    nodes: str,
    run: Path,
    folder: Path,
    *,
    describe: Callable[[Recipe], Description],
    limit_seconds: int | None = None,
) -> RunProposal:
    """Return what would be submitted.  Nothing is written, nothing is asked.

    Args:
        nodes: `4`, or `2..4`.
        run: folder of the run, absolute.
        folder: in which agents work: relative paths in the recipe mean files there.
        describe: returns the description of the recipe's model.
        limit_seconds: longest time of the job; by default the pool's.

    Raises:
        WeftError: the recipe, the plan or the cluster is wrong, or no plan fits.
    """
    least, most = read_nodes(nodes)
    bare = Gang(least=least, most=most, num_devices=1, accelerator="")
    order = JobOrder(train=train, folder=folder, pool=pool, gang=bare)
    recipe, given = order_parts(order)
    cluster = _cluster(order, given, most)
    described = describe(recipe)
    plan = given or choose_plan(recipe, cluster, described.facts, profile=described.profile).plan
    layout, seconds, blocks = Layout.of(plan), 0.0, tuple[GangBlock, ...]()
    with suppress(ClusterError):  # devices whose speed nobody knows have no price
        seconds = CostModel(described.profile, cluster).predict(layout, exact=True).time.total
        # A gang that one leaf can hold is a block itself: what it costs elsewhere only the whole pool tells.
        whole = _cluster(order, given, max(most, (pool_cluster(order) or cluster).num_nodes))
        blocks = tuple(block_of(priced, whole) for priced in price_blocks(described.profile, whole, layout))
    return _proposal(order, run, cluster, plan, seconds, blocks, limit_seconds)


def propose_launch(
    launch: LaunchOrder, pool: Pool, nodes: str, run: Path, folder: Path, *, limit_seconds: int | None = None
) -> RunProposal:
    """Return what would be submitted to run a script.  Its model is known only where it runs, so nothing is predicted,
    and no machines are asked to lie together.

    Args:
        nodes, run, folder, limit_seconds: see `propose`.

    Raises:
        WeftError: the cluster is wrong, or the place refuses the gang.
    """
    least, most = read_nodes(nodes)
    bare = Gang(least=least, most=most, num_devices=1, accelerator="")
    order = JobOrder(launch=launch, folder=folder, pool=pool, gang=bare)
    return _proposal(order, run, _cluster(order, None, most), None, 0.0, (), limit_seconds)


def _proposal(
    order: JobOrder,
    run: Path,
    cluster: Cluster,
    plan: Plan | None,
    seconds: float,
    blocks: tuple[GangBlock, ...],
    limit_seconds: int | None,
) -> RunProposal:
    pool = order.pool
    gang = replace(
        order.gang,
        num_devices=cluster.nodes[0].devices.count,
        accelerator=cluster.kinds[0] if cluster.has_accelerators else "",
        num_cores=None if pool.cluster is None else cluster.nodes[0].cores,
        blocks=blocks,
        limit_seconds=limit_seconds or pool.limit_seconds,
        grace_seconds=pool.grace_seconds,
    )
    order, job = replace(order, gang=gang), Job(name=job_name(run), run=run)
    return RunProposal(
        order=order,
        job=job,
        request=place_of(pool.place).request(gang, job, pool),
        plan=plan,
        cluster=cluster,
        step_seconds=seconds,
    )


def submit(proposal: RunProposal) -> PlacedJob:
    """Hand a run to its place: to begin, or, where its folder has saves, to go on.

    Raises:
        LaunchError: it is there already, the place refuses it, or the folder is no run's.
    """
    run, order = proposal.job.run, proposal.order
    place = place_of(order.pool.place)
    before = Submission.newest(run) if run.is_dir() else None
    if before is not None:
        _refuse_twice(run, before, state_of(run))
    elif run.is_dir() and any(run.iterdir()) and not (run / SECRET).exists():
        raise LaunchError(f"{run} is there already, not empty, and no run's folder. Give a new --run-folder.")
    verdict = proposal.check()
    if not verdict.accepts:
        raise LaunchError(f"{order.pool.name} would not run this: {verdict.text}. Nothing was submitted.")
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run / FOLDER).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"the run folder {run} cannot be made: {error.strerror}.") from None
    JobSecret.of_folder(run)
    begun = Submission.begin(run, after=before)
    forget_attempts(run)
    try:
        order.write(run)
        placed = place.submit(proposal.request, order.gang, proposal.job, order.pool)
    except BaseException:
        begun.take_back(run)
        raise
    begun.place(run, placed)
    return placed


def state_of(run: Path) -> PlaceState:
    """Ask the place of a submitted run how it stands there.

    Raises:
        LaunchError: the run was never submitted, or the place does not answer.
    """
    order, newest = JobOrder.read(run), Submission.newest(run)
    if newest is None or newest.placed is None:
        return PlaceState(phase="unknown", why="it was being submitted, and the command that did it has ended")
    return place_of(order.pool.place).state(newest.placed, Job(name=job_name(run), run=run), order.pool)


def stop(run: Path) -> None:
    """Have a submitted run save and leave.

    Raises:
        LaunchError: the run was never submitted, has ended, or the place does not answer.
    """
    order, newest = JobOrder.read(run), Submission.newest(run)
    state = state_of(run)
    if newest is None or newest.placed is None or state.phase == "ended":
        raise LaunchError(f"{run} does not run: {state.why or 'it has ended'}.")
    ask_to_stop(run)
    place_of(order.pool.place).stop(newest.placed, Job(name=job_name(run), run=run), order.pool)


def _refuse_twice(run: Path, before: Submission, state: PlaceState) -> None:
    if state.phase == "ended":
        return
    where = "" if before.placed is None else f" as {before.placed.place} job {before.placed.number}"
    why = f" ({state.why})" if state.why else ""
    if state.phase == "unknown":
        raise LaunchError(
            f"{run} was submitted{where}, and nobody knows how that stands{why}. If it is over, remove"
            f" {run / FOLDER / f'{before.number}.json'}, and submit again."
        )
    raise LaunchError(f"{run} is submitted{where}, {state.phase}{why}. weft stop {run} ends it; weft logs shows it.")


def order_parts(order: JobOrder) -> tuple[Recipe, Plan | None]:
    """Return the recipe and the plan of an order; None: the planner's.

    Raises:
        WeftError: a file cannot be read, or is wrong.
    """
    asked = order.train
    assert asked is not None, "asked of a training"
    given = Plan() if asked.plan == "auto" else load_plan(asked.plan)
    recipe, given = apply_overrides(load_recipe(asked.recipe), given, list(asked.overrides))
    if asked.plan == "auto" and given != Plan():
        raise PlanError("--set plan.… does not go with --plan auto on several hosts. Write the plan into a file.")
    return recipe, None if asked.plan == "auto" else given


def pool_cluster(order: JobOrder) -> Cluster | None:
    """Return the cluster that the pool names; None: it names none."""
    return None if order.pool.cluster is None else resolve_cluster(order.pool.cluster)


def _cluster(order: JobOrder, given: Plan | None, num_hosts: int) -> Cluster:
    """So many machines of the pool as the planner sees them."""
    described, own = pool_cluster(order), known_machine().cluster
    known = described or own
    asked = order.train or order.launch
    per_node = None if asked is None else asked.processes_per_node
    if per_node is None:
        on_cores = given is not None and given.compute.device == "cpu"
        per_node = known.nodes[0].cores if on_cores else known.nodes[0].devices.count
    return cluster_of_hosts(own, described, num_hosts, per_node)


def block_of(priced: PricedBlock, cluster: Cluster) -> GangBlock:
    """Return a priced block as places are asked for it: a must where splitting it costs much."""
    loss = priced.split_seconds / priced.whole_seconds - 1
    return GangBlock(
        tier=priced.tier,
        level=priced.level,
        tier_nodes=priced.tier_devices // cluster.nodes[0].devices.count,
        num_nodes=priced.num_devices // cluster.nodes[0].devices.count,
        axes=priced.axes,
        must=loss >= _MUST,
        whole_seconds=priced.whole_seconds,
        split_seconds=priced.split_seconds,
        scattered_seconds=priced.scattered_seconds,
    )


def _block_line(block: GangBlock) -> str:
    def loss(seconds: float) -> str:
        return f"{format_seconds(seconds)} (+{format_percent(100 * (seconds / block.whole_seconds - 1))})"

    axes = " and ".join(block.axes)
    return (
        f"blocks of {block.num_nodes} in one {block.tier} each, for {axes}: {format_seconds(block.whole_seconds)} a"
        f" step; split in two {loss(block.split_seconds)}, scattered {loss(block.scattered_seconds)}:"
        f" {'a must' if block.must else 'a wish'}"
    )


def _axes(plan: Plan) -> str:
    sizes = [(axis, getattr(plan.mesh, axis)) for axis in plan.mesh.order]
    return " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one process"
