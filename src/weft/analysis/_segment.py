"""Assign each operator to a part of the model: stem, one of the blocks, or tail."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from weft.analysis.trace._events import Event, Trace
from weft.model.blueprint import Blueprint

STEM = -1


@dataclass(frozen=True, slots=True)
class Segments:
    """Parts by number: −1 is the stem, 0 and up the blocks, `len(blocks)` the tail."""

    blocks: tuple[str, ...]
    of_event: tuple[int, ...]

    @property
    def tail(self) -> int:
        return len(self.blocks)

    def prefix(self, part: int) -> str:
        """Return the prefix of module names inside a block."""
        return self.blocks[part] + "." if 0 <= part < self.tail else ""

    def of_name(self, name: str) -> int:
        """The block that holds a parameter or module; the tail for any other."""
        return next((i for i, block in enumerate(self.blocks) if f"{name}.".startswith(block + ".")), self.tail)


def find_blocks(blueprint: Blueprint, trace: Trace) -> tuple[str, ...]:
    """The blocks of the cut table; else the children of the containers that repeat one class, in order of execution.

    Where no container does (stages of a network of several kinds in turn), those of containers of mixed classes.
    """
    if blueprint.cut is not None:
        return tuple(blueprint.cut.blocks)
    blocks: tuple[str, ...] = ()
    for mixed in (False, True):
        names = [name for c in _containers(blueprint.module, mixed=mixed) for name in c if name in trace.entries]
        blocks = tuple(sorted(names, key=lambda name: trace.entries[name][0]))
        if len(blocks) > 1:
            return blocks
    return blocks


def _containers(root: nn.Module, *, mixed: bool) -> list[list[str]]:
    """Outermost lists and sequences of two or more children with parameters, of one class unless `mixed`."""
    containers: list[list[str]] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        kinds = {type(child) for _, child in children}
        has_weights = any(True for _ in module.parameters())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        composed = any(True for _, child in children for _ in child.children())
        if listed and len(children) > 1 and (mixed or len(kinds) == 1) and has_weights and composed:
            containers.append([f"{name}.{key}" if name else key for key, _ in children])
            return
        for key, child in children:
            visit(f"{name}.{key}" if name else key, child)

    visit("", root)
    return containers


def segment(blueprint: Blueprint, trace: Trace) -> Segments:
    blocks = find_blocks(blueprint, trace)
    numbers = {name: number for number, name in enumerate(blocks)}
    ends = [trace.exits[name] for name in blocks if name in trace.exits]
    last = max(ends, default=0)
    parts: list[int] = []
    current = STEM
    for event in trace.events:
        inside = _block_of(event, numbers)
        if inside is not None:
            current = inside
        elif blocks and event.index >= last:
            current = len(blocks)
        elif not blocks:
            current = len(blocks) if event.index >= trace.loss_event else STEM
        parts.append(current)
    return Segments(blocks, tuple(parts))


def _block_of(event: Event, numbers: dict[str, int]) -> int | None:
    name = event.module
    while name:
        if name in numbers:
            return numbers[name]
        name = name.rpartition(".")[0]
    return None
