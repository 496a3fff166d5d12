"""`weft.check`: prove on this machine that a plan computes what one process computes."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api.planning.describe import describe_recipe
from weft.api.training.check_report import CheckFailure, CheckReport, describe_case
from weft.api.training.one_process import OneProcess
from weft.config.cluster import Cluster, known_machine
from weft.config.plan import ModelFacts, Plan, dump_plan, filled_in, load_plan, over_ranks
from weft.config.recipe import Recipe, dump_recipe, load_recipe
from weft.errors import LaunchError, RecipeError, WeftError
from weft.model.description import description_of, facts_of
from weft.planning.search import choose_plan
from weft.run.launch import RankInfo
from weft.run.launch.launcher import ForkServer, RankError, launch_function, open_fork_server
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.randomness.draws import draws_of
from weft.techniques.registry import exact
from weft.verify.numerics import (
    EXACT,
    REMOVABLE,
    CheckCase,
    Comparison,
    Contributions,
    Evidence,
    InnerCasts,
    ModuleOutputs,
    SmallCase,
    Trial,
    TrialResult,
    compare_results,
    contributions,
    first_different_output,
    join_trials,
    likely_cause,
    outputs_file,
    read_trial,
    shrink_case,
    without_technique,
)

_MEMORY_SHARE = 0.5
"""Share of this machine's memory that a model which cannot be shrunk may take."""
_SEARCH_SECONDS = 180.0
"""Time after which no further technique is taken out to find the cause."""


def check(
    recipe: Recipe | str | Path,
    plan: Plan | str | Path = "auto",
    *,
    processes: int | None = None,
    explain: bool = True,
    fork_server: ForkServer | None = None,
) -> CheckReport:
    """Compare a plan with one process on a small model of the same structure, and return what came of it.

    The model gets few blocks and narrow layers, the plan's axes are scaled down to at most `processes` fresh CPU
    processes of this machine.  Compared are initial weights, the first step's gradients, losses and gradient norms of
    three optimizer steps, final weights and buffers: in fp64, in fp32, and in the plan's own precision, compiled if it
    says so.  Not collective: call it on one process, outside of any job.

    Args:
        recipe: a recipe, or the path of one.
        plan: a plan, the path of one, or `auto` (as chosen for this machine).
        processes: the most to start; by default 8, or as many as the plan has axes for.
        explain: when something differs, find the likely cause and the techniques that it needs, by more runs.
        fork_server: of the processes; by default one that ends with this call.

    A plan that compresses gradients, or lets replicas step by themselves, is compared without either, and the report
    says so: both change the mathematics by the recipe's permission, so there is no equal to compare with.

    Raises:
        WeftError: the plan does not fit the recipe, cannot be run yet, or cannot be checked.

    Example::

        report = weft.check("recipe.toml", "plan.toml")
        assert report.is_equal, report
    """
    if dist.is_initialized() or RankInfo.from_environment() is not None:
        raise LaunchError("weft.check starts its own processes, and this one is a rank already. Call it outside a job.")
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    with open_fork_server(fork_server, preload=_slow_imports(recipe)) as warm:
        return check_by(partial(_fresh_processes, warm), recipe, plan, processes=processes, explain=explain)


def _slow_imports(recipe: Recipe) -> list[str]:
    """Import the slow libraries of a check while this process describes and plans."""
    # Torch's optimizers, which every rank runs, import dynamo.
    return ["torch._dynamo", *(["transformers.modeling_utils"] if recipe.model.hf else [])]


Launch = Callable[[dict[str, Any], int, Callable[[], object]], object]
"""Calls `weft.verify.numerics._check_rank:run_rank` with these arguments on so many ranks, and returns when they have
ended; the last argument is called meanwhile."""


def _fresh_processes(
    fork_server: ForkServer | None, arguments: dict[str, Any], world_size: int, meanwhile: Callable[[], object]
) -> None:
    # This process has built the model already, so it knows which modules the ranks will need.
    preload = sorted(name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name)
    function = "weft.verify.numerics._check_rank:run_rank"
    launch_function(
        function,
        arguments,
        world_size,
        threads_per_rank=1,
        preload=preload,
        fork_server=fork_server,
        meanwhile=meanwhile,
    )


def check_by(
    launch: Launch, recipe: Recipe, plan: Plan | str | Path, *, processes: int | None, explain: bool
) -> CheckReport:
    """`check`, with ranks started by `launch`."""
    try:
        return _checked(launch, recipe, plan, processes, explain)
    except WeftError:
        raise
    except Exception as problem:  # of an analysis, or of the model's own code: no exception is a result
        raise RecipeError(_not_understood(recipe, problem)) from problem


def _not_understood(recipe: Recipe, problem: Exception) -> str:
    """Return the error of a check that stopped for a reason that nobody foresaw, and where."""
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    words = next(iter(str(problem).strip().splitlines()), "").rstrip(".") or "no words"
    model = recipe.model.hf or recipe.model.factory or recipe.model.reference
    where = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
    return (
        f"{model} cannot be checked: {type(problem).__name__} in {where} was not foreseen: {words}. If a forward and a"
        " backward of the model run without Weft, this is a defect of Weft: please report it with recipe and plan."
    )


def _checked(
    launch: Launch, recipe: Recipe, plan: Plan | str | Path, processes: int | None, explain: bool
) -> CheckReport:
    began = time.monotonic()
    facts = _facts(recipe)
    if plan == "auto":
        profile = describe_recipe(recipe).profile
        plan = choose_plan(recipe, known_machine().cluster, facts, profile=profile).plan
    elif not isinstance(plan, Plan):
        plan = load_plan(plan)
    plan = filled_in(over_ranks(plan, processes), recipe)
    check_plan(plan, recipe, facts)
    check_runnable(plan)
    plan, left_out = exact(plan)
    with tempfile.TemporaryDirectory(prefix="weft-check-") as name, _state_kept():
        folder = Path(name)
        budget = int(_MEMORY_SHARE * min(node.memory_bytes for node in Cluster.detect().nodes))
        small = shrink_case(recipe, plan, facts, processes=processes, folder=folder, memory_bytes=budget)
        lines = [*describe_case(recipe, plan, facts, small, _fitting(small))]
        lines += [f"          {line}" for line in left_out]
        comparisons, failure = _compare_cases(small, folder, launch, _cases(plan), explain)
    return CheckReport(
        plan=small.plan,
        lines=tuple(lines),
        comparisons=tuple(comparisons),
        failure=failure,
        seconds=time.monotonic() - began,
    )


def _facts(recipe: Recipe) -> ModelFacts:
    """Return the facts that the recipe gives of a model that it fully describes; others are built and looked at."""
    if recipe.model.factory is not None:  # it will run as it is, whatever was kept of it
        return facts_of_blueprint(build_blueprint(recipe), recipe)
    return facts_of(recipe) if description_of(recipe) is not None else describe_recipe(recipe).facts


def _fitting(small: SmallCase) -> ModelFacts:
    """Return the small model's facts, once everything fits together.

    Raises:
        RecipeError: there is nothing to make samples from.
        PlanError: the model draws what the plan cannot key.  One process and plain PyTorch would differ then, too.
    """
    blueprint = build_blueprint(small.recipe, small.plan)
    if blueprint.example is None:
        what = small.recipe.model.factory or type(blueprint.module).__name__
        raise RecipeError(
            f"{what} cannot be checked: nothing says what its samples look like. Let a factory return a"
            " weft.model.blueprint.Blueprint whose `example` gives a batch."
        )
    facts = facts_of_blueprint(blueprint, small.recipe)
    check_plan(small.plan, small.recipe, facts)
    draws_of(blueprint, small.plan)
    return facts


def _cases(plan: Plan) -> list[CheckCase]:
    """fp64 and fp32 for the mathematics, then what the plan says."""
    own = CheckCase(plan.compute.precision, plan.compute.compile)
    return list(dict.fromkeys((EXACT, CheckCase("fp32"), own)))


@contextmanager
def _state_kept() -> Generator[None]:
    """One process runs here, in this process: put torch's generators and threads back afterwards."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(threads)


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _SmallTrials:
    """Runs trials of a small model."""

    small: SmallCase
    folder: Path
    launch: Launch
    alone: OneProcess
    """The one process that cases are compared with."""
    references: dict[CheckCase, TrialResult] = field(default_factory=dict[CheckCase, TrialResult])
    """Results of the one process in the cases that were asked for."""

    @classmethod
    def of(cls, small: SmallCase, folder: Path, launch: Launch, inside: InnerCasts = "wide") -> _SmallTrials:
        return cls(small, folder, launch, OneProcess.of(small, inside))

    def ranks(self, cases: Sequence[CheckCase], *, watch: bool = False) -> None:
        """Run the cases on the plan's world, in fresh processes that are started once."""
        _run_ranks(self.small, self.folder, self.launch, cases, self.alone.inside, watch=watch)

    def trials(self, case: CheckCase) -> list[Trial]:
        """Return the results of the ranks in a case."""
        world_size = self.small.plan.mesh.world_size
        return [read_trial(case.trial_file(self.folder, rank)) for rank in range(world_size)]

    def reference(self, case: CheckCase) -> TrialResult:
        """Return the results of one process in a case."""
        if case not in self.references:
            alone = self.alone
            self.references[case] = alone.exact if case == EXACT else alone.run(case.precision, inside="as written")
        return self.references[case]

    def first_wrong_output(self) -> str:
        """The first module of the forward that returns something else than in one process; empty: none is known."""
        if self.small.plan.mesh.pipeline > 1:
            return ""
        try:
            self.ranks([EXACT], watch=True)
        except WeftError:
            return ""
        outputs = ModuleOutputs()
        self.alone.run("fp64", steps=0, inspect=outputs.watch)
        difference = first_different_output(outputs.by_module, ModuleOutputs.read(outputs_file(self.folder)).by_module)
        if difference is None:
            return ""
        module, relative = difference
        return f"the first module that returns something else is {module} (by {relative:.1e})"

    def taken_apart(self) -> Contributions:
        """The first step's gradient in one process, by data rank."""
        plan = EXACT.plan(self.small.plan)
        return contributions(self.small.recipe, plan, self.alone.build, label_range=self.small.label_range)

    def comparison(
        self, case: CheckCase, exact: TrialResult | None, order: Sequence[str] = ()
    ) -> tuple[Comparison, TrialResult]:
        """Compare what the ranks left of a case with one process, which is returned, too."""
        alone, reference = self.alone, self.reference(case)
        candidate = join_trials(self.trials(case), self.small.plan)

        def compare(nudged: Sequence[TrialResult]) -> Comparison:
            return compare_results(
                reference, candidate, precision=case.precision, exact=exact, nudged=nudged, order=order
            )

        comparison = alone.judge(compare, case.precision)
        rounds = alone.rounds if case == EXACT else ""
        return replace(comparison, precision=str(case), rounds_inside=rounds), reference


def _run_ranks(
    small: SmallCase,
    folder: Path,
    launch: Launch,
    cases: Sequence[CheckCase],
    inside: InnerCasts,
    *,
    watch: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    arguments = {
        "recipe": dump_recipe(small.recipe, everything=True),
        "plan": dump_plan(small.plan, everything=True),
        "cases": [[case.precision, case.compiled] for case in cases],
        "label_range": small.label_range,
        "folder": str(folder),
        "watch": watch,
        "inside": inside,
    }
    launch(arguments, small.plan.mesh.world_size, meanwhile)


def _compare_cases(
    small: SmallCase, folder: Path, launch: Launch, cases: Sequence[CheckCase], explain: bool
) -> tuple[list[Comparison], CheckFailure | None]:
    """Run all cases and compare until one is not equal; first of all, one process itself."""
    # Ranks spend as long on importing and building as this process does on what they are compared with.
    known: list[tuple[_SmallTrials, Comparison | None]] = []

    def beside() -> None:
        runs = _SmallTrials.of(small, folder, launch)
        plain = runs.alone.against_plain_torch()
        known.append((runs, plain))
        for case in cases if plain is None or plain.is_equal else ():
            runs.reference(case)

    stopped: RankError | None = None
    try:
        _run_ranks(small, folder, launch, cases, "wide", meanwhile=beside)
    except RankError as error:
        stopped = error
    runs, plain = known[0]  # a rank's failure is raised after one process has been run
    if plain is not None and not plain.is_equal:
        cause = "one process of Weft does not compute what plain PyTorch does, whatever the plan"
        return [plain], _first_of(plain, cause, ())
    if runs.alone.inside == "wide" and stopped is not None and _is_about_types(stopped):
        runs = _SmallTrials.of(small, folder, launch, "as written")
    if runs.alone.inside == "as written":  # the ranks were run without the model's own casts
        try:
            stopped = None
            runs.ranks(cases)
        except RankError as error:
            stopped = error
    if stopped is not None:
        _, needs = _needed(runs) if explain else (runs, ())
        return [], CheckFailure(precision="fp64", mismatch=None, others=0, cause=str(stopped), needs=needs)
    return _compared(runs, cases, explain)


def _compared(
    runs: _SmallTrials, cases: Sequence[CheckCase], explain: bool
) -> tuple[list[Comparison], CheckFailure | None]:
    comparisons: list[Comparison] = []
    exact: TrialResult | None = None
    for case in cases:
        comparison, reference = runs.comparison(case, exact)
        comparisons.append(comparison)
        exact = exact or reference
        if not comparison.is_equal:
            return comparisons, _failure(runs, comparison, case, explain)
    return comparisons, None


def _is_about_types(error: RankError) -> bool:
    """Whether ranks may have stopped because a cast that they need was left out."""
    return any(word in str(error) for word in ("dtype", "Double", "float64", "double"))


def _failure(runs: _SmallTrials, comparison: Comparison, case: CheckCase, explain: bool) -> CheckFailure:
    """Return the first difference, in the order of the forward, and its cause."""
    cause, needs = "", ()
    if case == EXACT:
        apart = runs.taken_apart()
        comparison, reference = runs.comparison(EXACT, None, apart.order)
        if explain:
            trials = runs.trials(EXACT)
            cause = likely_cause(
                Evidence(
                    plan=runs.small.plan,
                    blueprint=build_blueprint(runs.small.recipe),
                    reference=reference,
                    candidate=join_trials(trials, runs.small.plan),
                    trials=trials,
                    contributions=apart,
                    comparison=comparison,
                )
            )
            simplest, needs = _needed(runs)
            where = simplest.first_wrong_output() if comparison.mismatches[0].kind == "loss" else ""
            cause += f"; {where}" if where else ""
    elif case.compiled:
        cause = f"fp64 and fp32 are equal without compilation: it is torch.compile, or rounding, in {case.precision}"
    else:
        precision = comparison.precision
        cause = f"fp64 is equal, so the mathematics is right: rounding in {precision} differs more than it should"
    return _first_of(comparison, cause, needs)


def _first_of(comparison: Comparison, cause: str, needs: tuple[str, ...]) -> CheckFailure:
    return CheckFailure(
        precision=comparison.precision,
        mismatch=comparison.mismatches[0],
        others=len(comparison.mismatches) - 1,
        cause=cause,
        needs=needs,
    )


def _needed(runs: _SmallTrials) -> tuple[_SmallTrials, tuple[str, ...]]:
    """Take out one technique after another, as long as something still differs.

    Returns what is left, and the techniques that cannot go.
    """
    deadline = time.monotonic() + _SEARCH_SECONDS
    needed: list[str] = []
    for technique in REMOVABLE:
        simpler = without_technique(technique, runs.small.recipe, runs.small.plan, runs.folder)
        if simpler is None:
            continue
        if time.monotonic() > deadline:
            needed.append(f"{technique} (not tried)")
            continue
        case = replace(runs.small, recipe=simpler[0], plan=simpler[1])
        simplified = _SmallTrials.of(case, runs.folder, runs.launch, runs.alone.inside)
        if _still_differs(simplified):
            runs = simplified
        else:
            needed.append(technique)
    return runs, tuple(needed)


def _still_differs(runs: _SmallTrials) -> bool:
    try:
        runs.ranks([EXACT])
    except RankError:
        return True
    except WeftError:
        return False  # a plan that is refused shows nothing
    return not runs.comparison(EXACT, None)[0].is_equal
