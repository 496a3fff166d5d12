"""The search of `weft plan`: its options, its result on the terminal, and the files that it writes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli._explain import Questions, answer_lines
from weft.cli._numbers import parse_count, parse_duration
from weft.cli._options import Json, Overrides, write_output
from weft.cli._read import describe_recipe
from weft.cli._subject import Subject
from weft.errors import PlanError
from weft.formatting import format_memory, format_number, format_seconds

if TYPE_CHECKING:
    from weft.config.cluster import Cluster
    from weft.config.plan import Plan
    from weft.config.recipe import Recipe
    from weft.planning.learned import Learned
    from weft.planning.search import Objective, SearchResult, Space


_FOR = (
    "Choose among what megatron, torchtitan, deepspeed or accelerate can do, and print how to start it there. With"
    " --plan: that plan, or the nearest one that the system can do."
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The options of `weft plan` about the search."""

    overrides: Overrides = ()
    top: int = 5
    """Number of plans to show."""
    objective: str = "throughput"
    """Quantity to optimise: throughput, time (until --tokens are trained on) or cost (of a token)."""
    tokens: str | None = None
    """Tokens to train on, such as 2T."""
    deadline: str | None = None
    """Find the smallest part of the cluster that trains --tokens in this time, such as 14d."""
    price: float | None = None
    """Price of a device and hour, in any currency."""
    json: Json = False
    learned: bool = True
    """Whether recorded runs of this machine correct what is predicted for it."""
    system: Annotated[str | None, Parameter(name="--for", help=_FOR)] = None
    questions: Questions = Questions()

    @property
    def pins(self) -> tuple[str, ...]:
        """Settings of the plan that `--set` has given."""
        return tuple(text for text in self.overrides if text.startswith("plan."))

    @property
    def of_recipe(self) -> tuple[str, ...]:
        """Settings of the recipe that `--set` has given."""
        return tuple(text for text in self.overrides if not text.startswith("plan."))

    @property
    def is_special(self) -> bool:
        """Whether anything but a plain plan was asked for."""
        return bool(self.special)

    @property
    def special(self) -> tuple[str, ...]:
        """The options by which more was asked for."""
        asked = {
            "--tokens": self.tokens,
            "--deadline": self.deadline,
            "--price": self.price,
            "--json": self.json,
            "--objective": self.objective != "throughput",
            **self.questions.given,
        }
        return tuple(name for name, value in asked.items() if value)


def given_plan(path: str, request: SearchRequest) -> Plan:
    """Return a user's plan, with the settings that `--set` lays over it."""
    from weft.config.plan import load_plan

    return load_plan(path, request.pins)


def known_subject(name: str, cluster: Cluster, batch: int | None, sequence_length: int | None) -> Subject:
    """Return a model of `KNOWN_MODELS` with a batch; without one, `default_batch`, said aloud.

    Raises:
        RecipeError: no such model.
    """
    from weft.model.description import description_of_sizes
    from weft.model.profile.known import known_model
    from weft.planning.search import default_batch

    for option, value in (("--global-batch-size", batch), ("--sequence-length", sequence_length)):
        if value is not None and value < 1:
            raise PlanError(f"{option} {value} is too few. Use 1 or more.")
    sizes = known_model(name).sizes
    described = description_of_sizes(replace(sizes, sequence_length=sequence_length or sizes.sequence_length))
    if batch is None:
        batch, reason = default_batch(described.profile, cluster)
        print(f"no --global-batch-size was given: {batch:,} sample{'s' * (batch != 1)}, {reason}", file=sys.stderr)
    return Subject(described=described, global_batch_size=batch, permit=None, optimizer=None)


def recipe_subject(recipe_path: Path, overrides: tuple[str, ...]) -> Subject:
    """Return a recipe's model, built on the meta device where only that tells its sizes."""
    from weft.config.plan import Plan, apply_overrides
    from weft.config.recipe import load_recipe

    recipe, _ = apply_overrides(load_recipe(recipe_path), Plan(), overrides)
    described = describe_recipe(recipe)
    return Subject(
        described=described,
        global_batch_size=recipe.batch.global_batch_size,
        permit=recipe.permit,
        optimizer=recipe.optimizer,
        recipe=recipe,
        steps=recipe.run.steps,
    )


def run_search(subject: Subject, cluster: Cluster, request: SearchRequest) -> tuple[SearchResult, list[str]]:
    """Search, for the smallest part of the cluster where there is a deadline; return what was found, and its lines."""
    from weft.planning.explain import search_lines
    from weft.planning.search import smallest_cluster

    started = time.perf_counter()
    search = _searcher(subject, request)
    notes: list[str] = []
    if request.deadline is None:
        result = search(cluster)
    else:
        limit = parse_duration(request.deadline, "--deadline")
        smallest = smallest_cluster(cluster, search, deadline_seconds=limit)
        result = smallest.result
        days = (result.best[0].training_seconds or 0.0) / 86400
        notes.append(
            f"smallest cluster that trains {request.tokens} tokens in {request.deadline}: {smallest.nodes:,} nodes, "
            f"{result.cluster.num_devices:,} devices, {days:.1f} days at the pessimistic step time "
            f"({smallest.tried} sizes searched)"
        )
    lines = [*search_lines(result, top=request.top, seconds=time.perf_counter() - started), *_unpriced(request)]
    learned = learned_of(result.cluster, request)
    answers = [] if request.json else answer_lines(result, request.questions, subject, learned)
    return result, [*lines, *answers, *_totals(result), *notes]


def print_search(result: SearchResult, lines: list[str], request: SearchRequest) -> None:
    """Print a table, or JSON."""
    from weft.planning.explain import search_document

    learned = learned_of(result.cluster, request)
    print(json.dumps(search_document(result, learned), indent=2) if request.json else "\n".join(lines))


def write_best(result: SearchResult, output: Path, name: str) -> None:
    """Write the best plan as TOML, with what was predicted of it.

    Raises:
        PlanError: nothing fits, no plan can say it, or the file cannot be written.
    """
    from weft.config.plan import dump_plan
    from weft.planning.explain import search_reasons

    if not result.best:
        raise PlanError(f"no plan of {result.profile.name} fits into memory, so there is none to write.")
    best = result.best[0]
    if best.plan is None:
        raise PlanError(f'no plan can say precision = "{best.layout.precision}". Choose another with --set.')
    prediction = best.prediction
    header = [
        f"chosen by weft plan for {name} on cluster {result.cluster.digest}: predicted "
        f"{format_seconds(prediction.step_seconds)}/step (±{100 * prediction.spread:.0f} %), "
        f"{format_memory(prediction.fullest.device)} per rank",
    ]
    write_output(output, dump_plan(best.plan, search_reasons(result), header=header), PlanError)
    print(f"\nwritten to {output}", file=sys.stderr)


def _given(request: SearchRequest) -> Plan:
    """Return a plan whose `origins` name what the user has set.

    Raises:
        PlanError: something that follows from the other settings, and cannot be given to a search.
    """
    from weft.config.plan import Plan, apply_overrides, plan_settings
    from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe

    # Overrides are checked against a recipe and a plan; the recipe is of no importance, and the plan takes the
    # settings.
    nothing = Recipe(
        model=ModelRecipe(factory="model:build"), batch=BatchRecipe(global_batch_size=1), run=RunRecipe(steps=1)
    )
    _, pins = apply_overrides(nothing, Plan(), request.pins)
    for key in pins.origins:
        if key.count(".") != 1 or "[" in key:
            raise PlanError(
                f"plan.{key} (from --set) is not one setting, and a search takes them one by one."
                " Write --set plan.SECTION.NAME=VALUE for each."
            )
    for setting in plan_settings():
        if setting.knob.follows and setting.key in pins.origins:
            raise PlanError(
                f"plan.{setting.key} (from --set) follows from what a search chooses. Give {setting.knob.follows}, or a"
                " whole plan: --plan."
            )
    return pins


def chosen_space(subject: Subject, cluster: Cluster, request: SearchRequest, *, any_system: bool = False) -> Space:
    """Return what search may choose among, within the settings that were given: only what a training of the model
    takes, unless it is to be trained by another system (`any_system`)."""
    from weft.planning.search import pinned, recipe_space, space_of

    pins = _given(request)
    # Another system may cut a model that Weft's own pipeline cannot.
    if any_system:
        profile = replace(subject.profile, facts=subject.profile.facts.limited("blocks", ""))
        space = space_of(profile, cluster, global_batch_size=subject.global_batch_size, permit=subject.permit)
        return pinned(space, pins)
    recipe = subject.recipe or _assumed_recipe(subject, cluster)
    return recipe_space(recipe, subject.profile, subject.described.facts, cluster, pins)


def _assumed_recipe(subject: Subject, cluster: Cluster) -> Recipe:
    """A recipe for a well-known model, whose weights and data nobody has named."""
    from weft.config.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Recipe, RunRecipe

    precision = ("bf16",) if cluster.has_accelerators else ("fp32",)
    return Recipe(
        model=ModelRecipe(factory="model:build"),
        batch=BatchRecipe(global_batch_size=subject.global_batch_size),
        run=RunRecipe(steps=1),
        permit=subject.permit or PermitRecipe(precision=precision),
    )


def learned_of(cluster: Cluster, request: SearchRequest) -> Learned:
    """Return what recorded runs of a machine say of its prices, unless that is not wanted."""
    from weft.planning.learned import NOTHING_LEARNED, learned_here

    return learned_here(cluster) if request.learned and request.system is None else NOTHING_LEARNED


def search_space(subject: Subject, cluster: Cluster, request: SearchRequest, space: Space) -> SearchResult:
    """Return the best plans of a space."""
    from weft.planning.search import search
    from weft.techniques.cost_terms import DATASHEET, FITTED

    # What was fitted on published runs of accelerators; cores are priced by what was measured of them.
    calibration = FITTED if cluster.has_accelerators else learned_of(cluster, request).calibration(DATASHEET)

    return search(
        subject.profile,
        cluster,
        global_batch_size=subject.global_batch_size,
        objective=_objective(request),
        space=space,
        optimizer=subject.optimizer,
        calibration=calibration,
        top=max(request.top, 1),
        pins=_given(request),
    )


def _searcher(subject: Subject, request: SearchRequest) -> Callable[[Cluster], SearchResult]:
    _objective(request)  # complains of what was asked before anything is searched

    def searched(cluster: Cluster) -> SearchResult:
        return search_space(subject, cluster, request, chosen_space(subject, cluster, request))

    return searched


def _objective(request: SearchRequest) -> Objective:
    from weft.planning.search import OBJECTIVES, Objective

    tokens = None if request.tokens is None else parse_count(request.tokens, "--tokens")
    for name in OBJECTIVES:
        if name == request.objective:
            return Objective(quantity=name, tokens=tokens, price_per_device_hour=request.price)
    return Objective(quantity=request.objective)  # pyright: ignore[reportArgumentType] - raises, and says why


def _unpriced(request: SearchRequest) -> list[str]:
    """Return a line on the given settings that the cost model does not price."""
    from weft.config.plan import plan_settings
    from weft.planning.search import beyond_search

    free = {setting.key for setting in plan_settings() if setting.knob.free}
    names = [name for name in beyond_search(_given(request)) if name not in free]
    return [f"given     {', '.join(names)}: in the plans, and not in their prices"] if names else []


def _totals(result: SearchResult) -> list[str]:
    """Training time and cost of the best plan, where they were asked for."""
    if not result.best:
        return []
    best, lines = result.best[0], list[str]()
    if best.training_seconds is not None:
        days = best.training_seconds / 86400
        lines.append(f"training  {days:,.1f} days at the pessimistic step time of the best plan")
    if best.cost_per_million_tokens is not None:
        lines.append(f"cost      {format_number(best.cost_per_million_tokens)} per million tokens of the best plan")
    return lines
