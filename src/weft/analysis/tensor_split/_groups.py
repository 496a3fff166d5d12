"""Chooses which layers are column-parallel and which row-parallel, from what a flow found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.analysis.tensor_split._channels import LinearLayer
from weft.analysis.tensor_split._flow import ForwardFlow

_STATES = 64
"""Choices that are followed side by side; chains of layers need two."""


Sides = tuple[frozenset[str], frozenset[str]]
"""Names of layers that are columns, and of those that are rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A layer of a group, and where the divided atom lies in its features."""

    layer: LinearLayer
    blocks: int
    """Equal blocks that are fused in front of the divided size, each cut on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A parameter that operators meet as it is, of which each rank has a part along a dim."""

    name: str
    dim: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelModule:
    """A module that works channel by channel, of whose channels each rank has a part."""

    name: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are divided together: columns first, rows make the sum."""

    atom: int
    size: int
    columns: tuple[GroupMember, ...]
    rows: tuple[GroupMember, ...]
    parts: tuple[ParameterPart, ...] = ()
    channelwise: tuple[ChannelModule, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All whose parameters it divides, which no other group may divide."""
        layers = (member.layer.name for member in (*self.columns, *self.rows))
        return frozenset((*layers, *(part.name for part in self.parts), *(each.name for each in self.channelwise)))

    @property
    def parameters(self) -> int:
        """Elements of its layers."""
        return sum(member.layer.parameters for member in (*self.columns, *self.rows))

    @property
    def first(self) -> int:
        return min(member.layer.index for member in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    groups: tuple[LayerGroup, ...]
    left: tuple[tuple[str, str], ...]
    """Layers that stay whole, and why."""


def choose(
    flow: ForwardFlow,
    blocks: Sequence[str],
    refused: Iterable[int] = (),
    ruled: Iterable[str] = (),
    only: Sides | None = None,
) -> SplitChoice:
    """Take groups that lie in one block first, then those that split most parameters; a layer is in one group only.
    `refused` are atoms that failed on a trial, `ruled` layers for which the model has rules already; `only`
    names those that may be columns, and rows."""
    groups, places = [g for g in _groups(flow, set(refused)) if only is None or _fits(g, only)], frozenset(blocks)
    groups.sort(key=lambda group: group.first)
    taken = frozenset(ruled)
    chosen: list[LayerGroup] = []
    # Groups inside one block come first: sums within a block are the usual tensor parallelism, and a group across
    # blocks would take their layers.
    for is_local in (True, False):
        open_ones = [g for g in groups if _is_local(g, places) == is_local and not g.names & taken]
        chosen += _heaviest(open_ones)
        taken = taken.union(*(group.names for group in chosen))
    chosen.sort(key=lambda group: group.first)
    left = [(name, _why(flow, layer)) for name, layer in flow.layers.items() if name not in taken]
    return SplitChoice(groups=tuple(chosen), left=tuple(left))


def _fits(group: LayerGroup, only: Sides) -> bool:
    columns, rows = (frozenset(member.layer.name for member in side) for side in (group.columns, group.rows))
    return columns <= only[0] and rows <= only[1]


def _heaviest(groups: Sequence[LayerGroup]) -> list[LayerGroup]:
    """The groups without a layer in common that split most parameters, of equals the fewest, of those the first.

    Goes through them in order and keeps the best choice for every set of layers that is taken and met again later.
    """
    # Only layers that a later group also wants decide what can still be chosen, so states with the same such layers are
    # one: the better of them is kept.
    met_later = [frozenset[str]().union(*(group.names for group in groups[at + 1 :])) for at in range(len(groups))]
    states: dict[frozenset[str], tuple[int, ...]] = {frozenset(): ()}

    def worth(choice: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        return sum(groups[at].parameters for at in choice), -len(choice), tuple(-at for at in choice)

    for at, group in enumerate(groups):
        options = [*states.items()]
        options += [(taken | group.names, (*choice, at)) for taken, choice in states.items() if not taken & group.names]
        states = {}
        # Best first, so that `setdefault` keeps the best of equal states, and the limit drops the worst.
        for taken, choice in sorted(options, key=lambda option: worth(option[1]), reverse=True):
            if len(states) < _STATES:
                states.setdefault(taken & met_later[at], choice)
    return [groups[at] for at in max(states.values(), key=worth)]


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
    parts, channelwise = _parts(flow), _channelwise(flow)
    groups: list[LayerGroup] = []
    for atom, members in columns.items():
        # A group needs an atom that may be divided, columns that make it and rows that end it.
        if atoms.reason(atom) is not None or atom in refused or atoms.size(atom) < 2:
            continue
        rows = entering.get(atom, [])
        names = [member.layer.name for member in (*members, *rows)]
        # A layer that is column and row of the same atom would need its input and its output in parts.
        if not rows or len(names) != len(set(names)):
            continue
        local = channelwise.get(atom, {})
        biases = {f"{member.layer.name}.bias" for member in members}
        met = [p for p in parts.get(atom, ()) if p.name not in biases and p.name.rpartition(".")[0] not in local]
        if len(met) == len({part.name for part in met}):
            groups.append(
                LayerGroup(
                    atom=atom,
                    size=atoms.size(atom),
                    columns=tuple(members),
                    rows=tuple(rows),
                    parts=tuple(met),
                    channelwise=tuple(ChannelModule(name=name, blocks=blocks) for name, blocks in local.items()),
                )
            )
    return groups


def _channelwise(flow: ForwardFlow) -> Mapping[int, Mapping[str, int]]:
    """Atom → modules that work channel by channel on it, and the blocks in front of it."""
    channels: dict[int, dict[str, int]] = {}
    for name, dim in flow.channelwise.items():
        for leaf, before in _leaves(flow, dim):
            channels.setdefault(leaf, {})[name] = before
    return channels


def _parts(flow: ForwardFlow) -> dict[int, list[ParameterPart]]:
    """Atom → parameters with that atom in one of their dims."""
    parts: dict[int, list[ParameterPart]] = {}
    for name, dims in flow.parameters.items():
        for at, dim in enumerate(dims):
            for leaf, before in _leaves(flow, dim):
                parts.setdefault(leaf, []).append(ParameterPart(name=name, dim=at, blocks=before))
    return parts


def _leaves(flow: ForwardFlow, dim: Sequence[int]) -> list[tuple[int, int]]:
    """Each atom of a dim, with the blocks in front of it."""
    leaves: list[tuple[int, int]] = []
    before = 1
    for leaf in flow.atoms.leaves(dim):
        leaves.append((leaf, before))
        before *= flow.atoms.size(leaf)
    return leaves


def _places(flow: ForwardFlow, layer: LinearLayer, dim: Sequence[int]) -> list[tuple[GroupMember, int]]:
    """Each atom of a layer's features, with the blocks in front of it."""
    return [(GroupMember(layer=layer, blocks=before), leaf) for leaf, before in _leaves(flow, dim)]


def _is_local(group: LayerGroup, blocks: frozenset[str]) -> bool:
    """Whether all its layers lie in one block of the model."""
    blocks_of_members = {_block_of(member.layer.name, blocks) for member in (*group.columns, *group.rows)}
    return len(blocks_of_members) == 1 and None not in blocks_of_members


def _block_of(name: str, blocks: frozenset[str]) -> str | None:
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name or None


def _why(flow: ForwardFlow, layer: LinearLayer) -> str:
    leaves = sorted(flow.atoms.leaves((layer.made,)), key=flow.atoms.size, reverse=True)
    reasons = [flow.atoms.reason(leaf) for leaf in leaves]
    if reasons[0] is not None and None not in reasons:
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    return "no layer takes its result in parts, or that layer is split with others already"


def common_prime(groups: Sequence[LayerGroup]) -> int:
    """Return the prime that divides the sizes of the groups with most parameters."""

    def weight(prime: int) -> int:
        members = [m for g in groups if g.size % prime == 0 for m in (*g.columns, *g.rows)]
        return sum(member.layer.parameters for member in members)

    return max((2, 3, 5, 7, 11, 13), key=lambda prime: (weight(prime), -prime))
