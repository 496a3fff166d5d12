"""Chooses which layers are column-parallel and which row-parallel, from what a flow found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.describe._flow import ForwardFlow, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A layer of a group, and where the divided atom lies in its features."""

    layer: Layer
    blocks: int
    """Equal blocks that are fused in front of the divided size, each cut on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A parameter that operators meet as it is, of which each rank has a part along a dim."""

    name: str
    dim: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are divided together: columns first, rows make the sum."""

    atom: int
    size: int
    columns: tuple[GroupMember, ...]
    rows: tuple[GroupMember, ...]
    parts: tuple[ParameterPart, ...] = ()

    @property
    def first(self) -> int:
        return min(member.layer.index for member in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    groups: tuple[LayerGroup, ...]
    left: tuple[tuple[str, str], ...]
    """Layers that stay whole, and why."""


def choose(
    flow: ForwardFlow, blocks: Sequence[str], refused: Iterable[int] = (), ruled: Iterable[str] = ()
) -> SplitChoice:
    """Take groups that lie in one block first, then in order; a layer is in one group only.  `refused` are atoms that
    a rehearsal found wanting, `ruled` layers for which the model has rules already."""
    found, places = _groups(flow, set(refused)), frozenset(blocks)
    chosen: list[LayerGroup] = []
    taken = set(ruled)
    for group in sorted(found, key=lambda group: (not _is_local(group, places), group.first)):
        names = {member.layer.name for member in (*group.columns, *group.rows)}
        names |= {part.name for part in group.parts}
        if names & taken:
            continue
        taken |= names
        chosen.append(group)
    chosen.sort(key=lambda group: group.first)
    left = [(name, _why(flow, layer)) for name, layer in flow.layers.items() if name not in taken]
    return SplitChoice(groups=tuple(chosen), left=tuple(left))


def _groups(flow: ForwardFlow, refused: set[int]) -> list[LayerGroup]:
    atoms = flow.atoms
    columns: dict[int, list[GroupMember]] = {}
    for layer in flow.layers.values():
        for member, atom in _places(flow, layer, (layer.made,)):
            columns.setdefault(atom, []).append(member)
    entering: dict[int, list[GroupMember]] = {}
    for layer in flow.layers.values():
        for member, atom in _places(flow, layer, layer.entering):
            entering.setdefault(atom, []).append(member)
    parts = _parts(flow)
    groups: list[LayerGroup] = []
    for atom, members in columns.items():
        if atoms.reason(atom) is not None or atom in refused or atoms.size(atom) < 2:
            continue
        rows = entering.get(atom, [])
        names = [member.layer.name for member in (*members, *rows)]
        kinds = {member.layer.kind for member in (*members, *rows)}
        if rows and len(names) == len(set(names)) and len(kinds) == 1:
            made = {f"{member.layer.name}.bias" for member in members}
            met = tuple(part for part in parts.get(atom, ()) if part.name not in made)
            size = atoms.size(atom)
            if len(met) == len({part.name for part in met}):
                groups.append(LayerGroup(atom=atom, size=size, columns=tuple(members), rows=tuple(rows), parts=met))
    return groups


def _parts(flow: ForwardFlow) -> dict[int, list[ParameterPart]]:
    """Atom → parameters with that atom in one of their dims."""
    found: dict[int, list[ParameterPart]] = {}
    for name, dims in flow.parameters.items():
        for at, dim in enumerate(dims):
            before = 1
            for leaf in flow.atoms.leaves(dim):
                found.setdefault(leaf, []).append(ParameterPart(name=name, dim=at, blocks=before))
                before *= flow.atoms.size(leaf)
    return found


def _places(flow: ForwardFlow, layer: Layer, dim: Sequence[int]) -> list[tuple[GroupMember, int]]:
    """Each atom of a layer's features, with the blocks in front of it."""
    found: list[tuple[GroupMember, int]] = []
    before = 1
    for leaf in flow.atoms.leaves(dim):
        found.append((GroupMember(layer=layer, blocks=before), leaf))
        before *= flow.atoms.size(leaf)
    return found


def _is_local(group: LayerGroup, blocks: frozenset[str]) -> bool:
    """Whether all its layers lie in one block of the model."""
    found = {_block_of(member.layer.name, blocks) for member in (*group.columns, *group.rows)}
    return len(found) == 1 and None not in found


def _block_of(name: str, blocks: frozenset[str]) -> str | None:
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name or None


def _why(flow: ForwardFlow, layer: Layer) -> str:
    leaves = sorted(flow.atoms.leaves((layer.made,)), key=flow.atoms.size, reverse=True)
    reasons = [flow.atoms.reason(leaf) for leaf in leaves]
    if reasons[0] is not None and None not in reasons:
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    return "no layer takes its result in parts, or that layer is split with others already"
