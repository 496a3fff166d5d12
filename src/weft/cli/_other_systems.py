"""`weft plan --for SYSTEM`, and plans of the user's own for known models."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli._explain import answer_lines
from weft.cli._search import SearchRequest, chosen_space, learned_of, search_space
from weft.cli._subject import Subject, need_sizes
from weft.errors import PlanError
from weft.formatting import format_seconds

if TYPE_CHECKING:
    from weft.config.cluster import Cluster
    from weft.config.plan import Plan
    from weft.planning.search import SearchResult
    from weft.techniques.cost_terms import Calibration


def run_for(
    system_name: str, subject: Subject, cluster: Cluster, request: SearchRequest, plan: Plan | None, folder: Path | None
) -> tuple[SearchResult, list[str]]:
    """Search within a system, or take the plan where it can; return what was found, and its lines with the command."""
    from weft.interop.systems import emission_lines, emit, find_system, job_of, node_size, search_within, write_emission
    from weft.planning.explain import search_lines

    system, started = find_system(system_name), time.perf_counter()
    sizes = need_sizes(subject)
    priced = None if plan is None else price_plan(subject, cluster, plan)
    within, notes = priced, list[str]()
    reasons = [] if priced is None else list(system.refusals(job_of(priced, priced.best[0], sizes)))
    # Where the user's plan cannot be had, the nearest one that can is searched, and shown beside the given one.
    if priced is None or reasons:
        near = None if priced is None else priced.best[0].layout
        space = chosen_space(subject, cluster, request, any_system=True)
        search = partial(search_space, subject, cluster, request)
        nearest = search_within(system, sizes, replace(space, node_size=node_size(cluster)), search, near=near)
        within = nearest.result
        beside = priced or search(space)
        notes += [f"cannot    {reason}" for reason in dict.fromkeys(reasons)]
        notes += _difference(beside, within, system.facts.title, nearest.kept, is_given=priced is not None)
    assert within is not None
    lines = search_lines(within, top=request.top, seconds=time.perf_counter() - started)
    job = job_of(within, within.best[0], sizes, optimizer=subject.optimizer, steps=subject.steps)
    emission = emit(system, job)
    if folder is not None:
        for path in write_emission(emission, folder):
            print(f"written to {path}", file=sys.stderr)
    return within, [*lines, *notes, *emission_lines(emission, system.facts)]


def run_given(subject: Subject, cluster: Cluster, request: SearchRequest, plan: Plan) -> tuple[SearchResult, list[str]]:
    """Price a user's plan for a known model; return it, and its lines with the answers to what was asked of it."""
    from weft.planning.explain import search_lines
    from weft.techniques.cost_terms import DATASHEET

    started = time.perf_counter()
    learned = learned_of(cluster, request)
    result = price_plan(subject, cluster, plan, learned.calibration(DATASHEET))
    lines = search_lines(result, top=1, seconds=time.perf_counter() - started)
    return result, [*lines, *([] if request.json else answer_lines(result, request.questions, subject, learned))]


def _difference(
    beside: SearchResult, within: SearchResult, title: str, kept: tuple[str, ...], *, is_given: bool
) -> list[str]:
    if not beside.best:
        return []
    other, best = beside.best[0], within.best[0]
    more = best.prediction.step_seconds / other.prediction.step_seconds - 1
    named = "the given plan" if is_given else "Weft's best plan"
    nearest = f", nearest with its {', '.join(kept)}" if is_given and kept else ""
    return [
        f"beside    {named}: {format_seconds(other.prediction.step_seconds)}/step; {title}{nearest}:"
        f" {format_seconds(best.prediction.step_seconds)}/step ({100 * more:+,.1f} %)"
    ]


def price_plan(subject: Subject, cluster: Cluster, plan: Plan, on_cores: Calibration | None = None) -> SearchResult:
    """Return a user's plan with its price, as a search that found nothing else.  `on_cores`: constants of prices where
    the cluster has no accelerators; by default those of data sheets.

    Raises:
        PlanError: it does not fit the model, the batch, the cluster, or its memory.
    """
    from weft.planning.price import CostModel, check_layout
    from weft.planning.search import Counts, Objective, SearchResult, candidate_of, space_of
    from weft.techniques.cost_terms import DATASHEET, FITTED, WEFT, Layout

    layout = Layout.of(plan)
    shares = plan.microbatch.shares(plan.mesh.data)
    samples = plan.microbatch.size * sum(shares)
    problems = check_layout(subject.profile, cluster, layout)
    if samples != subject.global_batch_size:
        problems.append(
            f"{sum(shares)} microbatches of {plan.microbatch.size} are {samples} samples, and the global batch has"
            f" {subject.global_batch_size}. Use --global-batch-size {samples}, or microbatch.per_step."
        )
    if problems:
        raise PlanError("the plan does not fit:\n" + "\n".join(f"- {problem}" for problem in problems))
    calibration = FITTED if cluster.has_accelerators else on_cores or DATASHEET
    cost_model = CostModel(subject.profile, cluster, WEFT, calibration)
    objective = Objective()
    if layout.pipeline > 1 and layout.cuts is None:
        cuts = cost_model.model_cost(layout).cuts(layout)
        plan = replace(plan, pipeline_parallel=replace(plan.pipeline_parallel, cuts=cuts))
    prediction = cost_model.predict(layout, exact=True)
    if not prediction.fits:
        need, usable = prediction.fullest.device / 2**30, prediction.usable_bytes / 2**30
        raise PlanError(
            f"the plan needs {need:.1f} GiB on its fullest device, and {usable:.1f} of"
            f" {prediction.device_bytes / 2**30:.1f} GiB may be filled. Search what fits: leave --plan out, or give"
            " fewer of its settings with --set."
        )
    candidate = candidate_of(cost_model, objective, subject.global_batch_size, layout, prediction, plan)
    return SearchResult(
        profile=subject.profile,
        cluster=cluster,
        global_batch_size=subject.global_batch_size,
        objective=objective,
        space=space_of(subject.profile, cluster, global_batch_size=subject.global_batch_size),
        framework=cost_model.framework,
        calibration=calibration,
        best=(candidate,),
        counts=Counts(
            searched=1, invalid={}, memory_bound=0, time_bound=0, estimated=0, priced=1, out_of_memory=0, refused={}
        ),
    )
