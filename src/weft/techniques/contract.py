"""The questions that every technique answers, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from weft.config.document import Path, dotted, format_value, sentence
from weft.config.plan import ModelFacts, Plan
from weft.config.recipe import Recipe
from weft.errors import BadSetting, PlanError


class ExtraMemory(NamedTuple):
    """The memory of a technique besides weights, gradients and optimizer states, per parameter of a data rank."""

    gradient_bytes: float = 0.0
    """Bytes that lie as the gradients do: unsharded on every data rank, except under ZeRO-3."""
    master_copies: float = 0.0
    """Copies of a master, which are sharded as optimizer states are."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with the recipe that it is meant for."""

    plan: Plan
    recipe: Recipe
    facts: ModelFacts
    world_size: int | None
    """Number of processes; None: not known."""

    def refuse(self, path: Path, problem: str, *, show: bool = True) -> PlanError:
        """Return the error about one setting of the plan, with where it was given."""
        value: object = self.plan
        for name in path:
            value = getattr(value, str(name))
        setting = BadSetting(path, format_value(value) if show else None, problem)
        origin = self.plan.origins.get(dotted(path))
        return PlanError(sentence("plan", setting, origin), setting=setting)


class Ablation(NamedTuple):
    """A change that takes a technique out of a plan: the same global batch, on as many ranks or fewer."""

    name: str
    """The name inside of a sentence: `the pipeline`."""
    apply: Callable[[Plan], Plan]
    """Function plan → plan without the technique; the plan itself where it is not in use."""
    frees_ranks: bool = False
    """Whether fewer ranks are left.  Such ablations are tried first, because later ones then need fewer processes."""


class Technique:
    """The contract of a technique: generic code asks these questions and knows no technique by name.

    A method yields nothing where the technique is not in use, and a technique overrides only the methods that concern
    it.  `settings` are of the class `part`: a section of a plan, or a flat layout
    (`weft.techniques.cost_terms.Layout`).
    """

    name: ClassVar[str]
    part: ClassVar[type[Any]]
    """The class of its settings, which a section of the plan inherits."""
    ablations: ClassVar[tuple[Ablation, ...]] = ()
    """The changes that take it, or a part of it, out of a plan; `weft check` isolates a failure by them."""
    judged_alone: ClassVar[tuple[str, ...]] = ()
    """Dotted names of the settings that `check_model` judges."""
    saved_as: ClassVar[str] = ""
    """Key of its state in a checkpoint; empty: it has no state."""

    def runs(self, plan: Plan) -> bool:
        """Return whether ranks load the technique's `runtime.py` (`weft.techniques.runtime`)."""
        return False

    def sends(self, plan: Plan) -> bool:
        """Whether `program.py` beside the contract says what ranks send of it: `sends(share: ModelShare)`."""
        return False

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        """Yield why the engine cannot run a plan's settings, with the change to make, as far as no recipe is needed."""
        return iter(())

    def check_model(self, case: Case) -> None:
        """Raise `PlanError` if a setting is wrong for this model in every plan."""

    def check(self, case: Case) -> None:
        """Raise `PlanError` if the settings do not fit the rest of the plan, or the recipe does not permit them."""

    def problems(self, settings: Any, *, on_cores: bool) -> Iterator[str]:
        """Yield why a layout cannot be priced, with the change to make.  `on_cores`: the devices are cores of hosts."""
        return iter(())

    def extra_memory(self, settings: Any) -> ExtraMemory:
        """Return its memory besides weights, gradients and optimizer states."""
        return ExtraMemory()

    def update_seconds(self, settings: Any, state_bytes: float) -> float:
        """Return the seconds that it adds to an optimizer's step over `state_bytes` of masters and states."""
        return 0.0

    def describe(self, settings: Any) -> Iterator[str]:
        """Yield the words by which a line about a layout names it."""
        return iter(())

    def lighter_settings(self, settings: Any) -> Iterator[str]:
        """Yield settings with which a rank needs less memory, as `--why-not` spells them: `zero=3`."""
        return iter(())

    def unsupported_by_others(self, settings: Any) -> Iterator[str]:
        """Yield the settings in use that no other system supports."""
        return iter(())

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        """Yield why an ejected script of plain torch cannot have it, with the change to make."""
        return iter(())

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        """Yield why it cannot run in a user's own loop, with the change to make."""
        return iter(())

    def of_keyword(self, name: str, value: Any) -> Mapping[str, Any]:
        """Return dotted setting → value for a keyword of `weft.session` that is the technique's, the setting of the
        keyword's own value first; empty: it is not."""
        return {}

    def search_values(self, plan: Plan) -> Mapping[str, tuple[Any, ...]]:
        """Return dotted setting → the values that a search may try, where a plan fixes this technique."""
        return {}

    def exact(self, plan: Plan) -> tuple[Plan, str]:
        """Return the nearest plan that computes exactly what one process does, and a note about the change.

        The note is empty where the plan is exact already.
        """
        return plan, ""


def list_choices(values: Iterable[int]) -> str:
    """Return `1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
