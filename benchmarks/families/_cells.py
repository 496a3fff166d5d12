"""One family under every plan, in this process: `weft check`, and five training steps beside those of one process."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import transformers

import weft
from benchmarks.families._draw import Drawn
from weft.analysis.blueprint import build_blueprint
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import WeftError
from weft.run.launch.launcher import ForkServer, RankError

STEPS = 5
PROPOSED = "tensor 2, proposed"
EXPERTS = "expert 2"
"""A plan for mixtures: other models have nothing to share out."""
PLANS: Mapping[str, Plan] = {
    "data 2, ZeRO-1": Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=2, per_step=2)),
    "data 2, ZeRO-3": Plan(
        mesh=MeshPlan(shard=2),
        microbatch=MicrobatchPlan(size=2, per_step=2),
        data_parallel=DataParallelPlan(zero=3),
    ),
    "tensor 2": Plan(mesh=MeshPlan(tensor=2), microbatch=MicrobatchPlan(size=4, per_step=2)),
    "pipeline 2": Plan(mesh=MeshPlan(pipeline=2), microbatch=MicrobatchPlan(size=2, per_step=4)),
    PROPOSED: Plan(mesh=MeshPlan(tensor=2), microbatch=MicrobatchPlan(size=4, per_step=2)),
    "context 2": Plan(mesh=MeshPlan(context=2), microbatch=MicrobatchPlan(size=4, per_step=2)),
    EXPERTS: Plan(mesh=MeshPlan(shard=2, expert=2), microbatch=MicrobatchPlan(size=2, per_step=2)),
    "tensor 4, 2-D": Plan(
        mesh=MeshPlan(tensor=4),
        microbatch=MicrobatchPlan(size=4, per_step=2),
        tensor_parallel=TensorParallelPlan(scheme="2d"),
    ),
    "data 2 × tensor 2": Plan(mesh=MeshPlan(replicate=2, tensor=2), microbatch=MicrobatchPlan(size=2, per_step=2)),
    "pipeline 2 × tensor 2": Plan(mesh=MeshPlan(pipeline=2, tensor=2), microbatch=MicrobatchPlan(size=2, per_step=4)),
}
_TOLERANCE = 1e-4
"""Of a loss within five steps, relative."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of a family under a plan."""

    outcome: str
    """`equal`, `refused`, `differs`, `traceback` or `hang`."""
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ways:
    """How a family's model gets into a recipe."""

    recipe: Recipe
    proposing: Recipe
    """By factory, and with a proposed split table."""
    way: str
    """`folder` or `factory`."""
    why_no_folder: str
    sees_whole_batch: bool
    """Whether it has batch norm, or a loss over pairs: such models take no microbatches."""

    def plan(self, name: str) -> Plan:
        """A plan that the model may take."""
        plan = PLANS[name]
        if not self.sees_whole_batch:
            return plan
        return replace(plan, microbatch=MicrobatchPlan(size=8 // plan.mesh.data))


def ways_of(drawn: Drawn, folder: Path) -> Ways:
    """By folder where `model.hf` takes it, else by a factory.  Whatever stops the folder otherwise is raised."""
    proposing = _recipe(replace(_factory(drawn, folder), propose_split=True))
    recipe, way, why = _recipe(_factory(drawn, folder)), "factory", ""
    if drawn.kind != "own":
        path = folder / drawn.name
        by_folder = _recipe(ModelRecipe(hf=str(path), sequence_length=16))
        try:
            build_blueprint(by_folder)
        except WeftError as refusal:
            why = _sentence(refusal, path)
        except Exception as problem:
            why = f"traceback: {_last_line(problem)}"
        else:
            recipe, way = by_folder, "folder"
    blueprint = build_blueprint(recipe)
    return Ways(recipe, proposing, way, why, blueprint.has_batch_norm or not blueprint.per_sample_loss)


def _factory(drawn: Drawn, folder: Path) -> ModelRecipe:
    if drawn.kind == "own":
        return ModelRecipe(factory="benchmarks.families.factory:own", arguments={"name": drawn.name})
    arguments = {"folder": str(folder / drawn.name), "auto": drawn.auto}
    return ModelRecipe(factory="benchmarks.families.factory:build", arguments=arguments)


def _recipe(model: ModelRecipe) -> Recipe:
    return Recipe(
        model=model,
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=8),
        optimizer=OptimizerRecipe(learning_rate=1e-3),
        run=RunRecipe(steps=STEPS),
    )


class Family:
    """A family whose cells are run one after another."""

    def __init__(self, drawn: Drawn, folder: Path, server: ForkServer) -> None:
        self._ways = ways_of(drawn, folder)
        self._folder = folder / drawn.name
        self._server = server
        self._losses: dict[tuple[bool | None, str], tuple[float, ...] | WeftError] = {}
        """Of one process, by whether a split is proposed (then the model is a factory's), and precision."""

    @property
    def facts(self) -> dict[str, str]:
        """How the model gets in."""
        return {"way": self._ways.way, "why no folder": self._ways.why_no_folder}

    def cell(self, name: str) -> Cell:
        """Check and train under a plan.  No exception is a result, so one is a traceback."""
        began = time.monotonic()
        recipe = self._ways.proposing if name == PROPOSED else self._ways.recipe
        try:
            outcome, why = self._checked(recipe, self._ways.plan(name))
            if outcome == "equal":
                outcome, why = self._trained(recipe, self._ways.plan(name))
        except RankError as error:
            outcome, why = "traceback", _last_of(str(error))
        except WeftError as error:
            outcome = "traceback" if "was not foreseen" in str(error) else "refused"
            why = _sentence(error, self._folder)
        except Exception as error:
            outcome, why = "traceback", _last_line(error)
        return Cell(outcome, why, round(time.monotonic() - began, 1))

    def _checked(self, recipe: Recipe, plan: Plan) -> tuple[str, str]:
        report = weft.check(recipe, plan, fork_server=self._server, explain=False)
        if report.failure is None:
            return "equal", ""
        if report.failure.mismatch is None:
            return "traceback", _last_of(report.failure.cause)
        return "differs", " ".join(line.strip() for line in report.result_lines()[:1])

    def _trained(self, recipe: Recipe, plan: Plan) -> tuple[str, str]:
        """Whether five steps have the losses of one process: in fp32, or where rounding grows too fast, in fp64."""
        off = self._off(recipe, plan)
        if off < _TOLERANCE:
            return "equal", ""
        wide = replace(plan, compute=replace(plan.compute, precision="fp64"))
        wide_off = self._off(replace(recipe, permit=PermitRecipe(precision=("fp64",))), wide)
        if wide_off < _TOLERANCE:
            return (
                "equal",
                f"its training losses are compared in fp64: in fp32 rounding grows to {off:.0e} in {STEPS} steps",
            )
        return "differs", f"a loss within {STEPS} training steps is off by {off:.1e}, in fp64 by {wide_off:.1e}"

    def _off(self, recipe: Recipe, plan: Plan) -> float:
        """Largest relative difference of a loss from that of one process."""
        alone, losses = self._alone(recipe, plan), self._train(recipe, plan)
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, alone, strict=True))

    def _alone(self, recipe: Recipe, plan: Plan) -> tuple[float, ...]:
        """Losses of one process, which trains once; what it raised is raised again."""
        key = (recipe.model.propose_split, plan.compute.precision)
        if key not in self._losses:
            try:
                self._losses[key] = self._train(recipe, _alone(plan))
            except WeftError as error:
                self._losses[key] = error
        known = self._losses[key]
        if isinstance(known, WeftError):
            raise known
        return known

    def _train(self, recipe: Recipe, plan: Plan) -> tuple[float, ...]:
        with tempfile.TemporaryDirectory(prefix="families-") as folder:
            result = weft.train(recipe, plan, folder=f"{folder}/run", quiet=True, fork_server=self._server)
        return tuple(result.losses)


def _alone(plan: Plan) -> Plan:
    return Plan(microbatch=MicrobatchPlan(size=8), compute=plan.compute)


def _sentence(error: Exception, folder: Path) -> str:
    """A refusal without the paths of this machine."""
    text = " ".join(str(error).split()).replace(str(folder), folder.name).replace(str(folder.parent), "…")
    return _without_paths(text)[:400]


def _last_line(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in where if "/weft/" in frame.filename] or list(where)
    frame = ours[-1]
    place = f"{frame.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{frame.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({place})"


def _last_of(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _without_paths(lines[0])[:300] if lines else ""


def _without_paths(text: str) -> str:
    """Files as they are named from where they are imported, and no machine's name."""
    text = re.sub(r" on host [\w.-]+", "", text)
    return re.sub(r"/[^\s:,\"']*/(src|site-packages|python3\.\d+)/", "", text)


def main() -> None:
    """Run the cells named by the arguments, and write a line of JSON for each: what a family's process does."""
    drawn = Drawn(**json.loads(sys.argv[1]))
    folder, names = Path(sys.argv[2]), sys.argv[3:]
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with ForkServer(preload=("weft.api",), threads_per_rank=1) as server:
        family = Family(drawn, folder, server)
        print(json.dumps({"facts": family.facts}), flush=True)
        for name in names:
            cell = family.cell(name)
            said = {"plan": name, "outcome": cell.outcome, "why": cell.why, "seconds": cell.seconds}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
