"""Finds where a model may be cut into pipeline stages, from one forward on the meta device.

Modules that run once are given to stages in the order in which they run; the blocks among them are where a border may
be.  What crosses a border follows from the trace: every result of an earlier module that a later one reads, directly or
through what the forward computes between modules.  All else outside of modules is computed on every stage that needs
it, as it would be by one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from weft.analysis._segment import find_blocks
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import MATMULS, Graph
from weft.analysis.trace._modes import first_difference, trace_evaluation
from weft.analysis.trace._trace import SAMPLES, trace
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.families import Crossing, FoundCut
from weft.model.meta_forward import copy_on_meta

_INNER = -1
"""Stands for a value inside a module that is none of its results."""
_Source = tuple[str, int]
"""A module, and which of its results."""


class _NoCutError(Exception):
    """Why a model cannot be cut: a sentence without its end."""


def find_cut(blueprint: Blueprint) -> tuple[FoundCut, tuple[float, ...]] | str:
    """Return where a model may be cut, and what its parts cost; or why it cannot be: a sentence without its end.

    Costs are those of [stem, block 0, …, tail] in units of the first block's, products and attention counted.  A copy
    without memory runs, so that what the forward counts or keeps in its modules stays as it is.
    """
    try:
        copied = replace(blueprint, module=copy_on_meta(blueprint.module))
    except Exception as problem:  # what a module holds may refuse to be copied in its own way
        return f"it cannot be copied ({type(problem).__name__}: {problem})"
    try:
        forward = trace(copied, torch.bfloat16, loss=False)
        blocks = find_blocks(copied, forward)
        finder = _followed(copied.module, forward, blocks)
        cut = finder.cut()
        _check_evaluation(copied, forward, cut)
        return cut, finder.costs()
    except _NoCutError as problem:
        return str(problem)
    except RecipeError as problem:
        return f"its forward could not be followed ({str(problem).rstrip('.')})"
    except Exception as problem:  # a forward may do what no rule of the analysis foresaw: no cut, and no failure
        said = next(iter(str(problem).splitlines()), "")
        return f"looking at its forward failed ({type(problem).__name__}: {said})"


def _followed(root: nn.Module, forward: Trace, blocks: tuple[str, ...]) -> _CutFinder:
    finder = _CutFinder(root, forward, blocks)
    finder.follow()
    if finder.anywhere:  # positions, masks: cheaper computed again than sent
        finder = _CutFinder(root, forward, blocks, finder.anywhere)
        finder.follow()
    return finder


def _check_evaluation(copied: Blueprint, training: Trace, cut: FoundCut) -> None:
    """Raise _NoCutError where a forward in evaluation, if it is another one, could not be cut as that in training."""
    evaluation = trace_evaluation(copied, torch.bfloat16)
    where = first_difference(copied.module, training, evaluation)
    if where is None:
        return
    differs = f"{where or type(copied.module).__name__} computes something else in evaluation"
    try:
        other = _followed(copied.module, evaluation, cut.blocks).cut()
    except _NoCutError as problem:
        raise _NoCutError(f"{differs}, where {problem}") from problem
    if other != cut:
        raise _NoCutError(f"{differs}, where other results cross from block to block")


@dataclass(slots=True)
class _CutFinder:
    root: nn.Module
    trace: Trace
    blocks: tuple[str, ...]
    on_all: frozenset[str] = frozenset()
    """Modules that every stage runs."""
    graph: Graph = field(init=False)
    units: tuple[str, ...] = field(init=False)
    """Modules that belong to one stage, in the order in which they run."""
    unused: tuple[str, ...] = field(init=False)
    """Modules with weights that do not run."""
    place: dict[str, int] = field(init=False)
    """Unit → the number of blocks that end before it begins; of the last ones, that of the last block."""
    needed: dict[_Source, int] = field(default_factory=dict[_Source, int])
    """Result → the last place where it is read."""
    _reading: set[str] = field(default_factory=set[str])
    """Units that read a result of another one."""
    _sources: dict[int, frozenset[_Source]] = field(default_factory=dict[int, frozenset[_Source]])
    """Storage → the results that it was computed from outside of units."""
    _held: dict[int, list[_Source]] = field(default_factory=dict[int, list[_Source]])
    """Storage → the results that lie in it."""
    _changed: dict[_Source, str] = field(default_factory=dict[_Source, str])
    """Result → where it is changed in place."""

    def __post_init__(self) -> None:
        self._check_blocks()
        self.graph = Graph.of(self.trace)
        every = _units(self.root, self.trace, self.blocks)
        # Tensors that are read outside their module, and modules that the model has twice, cannot belong to one stage.
        apart = _read_elsewhere(self.root, self.trace, self.graph, self.blocks) | _held_twice(self.root, every)
        mine = [name for name in every if name not in apart | self.on_all]
        self.unused = tuple(name for name in mine if name not in self.trace.num_runs)
        # A unit that runs twice would need its stage twice in one forward.
        once = [name for name in mine if self.trace.num_runs.get(name) == 1]
        self.units = tuple(sorted(once, key=lambda name: (self.trace.exits[name], once.index(name))))
        self.place = self._places()

    def _check_blocks(self) -> None:
        kind = type(self.root).__name__
        if len(self.blocks) < 2:
            raise _NoCutError(f"{kind} has no blocks that follow one another, of which stages could be made")
        for name in self.blocks:
            if self.trace.num_runs.get(name) != 1:
                raise _NoCutError(f"{name} runs {self.trace.num_runs.get(name, 0)} times in one forward")

    def _places(self) -> dict[str, int]:
        numbers = {name: number for number, name in enumerate(self.blocks)}
        missing = [name for name in self.blocks if name not in self.units]
        if missing:
            raise _NoCutError(f"the weights of {missing[0]} are read outside of it")
        places: dict[str, int] = {}
        passed = 0
        for name in self.units:
            if name in numbers:
                passed = numbers[name] + 1
                places[name] = numbers[name]
            else:  # it goes with the block behind it, the last ones with the last block
                places[name] = min(passed, len(self.blocks) - 1)
        return places

    def cut(self) -> FoundCut:
        """Return the cut of the forward that has been followed: its blocks, and the values that cross each border."""
        first, last = self.units.index(self.blocks[0]), self.units.index(self.blocks[-1])
        inside = {name: self.place[name] for name in self.units[first:last] if name not in self.blocks}
        return FoundCut(
            stem=(*self.units[:first], *self.unused),
            blocks=self.blocks,
            between=inside,
            tail=self.units[last + 1 :],
            crossings=tuple(self._crossings(border) for border in range(1, len(self.blocks))),
            written=tuple(sorted({unit for unit, _ in self._changed})),
        )

    def costs(self) -> tuple[float, ...]:
        """Operations of the forward in [stem, each block with what goes with it, tail]."""
        spent = [0.0] * (len(self.blocks) + 2)
        first, last = self.units.index(self.blocks[0]), self.units.index(self.blocks[-1])
        order = {name: number for number, name in enumerate(self.units)}
        for event in self.trace.events:
            unit = self._unit_of(event.module)
            if unit is not None:
                number = order[unit]
                at = 0 if number < first else -1 if number > last else 1 + self.place[unit]
                spent[at] += _operations(event)
        # Relative to the first block: cuts are balanced by shares.
        unit_cost = spent[1] or 1.0
        return tuple(cost / unit_cost for cost in spent)

    # ── what is read where ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def anywhere(self) -> frozenset[str]:
        """Units without weights that compute from the inputs alone."""
        alone = (name for name in self.units if name not in self._reading)
        return frozenset(n for n in alone if not any(True for _ in self.root.get_submodule(n).parameters()))

    def follow(self) -> None:
        """Walk through the forward, and note which results are read where."""
        # Units end in the order of their exits: their results are known from there on.
        ends = sorted(self.units, key=lambda name: self.trace.exits[name])
        done = 0
        for event in self.trace.events:
            while done < len(ends) and self.trace.exits[ends[done]] <= event.index:
                self._leave(ends[done])
                done += 1
            self._step(event)
        for name in ends[done:]:
            self._leave(name)
        for value in self.trace.outputs:
            self._read(value, None, len(self.blocks) - 1)

    def _leave(self, unit: str) -> None:
        """Note a unit's results as known from now on. A value that the unit only passes on keeps its sources, too."""
        for leaf, value in enumerate(self.trace.results[unit]):
            if value is not None:
                # What a unit computed inside is no longer apart from what it returns.
                before = self._sources.get(value.storage, frozenset())
                kept = frozenset(source for source in before if source != (unit, _INNER))
                self._sources[value.storage] = kept | {(unit, leaf)}
                self._held.setdefault(value.storage, []).append((unit, leaf))

    def _step(self, event: Event) -> None:
        unit = self._unit_of(event.module)
        for value in event.inputs:
            if unit is not None:
                self._read(value, unit, self.place[unit])
        # A result that is changed in place behind its unit cannot be sent: the sender would keep the old value.
        if event.mutates and event.inputs:
            for source in self._held.get(event.inputs[0].storage, ()):
                if source[0] != unit:
                    self._changed[source] = event.module or "the forward"
        read = [self._sources.get(value.storage, frozenset[_Source]()) for value in event.inputs]
        # Operators between units run again on every stage that needs them, so their inputs' sources pass through;
        # inside a unit all results are the unit's.
        made = frozenset[_Source]().union(*read) if unit is None else frozenset({(unit, _INNER)})
        inputs = {value.storage for value in event.inputs}
        for value in event.outputs:
            if value.storage not in inputs:
                self._sources[value.storage] = made
            elif event.mutates:
                self._sources[value.storage] = self._sources.get(value.storage, frozenset()) | made

    def _read(self, value: Value, unit: str | None, place: int) -> None:
        for source in self._sources.get(value.storage, ()):
            if source[0] != unit:
                # The last reader decides up to which border a result travels.
                self.needed[source] = max(self.needed.get(source, 0), place)
                if unit is not None:
                    self._reading.add(unit)

    def _crossings(self, border: int) -> tuple[Crossing, ...]:
        """Results of units before block `border` that are read from there on."""
        by_value: dict[Value, Crossing] = {}
        for unit in self.units:
            if self._stands_before(unit, border):
                for source in self._read_behind(unit, border):
                    crossing = self._crossing(source)
                    value = self._result(crossing)
                    first = by_value.get(value)
                    # What a module only passes on is the same tensor, and travels once.
                    by_value[value] = crossing if first is None else replace(first, also=(*first.also, source))
        crossings = tuple(by_value.values())
        # One message per border, of one dtype.
        dtypes = {value.dtype for value in by_value}
        if len(dtypes) > 1:
            raise _NoCutError(
                f"what block {border} and later ones read of earlier ones has several dtypes:"
                f" {', '.join(sorted(map(str, dtypes)))}"
            )
        if not crossings:
            raise _NoCutError(f"nothing that comes before block {border} is read behind it")
        return crossings

    def _stands_before(self, unit: str, border: int) -> bool:
        is_tail = self.units.index(unit) > self.units.index(self.blocks[-1])
        return self.place[unit] < border and not is_tail

    def _read_behind(self, unit: str, border: int) -> Iterator[_Source]:
        if self.needed.get((unit, _INNER), 0) >= border:
            raise _NoCutError(f"something that {unit} computes and does not return is read behind block {border}")
        for leaf, value in enumerate(self.trace.results[unit]):
            if value is not None and self.needed.get((unit, leaf), -1) >= border:
                yield unit, leaf

    def _crossing(self, source: _Source) -> Crossing:
        unit, leaf = source
        if source in self._changed:
            raise _NoCutError(
                f"a result of {unit}, which later blocks read, is changed in place in {self._changed[source]}"
            )
        value = self.trace.results[unit][leaf]
        assert value is not None, "it is a tensor"
        if not value.dtype.is_floating_point:
            raise _NoCutError(f"a result of {unit}, which later blocks read, holds {value.dtype} and no activation")
        # Dim 0 grows with the samples, so that a microbatch of another size has another shape.
        grows = value.storage in self.trace.per_sample and bool(value.shape) and value.shape[0] % SAMPLES == 0
        return Crossing(module=unit, leaf=leaf, shape=value.shape, is_per_sample=grows)

    def _result(self, crossing: Crossing) -> Value:
        value = self.trace.results[crossing.module][crossing.leaf]
        assert value is not None, "it is a tensor"
        return value

    def _unit_of(self, module: str) -> str | None:
        while module and module not in self.place:
            module = module.rpartition(".")[0]
        return module or None


def _units(root: nn.Module, trace: Trace, blocks: Sequence[str]) -> list[str]:
    """The outermost modules that hold no block and run by being called, and those with weights that never run."""
    around = {name[:at] for name in blocks for at, letter in enumerate(name) if letter == "."}
    ran = set(trace.num_runs)
    inside = {name[:at] for name in ran for at, letter in enumerate(name) if letter == "."}
    units: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if path in around:
                visit(path, child)
            elif path in ran or path not in inside:
                units.append(path)
            else:
                visit(path, child)

    visit("", root)
    has_tensors = {name: any(True for _ in _tensors(root.get_submodule(name))) for name in units}
    return [name for name in units if name in ran or has_tensors[name]]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _read_elsewhere(root: nn.Module, trace: Trace, graph: Graph, blocks: Sequence[str]) -> set[str]:
    """Units of which a tensor is read while another module, or none, is running: every stage needs them."""
    units = _units(root, trace, blocks)
    owners: dict[int, list[str]] = {}
    for storage, names in trace.parameters.items():
        owners[storage] = [unit for name in names for unit in units if name.startswith(f"{unit}.")]
    read: set[str] = set()
    for event in trace.events:
        for value in event.inputs:
            holding = owners.get(value.storage, ())
            if holding and not any(f"{event.module}.".startswith(f"{unit}.") for unit in holding):
                read.update(holding)
    return read


def _held_twice(root: nn.Module, names: Iterable[str]) -> set[str]:
    """Names under which the model has one module twice."""
    objects = {name: id(root.get_submodule(name)) for name in names}
    every = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    return {name for name, key in objects.items() if every[key] > 1}


def _operations(event: Event) -> float:
    """Multiplications of an event, twice."""
    output = event.outputs[0].numel if event.outputs else 0
    if event.name in MATMULS:
        return 2.0 * output * event.inputs[1 if event.name in ("addmm", "baddbmm") else 0].shape[-1]
    if event.name == "attention":
        query, key = event.inputs[:2]
        return 4.0 * query.numel * key.shape[-2]
    if event.name == "convolution":
        return 2.0 * output * math.prod(event.inputs[1].shape[1:])
    return 0.0
