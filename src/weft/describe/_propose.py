"""Proposes how a module splits over the tensor axis, from what one forward shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from weft.describe._events import Event, Trace
from weft.describe._flow import ForwardFlow, Layer, follow
from weft.describe._graph import Graph
from weft.describe._groups import GroupMember, LayerGroup, SplitChoice, choose
from weft.describe._proposal import Confidence, Proposal, ProposedRule
from weft.describe._rehearse import Attribute, Rehearsal
from weft.describe._segment import find_blocks
from weft.describe._trace import trace
from weft.models import Blueprint, Localise, SplitRule, token_loss
from weft.recipe import SplitKind
from weft.stand_ins import glob_of, globs_of

_SMALL_TABLE = 0.01
"""Share of the parameters below which splitting a table is not worth a collective."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
UNPROVEN = "not proven: compare gradients with one process before you rely on it (weft check)"


def propose_split(blueprint: Blueprint) -> Proposal:
    """Propose a split table for a model that brings none, from one forward on the meta device.

    Linear layers become column- and row-parallel where everything between them can work on a part; the proposal is
    rehearsed on one rank's share of the weights, shape by shape.  Modules that the blueprint's own rules cover are left
    to those.  What a shape cannot show (a forward that counts by the data's values) only gradients can: so nothing of
    this is to be trusted before it has been compared with one process.

    Raises:
        RecipeError: the forward cannot be described (see `examine`).
    """
    found = trace(blueprint, torch.bfloat16, loss=False)
    return _Proposer(blueprint, found, follow(found, blueprint.module)).proposal()


@dataclass(frozen=True, slots=True)
class _Decision:
    """How one module splits."""

    name: str
    kind: SplitKind
    reason: str
    confidence: Confidence = "high"
    blocks: int = 1


@dataclass(slots=True)
class _Proposer:
    blueprint: Blueprint
    trace: Trace
    flow: ForwardFlow
    graph: Graph = field(init=False)
    blocks: tuple[str, ...] = field(init=False)
    places: dict[int, list[tuple[Event, int]]] = field(init=False)
    refusals: dict[str, str] = field(default_factory=dict[str, str])
    """Layer → why a rehearsal left it whole."""

    def __post_init__(self) -> None:
        self.graph = Graph.of(self.trace)
        self.blocks = find_blocks(self.blueprint, self.trace)
        self.places = self._places()

    def proposal(self) -> Proposal:
        choice, attributes, parts = self._rehearsed()
        groups = [group for group in choice.groups if _kind(group) == "linear"]
        head = self._vocabulary_head(parts)
        tables, left_tables = self._tables(head, parts)
        left = self._left(choice, head) + left_tables
        heads = (
            [] if head is None else [_Decision(head.name, "column", "the vocabulary loss takes its logits in parts")]
        )
        lookups = "each rank looks up the rows that it has, and the results are summed"
        decisions = [_Decision(name, "vocab", lookups) for name in tables]
        decisions += [*self._layers(groups), *heads, *self._marked(groups), *self._positionwise(groups, left)]
        rules = self._rules(decisions)
        return Proposal(
            rules=rules,
            localise=tuple(Localise(match=glob_of(a.module), attribute=a.name) for a in attributes),
            divisible=self._divisible(groups, tables, head),
            vocabulary_head=None if head is None else head.name,
            replicated=tuple(self._summed(left)),
            priced_only=tuple(self._convolutions(choice)),
            notes=(*self.trace.notes, UNPROVEN) if rules else self.trace.notes,
        )

    def _rehearsed(self) -> tuple[SplitChoice, tuple[Attribute, ...], int]:
        """Drop groups until what is left runs on a share of its weights."""
        refused: set[int] = set()
        ruled = [name for name in self.flow.layers if not self._own(name)]
        while True:
            choice = choose(self.flow, self.blocks, refused, ruled)
            linear = [group for group in choice.groups if _kind(group) == "linear" and not self._clash(group, refused)]
            parts = _common_prime(linear)
            odd = [group for group in linear if group.size % parts]
            self._refuse(odd, refused, f"{parts} does not divide its size, as it does those of most others")
            if odd or any(self._clash(group, refused) for group in choice.groups):
                continue
            outcome = Rehearsal(self.blueprint, self.trace, self.flow, linear, parts).run() if linear else None
            if outcome is None or outcome.problem is None:
                return choice, () if outcome is None else outcome.attributes, parts
            reason = (
                f"{outcome.module or 'the forward'} cannot work on a part of it: {outcome.problem}. Let it take sizes"
                " from what its projections return, or from whole-number attributes of the module"
            )
            hit = [group for group in linear if group.atom in outcome.atoms]
            places = {glob_of(m.layer.name) for group in hit for m in group.columns}
            alike = [g for g in linear if any(glob_of(m.layer.name) in places for m in g.columns)]
            self._refuse(alike, refused, reason)

    def _refuse(self, groups: Iterable[LayerGroup], refused: set[int], reason: str) -> None:
        for group in groups:
            refused.add(group.atom)
            for member in (*group.columns, *group.rows):
                self.refusals.setdefault(member.layer.name, reason)

    def _clash(self, group: LayerGroup, refused: set[int]) -> bool:
        """Refuse a group whose activations meet parameters of a module with more inside: no rule could name those."""
        if group.atom in refused:
            return False
        for name in self._met([group]):
            owner = self.blueprint.module.get_submodule(name.rpartition(".")[0])
            if any(True for _ in owner.children()):
                self._refuse([group], refused, f"its parts meet {name}, of a module that holds others")
                return True
        return False

    def _met(self, groups: Sequence[LayerGroup]) -> list[str]:
        """Parameters that every rank has whole and uses on its part."""
        chosen = {group.atom for group in groups}
        found: dict[str, None] = {}
        for name, dim in self.flow.shared:
            if chosen.intersection(self.flow.atoms.leaves(dim)):
                found[name] = None
        return list(found)

    def _own(self, name: str) -> bool:
        """Whether the blueprint's own rules leave a module to the proposal."""
        return self.blueprint.rule_of(name) is None

    def _layers(self, groups: Sequence[LayerGroup]) -> list[_Decision]:
        decisions: list[_Decision] = []
        for group in groups:
            confidence: Confidence = "medium" if self.trace.notes or self._draws(group) else "high"
            columns, rows = _leaves(group.columns), _leaves(group.rows)
            unit = f"{group.size} {self._unit(group)}"
            sides: tuple[tuple[SplitKind, Sequence[GroupMember], str], ...] = (
                ("column", group.columns, f"{rows} can take its result in parts of {unit}"),
                ("row", group.rows, f"its input comes in parts of {unit} from {columns}"),
            )
            for kind, members, reason in sides:
                decisions += [_Decision(m.layer.name, kind, reason, confidence, m.blocks) for m in members]
        return decisions

    def _rules(self, decisions: Iterable[_Decision]) -> tuple[ProposedRule, ...]:
        """One rule for the same place in alike blocks, where its glob matches nothing that is decided otherwise."""
        made = {d.name: d for d in decisions if self._own(d.name)}
        everything = [name for name, _ in self.blueprint.module.named_modules(remove_duplicate=False)]
        rules: dict[str, ProposedRule] = {}
        for decision in made.values():
            glob = next(g for g in globs_of(decision.name) if g in rules or _covers(g, decision, made, everything))
            rule = SplitRule(match=glob, kind=decision.kind, blocks=decision.blocks)
            rules.setdefault(glob, ProposedRule(rule=rule, reason=decision.reason, confidence=decision.confidence))
        return tuple(rules.values())

    def _events_on(self, groups: Sequence[LayerGroup]) -> list[tuple[Event, int]]:
        """Events that work on parts, and the dim of their first result that is divided."""
        found = [pair for group in groups for pair in self.places.get(group.atom, ())]
        return sorted(found, key=lambda pair: (pair[0].index, pair[1]))

    def _places(self) -> dict[int, list[tuple[Event, int]]]:
        """Atom → events whose result it divides, and along which dim."""
        atoms, found = self.flow.atoms, dict[int, list[tuple[Event, int]]]()
        for event in self.trace.events:
            for at, dim in enumerate(self.flow.dims.get(event.outputs[0], ()) if event.outputs else ()):
                for root in set(atoms.leaves(dim)):
                    found.setdefault(root, []).append((event, at))
        return found

    def _unit(self, group: LayerGroup) -> str:
        names = {event.name for event, at in self._events_on([group]) if at != len(event.outputs[0].shape) - 1}
        return "heads" if names & {"attention", "_softmax", "_safe_softmax"} else "features"

    def _draws(self, group: LayerGroup) -> bool:
        """Whether a function draws at random on parts: no plan can key it by sample."""
        for event, _ in self._events_on([group]):
            if event.name == "attention" and event.keywords.get("dropout"):
                return True
            if event.name == "dropout" and not self._is_dropout(event.module):
                return True
        return False

    def _marked(self, groups: Sequence[LayerGroup]) -> list[_Decision]:
        """Dropouts and norms that work on parts."""
        kinds: dict[str, SplitKind] = {}
        for event, at in self._events_on(groups):
            if event.name == "dropout" and self._is_dropout(event.module):
                kinds[event.module] = "features" if at == len(event.outputs[0].shape) - 1 else "heads"
        kinds |= {name.rpartition(".")[0]: "heads" for name in self._met(groups)}
        return [_Decision(name, kind, "it works on each rank's part") for name, kind in kinds.items()]

    def _is_dropout(self, module: str) -> bool:
        return isinstance(self.blueprint.module.get_submodule(module), _DROPOUTS)

    def _positionwise(self, groups: Sequence[LayerGroup], left: Sequence[tuple[str, str]]) -> list[_Decision]:
        """Norms and dropouts between the splits of blocks all of whose layers are split."""
        on_parts = {event.module for event, _ in self._events_on(groups)}
        whole = [name for name, _ in left]
        found: dict[str, None] = {}
        for event in self.trace.events:
            block = next((b for b in self.blocks if event.module.startswith(b + ".")), None)
            is_norm = event.name in _NORMS or type(self.blueprint.module.get_submodule(event.module)).__name__ in _NAMES
            fits = is_norm or (event.name == "dropout" and self._is_dropout(event.module))
            if not fits or block is None or event.module in on_parts or not groups or not event.outputs:
                continue
            is_sequence = (
                len(event.outputs[0].shape) == 3 and event.outputs[0].shape[1] == self.blueprint.sequence_length
            )
            if is_sequence and not any(f"{name}.".startswith(block + ".") for name in whole):
                found[event.module] = None
        return [_Decision(name, "sequence", "it works position by position") for name in found]

    def _vocabulary_head(self, parts: int) -> Layer | None:
        """The linear layer whose result is the logits that the token loss reads."""
        blueprint = self.blueprint
        if blueprint.loss is not token_loss or not blueprint.vocabulary_size or blueprint.vocabulary_head is not None:
            return None
        for layer in self.flow.layers.values():
            module = blueprint.module.get_submodule(layer.name)
            dims = self.flow.dims.get(self.trace.outputs[0]) if self.trace.outputs else None
            is_output = dims is not None and dims[-1] == (layer.made,)
            whole = isinstance(module, nn.Linear) and module.out_features == blueprint.vocabulary_size
            if is_output and whole and self._own(layer.name) and blueprint.vocabulary_size % parts == 0:
                return layer
        return None

    def _tables(self, head: Layer | None, parts: int) -> tuple[list[str], list[tuple[str, str]]]:
        """Embeddings to cut by rows, and those left whole with the reason."""
        total = sum(parameter.numel() for parameter in self.blueprint.module.parameters())
        tables: list[str] = []
        left: list[tuple[str, str]] = []
        for event in self.trace.events:
            module = self.blueprint.module.get_submodule(event.module) if event.module else None
            if event.name not in _LOOKUPS or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            reason = self._table_problem(event, module, head, total, parts)
            if reason is None and event.module not in tables:
                tables.append(event.module)
            elif reason is not None and (event.module, reason) not in left:
                left.append((event.module, reason))
        return tables, left

    def _table_problem(
        self, event: Event, module: nn.Embedding | nn.EmbeddingBag, head: Layer | None, total: int, parts: int
    ) -> str | None:
        if not self._own(event.module):
            return "a rule of the recipe covers it"
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            return f"a {type(module).__name__} sums rows itself, which Weft cannot cut by rows"
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "its options (max_norm, scale_grad_by_freq, sparse) want all rows in one place"
        if event.inputs[1].storage not in self.trace.per_sample:
            return "it is looked up by position, the same rows for every sample"
        if module.weight.numel() < _SMALL_TABLE * total:
            return f"it has less than {_SMALL_TABLE:.0%} of the parameters"
        if module.num_embeddings % parts:
            padded = -(-module.num_embeddings // parts) * parts
            return f"its {module.num_embeddings} rows do not divide by {parts}; {padded} would"
        owners = {name.rpartition(".")[0] for name in self.trace.parameters[self._storage_of(event)]}
        if len(owners) > 1 and (head is None or owners != {event.module, head.name}):
            return f"it shares its weight with {', '.join(sorted(owners - {event.module}))}, which stays whole"
        return None

    def _storage_of(self, event: Event) -> int:
        return next(value.storage for value in event.inputs if value.storage in self.trace.parameters)

    def _divisible(self, groups: Sequence[LayerGroup], tables: Sequence[str], head: Layer | None) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for group in groups:
            unit = self._unit(group)
            name = f"{_leaf(group.rows[0].layer.name)}_{unit}"
            while sizes.get(name, group.size) != group.size:
                name += "_"
            sizes[name] = group.size
        for name in tables:
            module = self.blueprint.module.get_submodule(name)
            assert isinstance(module, nn.Embedding)
            sizes[f"{_leaf(name)}_rows"] = module.num_embeddings
        if head is not None and self.blueprint.vocabulary_size:
            sizes["vocabulary_size"] = self.blueprint.vocabulary_size
        return sizes

    def _left(self, choice: SplitChoice, head: Layer | None) -> list[tuple[str, str]]:
        refused = [(name, reason) for name, reason in self.refusals.items() if name not in _names(choice.groups)]
        known = {name for name, _ in refused}
        rest = [(n, why) for n, why in choice.left if n not in known and (head is None or n != head.name)]
        return refused + rest + list(self.flow.odd.items())

    def _summed(self, left: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """One line for the same place in alike blocks."""
        found: dict[tuple[str, str], None] = {}
        for name, reason in left:
            found[glob_of(name), _without_numbers(reason)] = None
        return list(found)

    def _convolutions(self, choice: SplitChoice) -> list[tuple[str, str]]:
        found: dict[tuple[str, str], None] = {}
        for group in choice.groups:
            if _kind(group) == "convolution":
                columns = " and ".join(m.layer.name for m in group.columns)
                rows = " and ".join(m.layer.name for m in group.rows)
                pair = f"channel_out, with {glob_of(rows)} as channel_in ({group.size} channels)"
                found[glob_of(columns), pair] = None
        return list(found)


_LOOKUPS = ("embedding", "_embedding_bag")
_NORMS = ("native_layer_norm", "rms_norm")
_NAMES = ("LlamaRMSNorm", "RMSNorm", "LayerNorm")


def _covers(glob: str, decision: _Decision, made: Mapping[str, _Decision], everything: Sequence[str]) -> bool:
    """Whether all that a glob matches is decided alike."""
    found = [made.get(name) for name in everything if fnmatchcase(name, glob)]
    return all(d is not None and (d.kind, d.blocks) == (decision.kind, decision.blocks) for d in found)


def _leaves(members: Sequence[GroupMember]) -> str:
    return " and ".join(dict.fromkeys(glob_of(member.layer.name) for member in members))


def _kind(group: LayerGroup) -> str:
    return group.columns[0].layer.kind


def _names(groups: Iterable[LayerGroup]) -> set[str]:
    return {member.layer.name for group in groups for member in (*group.columns, *group.rows)}


def _leaf(name: str) -> str:
    """The last part of a name that is no number."""
    return next((part for part in reversed(name.split(".")) if not part.isdecimal()), f"layer_{name}")


def _without_numbers(text: str) -> str:
    return " ".join(glob_of(word) if "." in word else word for word in text.split(" "))


def _common_prime(groups: Sequence[LayerGroup]) -> int:
    """The prime that divides the sizes of the groups with most parameters."""

    def weight(prime: int) -> int:
        members = [m for g in groups if g.size % prime == 0 for m in (*g.columns, *g.rows)]
        return sum(member.layer.parameters for member in members)

    return max((2, 3, 5, 7, 11, 13), key=lambda prime: (weight(prime), -prime))
