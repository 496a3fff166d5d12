"""`weft plan`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli._options import FLAG, write_output
from weft.cli._other_systems import run_for, run_given
from weft.cli._read import PlannedRun, read_choice
from weft.cli._search import (
    SearchRequest,
    given_plan,
    known_subject,
    print_search,
    recipe_subject,
    run_search,
    write_best,
)
from weft.errors import PlanError

if TYPE_CHECKING:
    from weft.cli._subject import Subject
    from weft.config.cluster import Cluster
    from weft.planning.search import SearchResult


_PLAIN = SearchRequest()
"""Nothing is asked for but a plan."""


def plan(
    recipe: Path | None = None,
    /,
    *,
    model: str | None = None,
    plan: str = "auto",
    cluster: str | None = None,
    processes: int | None = None,
    global_batch_size: int | None = None,
    sequence_length: int | None = None,
    request: SearchRequest = _PLAIN,
    output: Path | None = None,
    eject: Path | None = None,
    write_to: Path | None = None,
    dry_run: Annotated[bool, FLAG] = False,
    rank: Annotated[tuple[int, ...], FLAG] = (),
    schema: Annotated[bool, FLAG] = False,
) -> None:
    """Choose a plan for a recipe or a well-known model, and say why.

    Parameters
    ----------
    recipe
        TOML file that says what to train.
    model
        A well-known model instead of a recipe, such as llama-3.1-405b.
    plan
        TOML file that says how to split the recipe or the model, to look at, to emit or to eject; `auto` chooses one.
    cluster
        TOML file, or a spec such as 4x8xh100; by default this machine.
    processes
        How many processes; by default one per device that the batch can use.
    global_batch_size
        Samples per step, with --model; by default 1,024 tokens per device and a million at least, on cores what they
        compute in half a minute.
    sequence_length
        Tokens per sample, with --model; by default the model's own.
    output
        File to write the plan to, for `weft train --plan`.
    eject
        Script to write: plain PyTorch that trains the recipe under the plan to the same losses, without Weft.
    write_to
        With --for: folder for the files of that system, and run.sh.
    dry_run
        Let single ranks of the plan build their share and take a step, without devices: bytes, collectives, mistakes.
    rank
        With --dry-run: which ranks; by default one of the first, second and last stage. May be given again.
    schema
        Print the JSON Schema of a plan, and nothing else.
    """
    from weft.config.cluster import resolve_cluster

    if schema:
        _print_schema()
        return
    _refuse(
        bool(rank) and not dry_run, "--rank, which says whom --dry-run lets try, and no --dry-run", "both, or neither"
    )
    _refuse(
        request.json and request.questions.are_asked,
        "--json and a question about the best plan (--why-not, --next, --emit, --plots)",
        "one of them",
    )
    _refuse_for(write_to, request, dry_run, eject)
    if request.top < 1:
        raise PlanError(f"--top {request.top} is too few: no plan would be shown. Use 1 or more.")
    if model is not None:
        _refuse(
            bool(request.of_recipe), "--model and --set of a recipe", "--set plan.…, or a recipe in place of --model"
        )
        _refuse(dry_run, "--model and --dry-run, which needs a recipe,", "a recipe in place of --model")
        _refuse(recipe is not None, "a recipe and --model", "one of them")
        _refuse(
            processes is not None or eject is not None,
            "--model and --processes or --eject, which need a recipe,",
            "a recipe in place of --model",
        )
        machine = resolve_cluster(cluster)
        subject = known_subject(model, machine, global_batch_size, sequence_length)
        _plan_subject(subject, machine, plan, request, output, write_to, name=model)
        return
    if recipe is None:
        example = "weft plan --model llama-3.1-8b --cluster 8xh100"
        raise PlanError(f"weft plan needs a RECIPE, or --model NAME. Try: {example}")
    _refuse(
        global_batch_size is not None or sequence_length is not None,
        "a recipe and --global-batch-size or --sequence-length, which belong to --model,",
        "--set recipe.batch.global_batch_size=…",
    )
    if request.system is not None:
        subject = recipe_subject(recipe, request.of_recipe)
        _plan_subject(subject, resolve_cluster(cluster), plan, request, output, write_to, name=str(recipe))
        return
    _recipe(recipe, plan, processes, cluster, request, output, eject, rank if dry_run else None)


def _print_schema() -> None:
    from json import dumps

    from weft.config.plan import plan_schema

    print(dumps(plan_schema(), indent=2))


def _refuse(wrong: bool, combination: str, instead: str) -> None:
    if wrong:
        raise PlanError(f"weft plan: {combination} cannot go together. Use {instead}.")


def _refuse_for(folder: Path | None, request: SearchRequest, dry_run: bool, eject: Path | None) -> None:
    _refuse(
        folder is not None and request.system is None,
        "--write-to, which writes the files of another system, and no --for",
        "both, or neither",
    )
    is_other = bool(request.questions.are_asked or request.deadline or request.json or dry_run or eject is not None)
    _refuse(
        request.system is not None and is_other,
        "--for and --json, --deadline, --dry-run, --eject or a question about Weft's best plan",
        "one of them",
    )


def _plan_subject(
    subject: Subject,
    cluster: Cluster,
    plan: str,
    request: SearchRequest,
    output: Path | None,
    folder: Path | None,
    *,
    name: str,
) -> SearchResult:
    """Search for a model's best plan, or price the plan that is named, under Weft or another system; print and write
    what comes of it.  `name` of the model or recipe goes into the written file."""
    named_plan = None if plan == "auto" else given_plan(plan, request)
    if request.system is not None:
        result, lines = run_for(request.system, subject, cluster, request, named_plan, folder)
    elif named_plan is not None:
        result, lines = run_given(subject, cluster, request, named_plan)
    else:
        result, lines = run_search(subject, cluster, request)
    print_search(result, lines, request)
    if output is not None:
        write_best(result, output, name)
    return result


def _recipe(
    recipe: Path,
    plan: str,
    processes: int | None,
    cluster: str | None,
    request: SearchRequest,
    output: Path | None,
    eject: Path | None,
    dry_run_ranks: tuple[int, ...] | None,
) -> None:
    """Plan a recipe.  For another cluster than this machine the search chooses the plan.  For this machine it is the
    plan that `weft train` would take, shown with the results of the search."""
    from weft.config.cluster import resolve_cluster
    from weft.techniques.check import runnability
    from weft.techniques.describe import describe_plan

    is_elsewhere = cluster is not None and plan == "auto" and processes is None and eject is None
    # A search needs a free choice: with a plan, a number of processes or a script to eject, the plan is what the flags
    # say.
    subject = None
    if plan == "auto" and processes is None and eject is None:
        subject = recipe_subject(recipe, request.of_recipe)
    elif request.is_special:
        fixed = [name for name, has in (("--plan", plan != "auto"), ("--processes", processes is not None)) if has]
        raise PlanError(
            f"{' and '.join(request.special)} ask what a search finds, and {' and '.join(fixed) or '--eject'} leaves it"
            " nothing to choose. Leave one side out."
        )
    if subject is not None and is_elsewhere:
        result = _plan_subject(subject, resolve_cluster(cluster), plan, request, output, None, name=str(recipe))
        if dry_run_ranks is not None:
            _dry_run_best(result, recipe, request, dry_run_ranks)
        return
    described = None if subject is None else subject.described
    choice = read_choice(
        recipe, plan, request.overrides, processes, cluster, described=described, learned=request.learned
    )
    if not request.json:
        print("\n".join(describe_plan(choice.plan, choice.reasons, choice.facts, choice.cluster)))
        for reason in runnability(choice.plan):
            print(f"note      weft train refuses it: {reason}")
        if choice.note:
            print(f"note      {choice.note}")
    if subject is not None:
        result, lines = run_search(subject, choice.cluster, request)
        print_search(result, lines if request.json else ["", *lines], request)
    _write(choice, recipe, output, eject)
    if dry_run_ranks is not None:
        from weft.cli._dry_run import dry_run

        dry_run(choice.recipe, choice.plan, dry_run_ranks)


def _dry_run_best(result: SearchResult, path: Path, request: SearchRequest, dry_run_ranks: tuple[int, ...]) -> None:
    from weft.cli._dry_run import dry_run
    from weft.config.plan import Plan, apply_overrides
    from weft.config.recipe import load_recipe

    plan = next((candidate.plan for candidate in result.best if candidate.plan is not None), None)
    if plan is None:
        raise PlanError(
            "--dry-run runs ranks of the best plan, and none was found: the lines above say why. Use more devices, or"
            " give fewer settings by --set."
        )
    recipe, _ = apply_overrides(load_recipe(path), Plan(), request.of_recipe)
    dry_run(recipe, plan, dry_run_ranks)


def _write(choice: PlannedRun, recipe: Path, output: Path | None, eject: Path | None) -> None:
    from weft.config.plan import dump_plan

    if output is not None:
        text = dump_plan(choice.plan, choice.reasons, header=[f"chosen by weft plan {recipe}"])
        write_output(output, text, PlanError)
        print(f"\nwritten to {output}", file=sys.stderr)
    if eject is not None:
        from weft.cli._eject import eject_script

        eject_script(choice.recipe, choice.plan, eject)


def validate(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Say where the command went that was here until November 2026."""
    command = shlex.join(["python", "-m", "benchmarks.planner", "validate", *arguments])
    raise PlanError(
        "`weft plan validate` does not come with Weft any more: it measures the planner, not your training."
        f" In a checkout of Weft's repository, run `{command}`."
    )
