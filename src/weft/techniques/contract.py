"""What every technique answers, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from weft.config.document import Path, dotted, format_value, sentence
from weft.config.plan import ModelFacts, Plan
from weft.config.recipe import Recipe
from weft.errors import BadSetting, PlanError


class ExtraMemory(NamedTuple):
    """What a technique keeps besides, per parameter that a data rank would hold without ZeRO."""

    gradient_bytes: float = 0.0
    """Whole on every data rank, unless the weights are shared out."""
    master_copies: float = 0.0
    """Memory in units of a master; shared out as optimizer states are."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with the recipe that it is meant for."""

    plan: Plan
    recipe: Recipe
    facts: ModelFacts
    world_size: int | None
    """Processes; None where nobody knows."""

    def refuse(self, path: Path, problem: str, *, show: bool = True) -> PlanError:
        """Return the error about one setting of the plan, with where it was given."""
        value: object = self.plan
        for name in path:
            value = getattr(value, str(name))
        setting = BadSetting(path, format_value(value) if show else None, problem)
        origin = self.plan.origins.get(dotted(path))
        return PlanError(sentence("plan", setting, origin), setting=setting)


class Ablation(NamedTuple):
    """A plan without a technique: the same global batch, on as many ranks or fewer."""

    name: str
    """Name as a sentence has it: `the pipeline`."""
    apply: Callable[[Plan], Plan]
    """Returns the plan itself where it is not in use."""
    frees_ranks: bool = False
    """Whether fewer ranks are left, so that it is tried first: what comes after runs on fewer processes."""


class Technique:
    """What a technique knows of itself, for those who know none of them.

    A method says nothing where the technique is not in use; what a technique has nothing to say about, it leaves out.
    `settings` are of the class `part`: a section of a plan, or a flat layout (`weft.techniques.cost_terms.Layout`).
    """

    name: ClassVar[str]
    part: ClassVar[type[Any]]
    """Its settings, which a section of the plan inherits."""
    ablations: ClassVar[tuple[Ablation, ...]] = ()
    """The forms without it, or without a part of it, which a check compares with."""
    judged_alone: ClassVar[tuple[str, ...]] = ()
    """Dotted settings that `check_model` judges."""
    saved_as: ClassVar[str] = ""
    """Key of its state in a checkpoint, which a checkpoint of any plan may have; empty: it has none."""

    def runs(self, plan: Plan) -> bool:
        """Whether ranks load `runtime.py` beside the contract, which does it (`weft.techniques.runtime`)."""
        return False

    def sends(self, plan: Plan) -> bool:
        """Whether `program.py` beside the contract says what ranks send of it: `sends(share: ModelShare)`."""
        return False

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        """Yield why the engine cannot run it as a plan has it, with the change to make: what needs no recipe."""
        return iter(())

    def check_model(self, case: Case) -> None:
        """Raise `PlanError` where a setting can stand in no plan for this model, whatever else is chosen."""

    def check(self, case: Case) -> None:
        """Raise `PlanError` where it does not fit the rest of the plan, or the recipe does not permit it."""

    def problems(self, settings: Any, *, on_cores: bool) -> Iterator[str]:
        """Yield why a layout cannot be priced, with the change to make.  `on_cores`: the devices are cores of hosts."""
        return iter(())

    def extra_memory(self, settings: Any) -> ExtraMemory:
        """Return what it keeps besides weights, gradients and optimizer states."""
        return ExtraMemory()

    def update_seconds(self, settings: Any, state_bytes: float) -> float:
        """Return the seconds that it adds to an optimizer's step over so many bytes of masters and states."""
        return 0.0

    def describe(self, settings: Any) -> Iterator[str]:
        """Yield how a line about a layout names it."""
        return iter(())

    def lighter_settings(self, settings: Any) -> Iterator[str]:
        """Yield settings under which a rank would hold less, as a question spells them: `zero=3`."""
        return iter(())

    def unsupported_by_others(self, settings: Any) -> Iterator[str]:
        """Yield what no other system can be told."""
        return iter(())

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        """Yield why no script of plain torch has it, with the change to make."""
        return iter(())

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        """Yield why it cannot run in a loop that is not Weft's, with the change to make."""
        return iter(())

    def of_keyword(self, name: str, value: Any) -> Mapping[str, Any]:
        """Return dotted setting → value for a keyword of `weft.session` that is the technique's, the setting of the
        keyword's own value first; empty: it is not."""
        return {}

    def search_values(self, plan: Plan) -> Mapping[str, tuple[Any, ...]]:
        """Return dotted setting → the values that it leaves to a search, where a plan was given this technique."""
        return {}

    def exact(self, plan: Plan) -> tuple[Plan, str]:
        """Return a plan that computes exactly what one process does, as near to this one as can be, and what was left
        out; empty words where it changes nothing."""
        return plan, ""


def list_choices(values: Iterable[int]) -> str:
    """Return `1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
