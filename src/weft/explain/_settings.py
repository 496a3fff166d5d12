"""Settings of a plan as a question spells them: `tensor=8`, `mesh.tensor = 8`, `pipeline=4, recompute=full`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from weft.errors import PlanError, did_you_mean
from weft.plan import plan_settings
from weft.price import Layout
from weft.search import Space
from weft.techniques.contract import list_choices
from weft.techniques.settings import Declared, choices_of


@dataclass(frozen=True, slots=True)
class _Knob:
    field: str
    """Field of a `Layout`; `data` stands for replicate × shard."""
    values: str
    """Field of a `Space`: the tuple of what may be chosen."""
    words: tuple[str, ...] = ()
    """The words it takes; empty: a number."""
    numbers: tuple[int, ...] = ()
    """The numbers it takes; empty: any whole one above 0."""
    narrows: tuple[str, ...] = ()
    """Flags of a `Space` that are off where it is fixed."""


@functools.cache
def _knobs() -> tuple[Mapping[str, _Knob], Mapping[str, str]]:
    """Return what may be asked for, by its first name, and its other names."""
    found, others = {"data": _Knob("data", "datas")}, {"dp": "data"}
    for declaration in plan_settings():
        knob = declaration.knob
        if knob.asked:
            first, *more = knob.asked
            found[first] = _Knob(
                declaration.layout, knob.space, _words(declaration), _numbers(declaration), knob.narrows
            )
            others |= dict.fromkeys(more, first)
    return found, others


def _words(declaration: Declared) -> tuple[str, ...]:
    """The words of a setting, those of a layout where it has more; none for numbers."""
    hint = get_type_hints(Layout)[declaration.layout]
    if hint is bool:
        return ("false", "true")
    return tuple(dict.fromkeys(word for word in choices_of(hint) if isinstance(word, str)))


def _numbers(declaration: Declared) -> tuple[int, ...]:
    """The numbers of a setting that has some alone."""
    return tuple(each for each in choices_of(declaration.hint) if isinstance(each, int))


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a question."""

    name: str
    """Name as a plan spells it, without its section."""
    value: Any

    @property
    def text(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.name} = {shown}"

    def of(self, layout: Layout) -> Any:
        """What a layout has."""
        return getattr(layout, _knobs()[0][self.name].field)

    def allowed(self, space: Space) -> bool:
        """Whether a space has this value."""
        values = getattr(space, _knobs()[0][self.name].values)
        return values is None or self.value in values

    def fixed(self, space: Space) -> Space:
        """The space in which only this value may be chosen."""
        changed: dict[str, Any] = {_knobs()[0][self.name].values: (self.value,)}
        return replace(space, **changed, **dict.fromkeys(_knobs()[0][self.name].narrows, False))

    def applied(self, layout: Layout, *, devices: int, global_batch_size: int) -> Layout:
        """A layout with this setting and as little else changed as can be: the data ranks make up for an axis."""
        field = _knobs()[0][self.name].field
        changed = layout if field == "data" else replace(layout, **{field: self.value})
        rest = changed.pipeline * changed.context * changed.tensor
        most = max(1, devices // rest)
        wanted = int(self.value) if field == "data" else min(layout.data * _model_ranks(layout) // rest or 1, most)
        return _spread(changed, wanted, global_batch_size)


def parse_settings(text: str) -> tuple[Setting, ...]:
    """Read `tensor=8` or `pipeline = 4, recompute = full`.

    Raises:
        PlanError: no such setting, or a value that it cannot have.
    """
    found = [_parse(part) for part in text.replace(";", ",").split(",") if part.strip()]
    if not found:
        raise PlanError('the question is empty. Ask for a setting, such as "tensor=8".')
    return tuple(found)


def apply_settings(settings: Sequence[Setting], layout: Layout, *, devices: int, global_batch_size: int) -> Layout:
    """Return a layout with all settings; see `Setting.applied`."""
    for setting in settings:
        layout = setting.applied(layout, devices=devices, global_batch_size=global_batch_size)
    return layout


def _parse(part: str) -> Setting:
    name, sign, value = (word.strip() for word in part.partition("="))
    short = name.rpartition(".")[2]
    knobs, others = _knobs()
    short = others.get(short, short)
    if short not in knobs:
        hint = did_you_mean(short, [*knobs, *others]) or f" Known are {', '.join(knobs)}."
        raise PlanError(f'"{part.strip()}" asks about {name or "nothing"}, which is no setting of a plan.{hint}')
    knob, value = knobs[short], value.strip("\"'").lower()
    if not sign or not value:
        raise PlanError(f'"{part.strip()}" has no value. Write for example "{short}={(knob.words or ("8",))[0]}".')
    if knob.words:
        if value not in knob.words:
            hint = did_you_mean(value, knob.words) or f" Use {', '.join(knob.words)}."
            raise PlanError(f'{short} cannot be "{value}".{hint}')
        return Setting(short, value == "true" if knob.words == ("false", "true") else value)
    digits = value.replace("_", "")
    if knob.numbers and (not digits.isdigit() or int(digits) not in knob.numbers):
        raise PlanError(f'{short} cannot be "{value}". Use {list_choices(knob.numbers)}.')
    if not knob.numbers and (not digits.isdigit() or int(digits) < 1):
        raise PlanError(f'{short} cannot be "{value}". Use a whole number above 0.')
    return Setting(short, int(digits))


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
