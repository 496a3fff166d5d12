"""Settings of a plan as a question spells them: `tensor=8`, `mesh.tensor = 8`, `pipeline=4, recompute=full`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from weft.config.plan import plan_settings
from weft.config.settings import DeclaredSetting, Knob, choices_of
from weft.errors import PlanError, did_you_mean
from weft.planning.search import Space
from weft.techniques.contract import list_choices
from weft.techniques.cost_terms import Layout

_DATA = DeclaredSetting(
    section="mesh", name="data", hint=int, default=1, knob=Knob(space="datas", asked=("data", "dp"), explained=True)
)
"""Replicate × shard, which people ask for as one; a layout has it, a plan computes it."""


@functools.cache
def _asked() -> tuple[Mapping[str, DeclaredSetting], Mapping[str, str]]:
    """Return what may be asked for, by its first name, and its other names."""
    asked, others = dict[str, DeclaredSetting](), dict[str, str]()
    for declaration in (_DATA, *plan_settings()):
        if declaration.knob.asked:
            first, *more = declaration.knob.asked
            asked[first] = declaration
            others |= dict.fromkeys(more, first)
    return asked, others


def _words(declaration: DeclaredSetting) -> tuple[str, ...]:
    """The words of a setting, those of a layout where it has more; none for numbers."""
    hint = get_type_hints(Layout).get(declaration.layout, declaration.hint)
    if hint is bool:
        return ("false", "true")
    return tuple(dict.fromkeys(word for word in choices_of(hint) if isinstance(word, str)))


def _numbers(declaration: DeclaredSetting) -> tuple[int, ...]:
    """The numbers of a setting that has some alone."""
    return tuple(choice for choice in choices_of(declaration.hint) if isinstance(choice, int))


@dataclass(frozen=True, slots=True)
class QuestionSetting:
    """One setting of a question."""

    name: str
    """Name as a plan spells it, without its section."""
    value: Any

    @property
    def _declared(self) -> DeclaredSetting:
        return _asked()[0][self.name]

    @property
    def text(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.name} = {shown}"

    def of(self, layout: Layout) -> Any:
        """Return the value of the setting in a layout."""
        return getattr(layout, self._declared.layout)

    def allowed(self, space: Space) -> bool:
        """Whether a space has this value."""
        values = getattr(space, self._declared.knob.space)
        return values is None or self.value in values

    def fixed(self, space: Space) -> Space:
        """The space in which only this value may be chosen."""
        knob = self._declared.knob
        changed: dict[str, Any] = {knob.space: (self.value,)}
        return replace(space, **changed, **dict.fromkeys(knob.narrows, False))

    def with_ranks(self, space: Space) -> Space:
        """The space without plans in which this value has no effect: they lack the ranks that it is about."""
        if not self._needs_ranks:
            return space
        sizes = _asked()[0][self._declared.knob.axis].knob.space
        return replace(space, **{sizes: tuple(size for size in getattr(space, sizes) if size > 1)})

    def idle_in(self, layout: Layout) -> str:
        """Why it means nothing in a layout; empty: it does."""
        axis = self._declared.knob.axis
        if not self._needs_ranks or getattr(layout, axis) > 1:
            return ""
        return f"{self.text} has no effect with mesh.{axis} = 1. Ask for {axis} ranks, too."

    @property
    def _needs_ranks(self) -> bool:
        return bool(self._declared.knob.axis) and self.value != self._declared.default

    def applied(self, layout: Layout, *, devices: int, global_batch_size: int) -> Layout:
        """A layout with this setting and as little else changed as can be: the data ranks make up for an axis."""
        field = self._declared.layout
        changed = layout if field == "data" else replace(layout, **{field: self.value})
        # The number of devices stays as near as can be: ranks that another axis takes are missing from the data axis.
        rest = changed.pipeline * changed.context * changed.tensor
        most = max(1, devices // rest)
        data = int(self.value) if field == "data" else min(layout.data * _model_ranks(layout) // rest or 1, most)
        return _spread(changed, data, global_batch_size)


def parse_settings(text: str) -> tuple[QuestionSetting, ...]:
    """Read `tensor=8` or `pipeline = 4, recompute = full`.

    Raises:
        PlanError: no such setting, or a value that it cannot have.
    """
    settings = [_parse(part) for part in text.replace(";", ",").split(",") if part.strip()]
    if not settings:
        raise PlanError('the question is empty. Ask for a setting, such as "tensor=8".')
    return tuple(settings)


def apply_settings(
    settings: Sequence[QuestionSetting], layout: Layout, *, devices: int, global_batch_size: int
) -> Layout:
    """Return a layout with all settings; see `QuestionSetting.applied`."""
    for setting in settings:
        layout = setting.applied(layout, devices=devices, global_batch_size=global_batch_size)
    return layout


def _parse(part: str) -> QuestionSetting:
    name, sign, value = (word.strip() for word in part.partition("="))
    short = name.rpartition(".")[2]
    asked, others = _asked()
    short = others.get(short, short)
    if short not in asked:
        hint = did_you_mean(short, [*asked, *others]) or f" Known are {', '.join(asked)}."
        raise PlanError(f'"{part.strip()}" asks about {name or "nothing"}, which is no setting of a plan.{hint}')
    words, numbers, value = _words(asked[short]), _numbers(asked[short]), value.strip("\"'").lower()
    if not sign or not value:
        raise PlanError(f'"{part.strip()}" has no value. Write for example "{short}={(words or ("8",))[0]}".')
    if words:
        if value not in words:
            hint = did_you_mean(value, words) or f" Use {', '.join(words)}."
            raise PlanError(f'{short} cannot be "{value}".{hint}')
        return QuestionSetting(short, value == "true" if words == ("false", "true") else value)
    digits = value.replace("_", "")
    if numbers and (not digits.isdigit() or int(digits) not in numbers):
        raise PlanError(f'{short} cannot be "{value}". Use {list_choices(numbers)}.')
    if not numbers and (not digits.isdigit() or int(digits) < 1):
        raise PlanError(f'{short} cannot be "{value}". Use a whole number above 0.')
    return QuestionSetting(short, int(digits))


def _model_ranks(layout: Layout) -> int:
    return layout.pipeline * layout.context * layout.tensor


def _spread(layout: Layout, data: int, global_batch_size: int) -> Layout:
    """The layout over `data` data ranks: ZeRO-3 keeps its shards as far as they divide, the batch stays."""
    data = max(1, min(data, global_batch_size // layout.microbatch_size or 1))
    shard = (layout.shard if data % layout.shard == 0 else data) if layout.shards_weights else 1
    microbatches = -(-global_batch_size // (layout.microbatch_size * data))
    if layout.pipeline == 1:
        layout = layout.unpipelined()
    if not layout.shards_weights or layout.splits_backward:
        layout = replace(layout, reduce_every="auto")
    if layout.cuts is not None and len(layout.cuts) != layout.num_stages - 1:
        layout = replace(layout, cuts=None)
    return replace(
        layout,
        shard=shard,
        replicate=data // shard,
        microbatches=microbatches,
        uneven=global_batch_size // layout.microbatch_size % data > 0,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
    )
