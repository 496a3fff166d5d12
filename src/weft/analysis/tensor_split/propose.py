"""Proposes how a module splits over the tensor axis, from what one forward shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn

from weft.analysis._segment import find_blocks
from weft.analysis.tensor_split._dropped import has_parts_in_front, is_dropout, kind_on, why_dropped_otherwise
from weft.analysis.tensor_split._flow import ForwardFlow, follow
from weft.analysis.tensor_split._groups import GroupMember, LayerGroup, Sides, SplitChoice, choose, common_prime
from weft.analysis.tensor_split._split_trial import DTYPE, CountAttribute, SplitTrial, cut_dim
from weft.analysis.tensor_split._vocabulary import VocabularyAnalysis, VocabularySplit
from weft.analysis.tensor_split.proposal import Confidence, Proposal, ProposedRule
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import Graph
from weft.analysis.trace._modes import trace_both
from weft.analysis.trace._trace import Mode
from weft.config.recipe import SplitKind
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.families import Localise, SplitRule
from weft.model.meta_forward import copy_on_meta, glob_of, globs_of

UNPROVEN = "not proven: compare gradients with one process before you rely on it (weft check)"


def propose_split(blueprint: Blueprint, only: Sides | None = None) -> Proposal:
    """Propose a split table for a model that brings none, from its forward in training on the meta device, and the one
    in evaluation where that computes something else.

    Linear layers become column- and row-parallel where everything between them can work on a part; the proposal is
    tried on one rank's share of the weights, shape by shape.  Modules that the blueprint's own rules cover are left
    to those.  What a shape cannot show (a forward that counts by the data's values) only gradients can: so nothing of
    this is to be trusted before it has been compared with one process.  `only`: names of the layers that may be split,
    as columns (by what they make) and as rows; None: any.

    A copy without memory runs, so that what the forward counts or keeps in its modules stays as it is.

    Raises:
        RecipeError: the forward cannot be described (see `examine`), or the model not be copied.
    """
    try:
        blueprint = replace(blueprint, module=copy_on_meta(blueprint.module))
    except Exception as problem:  # what a module holds may refuse to be copied in its own way
        said = next(iter(str(problem).splitlines()), "")
        raise RecipeError(f"it cannot be copied ({type(problem).__name__}: {said.rstrip('.')})") from problem
    if not blueprint.module.training:
        blueprint.module.train()
    forward, modes = trace_both(blueprint, DTYPE)
    flow = follow(forward, blueprint.module)
    gathering = gatherable(forward, flow, blueprint)
    if gathering:
        flow = follow(forward, blueprint.module, gathering)
    return _Proposer(blueprint, forward, flow, gathering, modes, only).proposal()


@dataclass(frozen=True, slots=True)
class _Decision:
    """How one module splits."""

    name: str
    kind: SplitKind
    reason: str
    confidence: Confidence = "high"
    blocks: int = 1
    dim: int = 0
    gather_output: bool = False

    @property
    def how(self) -> tuple[object, ...]:
        """The rule's settings, without the name."""
        return self.kind, self.blocks, self.dim, self.gather_output


@dataclass(slots=True)
class _Proposer:
    blueprint: Blueprint
    trace: Trace
    flow: ForwardFlow
    gathering: Mapping[str, Value]
    """Modules that may be given all of a divided dim."""
    modes: Sequence[Mode]
    """How the forward runs in the trace."""
    only: Sides | None
    """Layers that may be columns, and rows."""
    graph: Graph = field(init=False)
    blocks: tuple[str, ...] = field(init=False)
    places: dict[int, list[tuple[Event, int]]] = field(init=False)
    useless: set[tuple[str | None, CountAttribute, tuple[CountAttribute, ...]]] = field(default_factory=lambda: set())
    refusals: dict[str, str] = field(default_factory=dict[str, str])
    """Layer → why a trial left it whole."""

    def __post_init__(self) -> None:
        self.graph = Graph.of(self.trace)
        self.blocks = find_blocks(self.blueprint, self.trace)
        self.places = self._places()

    def proposal(self) -> Proposal:
        choice, attributes, parts = self._with_trial_result()
        groups = choice.groups
        inside = tuple(f"{block}." for block in self.blocks)
        taken = _names(groups) | {name for name in self.flow.layers if name.startswith(inside)}
        taken |= {part.name.rpartition(".")[0] for group in groups for part in group.parts}
        vocabulary = VocabularyAnalysis(self.blueprint, self.trace, self.flow, parts, taken).run()
        left = [*self._left(choice, vocabulary), *vocabulary.left]
        decisions = [*_of_vocabulary(vocabulary), *self._layers(groups), *self._parts(groups)]
        decisions += self._channelwise(groups)
        decisions += self._aliases(decisions)
        decisions += [*self._marked(groups), *self._positionwise(groups, left)]
        rules = self._rules(decisions)
        notes = (*self.trace.notes, *self.flow.notes)
        return Proposal(
            rules=rules,
            localise=tuple(Localise(match=glob_of(a.module), attribute=a.name) for a in attributes),
            divisible=self._divisible(groups, vocabulary),
            vocabulary_head=vocabulary.head if vocabulary.fused else None,
            replicated=tuple(self._summed(left)),
            notes=(*notes, UNPROVEN) if rules else notes,
        )

    def _with_trial_result(self) -> tuple[SplitChoice, tuple[CountAttribute, ...], int]:
        """Drop groups until what is left runs on a share of its weights."""
        refused: set[int] = set()
        ruled = [name for name in self.flow.layers if not self._own(name)]
        while True:
            # Optimistic first: all groups that the flow of dims allows. What clashes, or fails on a trial, is refused
            # and the choice made again, because another group may take the layers of a refused one.
            choice = choose(self.flow, self.blocks, refused, ruled, self.only)
            groups = choice.groups
            clashing = [group for group in groups if self._clash(group, groups, refused)]
            # One number of ranks for the whole trial: the prime that divides the groups with most weights. Groups that
            # it does not divide stay whole.
            parts = common_prime(groups)
            indivisible = [group for group in groups if group.size % parts and group not in clashing]
            self._refuse(indivisible, refused, f"{parts} does not divide its size, as it does those of most others")
            # Checks without a forward come first; a trial runs the whole model.
            if indivisible or clashing:
                continue
            gathers = self._gathers(groups)
            trial = SplitTrial(
                self.blueprint, self.trace, self.flow, groups, parts, gathers, self.useless, modes=self.modes
            )
            outcome = trial.run() if groups else None
            if outcome is None or outcome.problem is None:
                return choice, () if outcome is None else outcome.attributes, parts
            reason = (
                f"{outcome.module or 'the forward'} cannot work on a part of it: {outcome.problem}. Let it take sizes"
                " from what its projections return, or from whole-number attributes of the module"
            )
            # Refuse the groups whose parts are at hand where the forward fails, and their like in other blocks, which
            # would fail one by one. Every round refuses at least one group (without a culprit `atoms` names all), so
            # the loop ends.
            hit = [group for group in groups if group.atom in outcome.atoms]
            places = {glob_of(m.layer.name) for group in hit for m in group.columns}
            alike = [g for g in groups if any(glob_of(m.layer.name) in places for m in g.columns)]
            self._refuse(alike, refused, reason)

    def _refuse(self, groups: Iterable[LayerGroup], refused: set[int], reason: str) -> None:
        for group in groups:
            refused.add(group.atom)
            for member in (*group.columns, *group.rows):
                self.refusals.setdefault(member.layer.name, reason)

    def _clash(self, group: LayerGroup, groups: Sequence[LayerGroup], refused: set[int]) -> bool:
        """Refuse a group with parameters of which ranks would have a part of the gradient for some uses only."""
        if group.atom in refused:
            return False
        leaves = self.flow.atoms.leaves
        for name in self._met([group]):
            # A parameter that is whole on every rank and meets divided activations gets a part of its gradient on each,
            # to be summed; a use elsewhere would get the whole gradient and be counted once per rank.
            known = {at for other, dim, at in self.flow.shared if other == name and group.atom in leaves(dim)}
            if self.flow.uses.get(name, set()) - known:
                self._refuse([group], refused, f"its parts meet {name}, which the model uses elsewhere, too")
                return True
        for part in group.parts:
            if not self._own(part.name.rpartition(".")[0]):
                self._refuse([group], refused, f"its parts meet {part.name}, of which a rule says how it splits")
                return True
        reason = self._dropped_otherwise(group, groups) or self._read_elsewhere(group)
        if reason:
            self._refuse([group], refused, reason)
        return bool(reason)

    def _dropped_otherwise(self, group: LayerGroup, groups: Sequence[LayerGroup]) -> str:
        """Why a dropout, or what gets all of its input, could not tell which part a rank has."""
        reason = why_dropped_otherwise(
            self.trace, self.flow, self.blueprint.module, group.atom, self._events_on([group]), self._events_on(groups)
        )
        leaves = self.flow.atoms.leaves
        for name, result in self.gathering.items():
            along = leaves((self.flow.dims.get(result) or [()])[-1])
            # Gathering puts ranks' parts behind one another, so a part must be one run of the dim.
            if not reason and has_parts_in_front(self.flow, along, group.atom):
                reason = f"{name} would get parts of it that do not lie behind one another"
        return reason

    def _read_elsewhere(self, group: LayerGroup) -> str:
        """Why a rank needs more than its part of a layer's weights: something else reads them."""
        names = {member.layer.name for member in (*group.columns, *group.rows)}
        names |= {module.name for module in group.channelwise}
        for event in self.trace.events:
            for value in event.inputs:
                known = self.trace.parameters.get(value.storage) or (self.trace.buffers.get(value.storage, ""),)
                owners = {name.rpartition(".")[0] for name in known}
                if owners & names and event.module not in owners:
                    return f"{event.module or 'the forward'} reads {known[0]}, too"
        return ""

    def _met(self, groups: Sequence[LayerGroup]) -> list[str]:
        """Parameters that every rank has whole and uses on its part."""
        chosen = {group.atom for group in groups}
        names: dict[str, None] = {}
        for name, dim, _ in self.flow.shared:
            if chosen.intersection(self.flow.atoms.leaves(dim)):
                names[name] = None
        return list(names)

    def _gathers(self, groups: Sequence[LayerGroup]) -> dict[str, Value]:
        """Modules that get all of what these groups divide."""
        chosen = {group.atom for group in groups}
        gathering: dict[str, Value] = {}
        for name, result in self.gathering.items():
            if chosen.intersection(self.flow.atoms.leaves(self.flow.dims.get(result, [()])[-1])):
                gathering[name] = result
        return gathering

    def _own(self, name: str) -> bool:
        """Whether the blueprint's own rules leave a module to the proposal."""
        return self.blueprint.rule_of(name) is None

    def _layers(self, groups: Sequence[LayerGroup]) -> list[_Decision]:
        decisions: list[_Decision] = []
        for group in groups:
            # Notes are operators that the analysis did not understand; draws are not compared by a trial.
            confidence: Confidence = "medium" if self.trace.notes or self._draws(group) else "high"
            columns, rows = _leaves(group.columns), _leaves(group.rows)
            unit = f"{group.size} {self._unit(group)}"
            sides: tuple[tuple[bool, Sequence[GroupMember], str], ...] = (
                (True, group.columns, f"{rows} can take its result in parts of {unit}"),
                (False, group.rows, f"its input comes in parts of {unit} from {columns}"),
            )
            for is_column, members, reason in sides:
                decisions += [
                    _Decision(m.layer.name, _KINDS[m.layer.kind, is_column], reason, confidence, m.blocks)
                    for m in members
                ]
        return decisions

    def _channelwise(self, groups: Sequence[LayerGroup]) -> list[_Decision]:
        """Return decisions for modules that work channel by channel on each rank's channels."""
        reason = "it works on each rank's channels"
        return [
            _Decision(module.name, "channels", reason, blocks=module.blocks)
            for group in groups
            for module in group.channelwise
        ]

    def _parts(self, groups: Sequence[LayerGroup]) -> list[_Decision]:
        """Parameters of which each rank has a part, that no layer holds."""
        reason = "each rank has what its part of the activations meets"
        return [
            _Decision(part.name, "part", reason, blocks=part.blocks, dim=part.dim)
            for group in groups
            for part in group.parts
        ]

    def _aliases(self, decisions: Sequence[_Decision]) -> list[_Decision]:
        """Other names of parameters that are cut, in modules that do not use them: cut alike."""
        made = {decision.name: decision for decision in decisions}
        aliases: list[_Decision] = []
        for names in self.trace.parameters.values():
            for name in names:
                owner, _, leaf = name.rpartition(".")
                cut = self._cut(made.get(name) or made.get(owner), owner, leaf)
                if cut is None:
                    continue
                dim, blocks = cut
                # Tied weights: one tensor under several names is cut once, wherever it is used.
                others = [other for other in names if other not in made and other.rpartition(".")[0] not in made]
                reason = f"it is {name} by another name"
                aliases += [_Decision(other, "part", reason, blocks=blocks, dim=dim) for other in others]
                break
        return aliases

    def _cut(self, decision: _Decision | None, owner: str, leaf: str) -> tuple[int, int] | None:
        """Dim and blocks along which a decision cuts a parameter."""
        if decision is None:
            return None
        if decision.kind == "part":
            return decision.dim, decision.blocks
        if decision.kind == "vocab":
            return 0, 1
        if decision.kind == "channels":
            return 0, decision.blocks
        if decision.kind not in _KINDS.values():
            return None
        is_column = decision.kind in ("column", "channel_out")
        dim = cut_dim(self.blueprint.module.get_submodule(owner), leaf, column=is_column)
        return None if dim is None else (dim, decision.blocks)

    def _rules(self, decisions: Iterable[_Decision]) -> tuple[ProposedRule, ...]:
        """One rule for the same place in alike blocks, where its glob matches nothing that is decided otherwise."""
        made = {d.name: d for d in decisions if self._own(d.name)}
        module = self.blueprint.module
        everything = [name for name, _ in module.named_modules(remove_duplicate=False)]
        everything += [name for name, _ in module.named_parameters(remove_duplicate=False)]
        rules: dict[tuple[str, str], ProposedRule] = {}
        for decision in made.values():
            globs = globs_of(decision.name)
            glob = next(g for g in globs if (g, decision.kind) in rules or _covers(g, decision, made, everything))
            rule = SplitRule(
                match=glob,
                kind=decision.kind,
                blocks=decision.blocks,
                dim=decision.dim,
                gather_output=decision.gather_output,
            )
            proposed = ProposedRule(rule=rule, reason=decision.reason, confidence=decision.confidence)
            rules.setdefault((glob, decision.kind), proposed)
        return tuple(rules.values())

    def _events_on(self, groups: Sequence[LayerGroup]) -> list[tuple[Event, int]]:
        """Events that work on parts, and the dim of their first result that is divided."""
        events = [pair for group in groups for pair in self.places.get(group.atom, ())]
        return sorted(events, key=lambda pair: (pair[0].index, pair[1]))

    def _places(self) -> dict[int, list[tuple[Event, int]]]:
        """Atom → events whose result it divides, and along which dim."""
        atoms, places = self.flow.atoms, dict[int, list[tuple[Event, int]]]()
        for event in self.trace.events:
            for at, dim in enumerate(self.flow.dims.get(event.outputs[0], ()) if event.outputs else ()):
                for root in set(atoms.leaves(dim)):
                    places.setdefault(root, []).append((event, at))
        return places

    def _unit(self, group: LayerGroup) -> str:
        if all(member.layer.kind == "convolution" for member in group.columns):
            return "channels"
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
                kinds |= dict.fromkeys(self._names_of(event.module), kind_on(event, at))
        made = [_Decision(name, kind, "it works on each rank's part") for name, kind in kinds.items()]
        made += [_Decision(name, "heads", "it meets each rank's part") for name in self._met_as_replicated(groups)]
        reason = "it gets all of what is divided before it, and each rank goes on with its part"
        return made + [_Decision(name, "gather", reason) for name in self._gathers(groups)]

    def _names_of(self, name: str) -> list[str]:
        """All names of a module; events know the first."""
        root = self.blueprint.module
        module = root.get_submodule(name)
        return [other for other, each in root.named_modules(remove_duplicate=False) if each is module]

    def _met_as_replicated(self, groups: Sequence[LayerGroup]) -> list[str]:
        """Modules all of whose parameters meet parts, and single parameters of others."""
        met = self._met(groups)
        names: dict[str, None] = {}
        for name in met:
            owner = name.rpartition(".")[0]
            module = self.blueprint.module.get_submodule(owner)
            has_more = any(True for _ in module.children()) or not owner
            all_met = all(f"{owner}.{leaf}" in met for leaf, _ in module.named_parameters(recurse=False))
            names[name if has_more or not all_met else owner] = None
        return list(names)

    def _is_dropout(self, module: str) -> bool:
        return is_dropout(self.blueprint.module.get_submodule(module))

    def _positionwise(self, groups: Sequence[LayerGroup], left: Sequence[tuple[str, str]]) -> list[_Decision]:
        """Norms and dropouts between the splits of blocks all of whose layers are split."""
        on_parts = {event.module for event, _ in self._events_on(groups)}
        whole = [name for name, _ in left]
        decisions: dict[str, None] = {}
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
                decisions[event.module] = None
        return [_Decision(name, "sequence", "it works position by position") for name in decisions]

    def _divisible(self, groups: Sequence[LayerGroup], vocabulary: VocabularySplit) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for group in groups:
            unit = self._unit(group)
            name = f"{_leaf(group.rows[0].layer.name)}_{unit}"
            while sizes.get(name, group.size) != group.size:
                name += "_"
            sizes[name] = group.size
        for name in vocabulary.tables:
            module = self.blueprint.module.get_submodule(name)
            assert isinstance(module, nn.Embedding)
            sizes[f"{_leaf(name)}_rows"] = module.num_embeddings
        if vocabulary.head is not None and self.blueprint.vocabulary_size:
            sizes["vocabulary_size"] = self.blueprint.vocabulary_size
        return sizes

    def _left(self, choice: SplitChoice, vocabulary: VocabularySplit) -> list[tuple[str, str]]:
        refused = [(name, reason) for name, reason in self.refusals.items() if name not in _names(choice.groups)]
        known = {*(name for name, _ in refused), *(name for name, _ in vocabulary.left), vocabulary.head}
        rest = [(name, why) for name, why in choice.left if name not in known]
        return refused + rest + list(self.flow.unsupported.items())

    def _summed(self, left: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """One line for the same place in alike blocks."""
        summed: dict[tuple[str, str], None] = {}
        for name, reason in left:
            summed[glob_of(name), _without_numbers(reason)] = None
        return list(summed)


_KINDS: Mapping[tuple[str, bool], SplitKind] = {
    ("linear", True): "column",
    ("linear", False): "row",
    ("convolution", True): "channel_out",
    ("convolution", False): "channel_in",
}
"""Kind of layer, and whether it is cut by what it makes → how it splits."""
_NORMS = ("native_layer_norm", "rms_norm")
_NAMES = ("LlamaRMSNorm", "RMSNorm", "LayerNorm")


def _covers(glob: str, decision: _Decision, made: Mapping[str, _Decision], everything: Sequence[str]) -> bool:
    """Whether all that a glob matches is decided alike."""
    decisions = [made.get(name) for name in everything if fnmatchcase(name, glob)]
    return all(d is not None and d.how == decision.how for d in decisions)


def _of_vocabulary(split: VocabularySplit) -> list[_Decision]:
    lookups = "each rank looks up the rows that it has, and the results are summed"
    decisions = [_Decision(name, "vocab", lookups) for name in split.tables]
    if split.head is not None:
        reason = "the vocabulary loss takes its logits in parts" if split.fused else "its logits are gathered"
        decisions.append(_Decision(split.head, "column", reason, gather_output=not split.fused))
    return decisions


def gatherable(trace: Trace, flow: ForwardFlow, blueprint: Blueprint) -> dict[str, Value]:
    """Modules without others inside that need all of their input's last dim, and return as much: norms over all heads.
    Each with its result."""
    gathering: dict[str, Value] = {}
    for name, module in blueprint.module.named_modules():
        results = trace.results.get(name, ())
        runs_once = trace.num_runs.get(name) == 1 and name in trace.entries
        if not name or not runs_once or len(results) != 1 or any(True for _ in module.children()):
            continue
        entered, result = trace.entries[name][1], results[0]
        if result is None or result.shape != entered.shape or result.storage == entered.storage:
            continue
        *others, last = flow.dims.get(entered) or [()]
        reasons = [flow.atoms.reason(leaf) for leaf in flow.atoms.leaves(last)]
        because = [reason for reason in reasons if reason is not None and reason.startswith(f"{name} ")]
        flat = all(parameter.dim() == 1 for parameter in module.parameters())
        if because and flat and not any(others) and blueprint.rule_of(name) is None and name not in flow.layers:
            gathering[name] = result
    return gathering


def _leaves(members: Sequence[GroupMember]) -> str:
    return " and ".join(dict.fromkeys(glob_of(member.layer.name) for member in members))


def _names(groups: Iterable[LayerGroup]) -> set[str]:
    return {member.layer.name for group in groups for member in (*group.columns, *group.rows)}


def _leaf(name: str) -> str:
    """The last part of a name that is no number."""
    return next((part for part in reversed(name.split(".")) if not part.isdecimal()), f"layer_{name}")


def _without_numbers(text: str) -> str:
    return " ".join(glob_of(word) if "." in word else word for word in text.split(" "))
