"""Make a model's profile from one traced forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.analysis._holding import holding_of
from weft.analysis._kept import KeptStorage, kept_storages
from weft.analysis._operators import Draft, count_kept, draft_key, operator_of, place, separate_norm_bytes
from weft.analysis._segment import STEM, Segments, segment
from weft.analysis._split_kinds import SplitKinds
from weft.analysis.facts import facts_of_blueprint
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import Graph, WrittenAttention, kind_of, written_attentions
from weft.analysis.trace._trace import LOSS, trace
from weft.model.blueprint import Blueprint
from weft.model.profile import Block, Operator, OperatorSplit, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardDescription:
    """A profile, and what it does not say."""

    profile: Profile
    block_names: tuple[str, ...]
    """Modules that are the blocks, in order."""
    kept_bytes_per_sample: float
    """All that the forward and the loss keep, scores and logits included, with a kernel for every call."""
    notes: tuple[str, ...]
    """Assumptions where shapes or choices depend on values."""


def describe(blueprint: Blueprint, *, dtype: torch.dtype = torch.bfloat16) -> Profile:
    """Return the profile of a model, found by one forward and loss on the meta device.  See `examine`."""
    return examine(blueprint, dtype=dtype).profile


def examine(blueprint: Blueprint, *, dtype: torch.dtype = torch.bfloat16) -> ForwardDescription:
    """Describe a model as it computes in `dtype`, in the mode (training or evaluation) that it is in.

    No memory is taken: parameters and activations are meta tensors.  Attention, norms and dropout count as the fused
    kernels that devices have; what separate kernels would keep besides stands in the operators' `unfused` sizes.

    Raises:
        RecipeError: no example batch, a forward that raises, or one that depends on values where none can stand in.
    """
    forward = trace(blueprint, dtype)
    return _Builder(blueprint, forward, dtype).description()


class _Builder:
    def __init__(self, blueprint: Blueprint, forward: Trace, dtype: torch.dtype) -> None:
        self._blueprint, self._trace, self._dtype = blueprint, forward, dtype
        self._graph = Graph.of(forward)
        self._attentions = written_attentions(self._graph)
        self._segments = segment(blueprint, forward)
        self._kinds = SplitKinds(self._graph, blueprint, self._attentions)
        self._kept = kept_storages(self._graph, self._attentions)
        self._length = self._sequence_length()
        self._tokens = float(forward.samples * self._length)
        self._experts = _expert_modules(blueprint.module, self._graph, self._segments)
        self._drafts: dict[int, dict[tuple[str, str, str], Draft]] = {}
        self._draft_of: dict[int, Draft] = {}

    def description(self) -> ForwardDescription:
        self._gather()
        self._share_out_parameters()
        self._share_out_kept()
        profile = self._profile()
        total = sum(kept.size_bytes for kept in self._kept) / self._trace.samples
        total += sum(separate_norm_bytes(event, self._dtype) for event in self._trace.events) / self._trace.samples
        return ForwardDescription(
            profile=profile,
            block_names=self._segments.blocks,
            kept_bytes_per_sample=total,
            notes=self._trace.notes,
        )

    def _sequence_length(self) -> int:
        """Tokens per sample: the recipe's, else the keys of the longest attention (patches of an image), else 1."""
        if self._blueprint.sequence_length is not None:
            return self._blueprint.sequence_length
        longest = [event.inputs[1].shape[-2] for event in self._trace.events if event.name == "attention"]
        longest += [attention.second.inputs[1].shape[1] for attention in self._attentions]
        return max(longest, default=1)

    def _gather(self) -> None:
        """Put every event that costs something into a draft of an operator."""
        # Attention that a model writes out as products and a softmax becomes one operator: all of its events go into
        # one draft.
        written = {index: attention for attention in self._attentions for index in attention.inside}
        seconds = {attention.second.index: attention for attention in self._attentions}
        for event in self._trace.events:
            if not self._graph.works(event) or event.index in written:
                continue
            attention = seconds.get(event.index)
            draft = self._draft(self._segments.of_event[event.index], event, attention)
            draft.events.append(event)
            draft.summed_elements += self._kinds.summed.get(event.index, 0.0)
            self._draft_of[event.index] = draft
            if attention is not None:
                draft.written[event.index] = attention
                self._draft_of |= dict.fromkeys(attention.inside, draft)

    def _draft(self, part: int, event: Event, attention: WrittenAttention | None) -> Draft:
        root, prefix = self._blueprint.module, self._segments.prefix(part)
        name, kind = draft_key(root, prefix, self._graph, event)
        if attention is not None:
            name, kind = f"{place(root, prefix, event.module)}.scores".strip("."), "attention"
        in_block = 0 <= part < self._segments.tail
        split: OperatorSplit = "expert" if self._is_expert(event) else self._kinds.of(event, in_block=in_block)
        drafts = self._drafts.setdefault(part, {})
        key = (name, kind, split)
        if key not in drafts:
            taken = {draft.name for draft in drafts.values()}
            names = (name or kind, f"{name}.{split}", f"{name}.{kind}.{split}")
            drafts[key] = Draft(name=next(free for free in names if free not in taken), kind=kind, split=split)
        return drafts[key]

    def _is_expert(self, event: Event) -> bool:
        places = {event.module, *(name.rpartition(".")[0] for name in self._graph.weights(event))}
        return any(f"{place}.".startswith(expert + ".") for place in places for expert in self._experts)

    def _share_out_parameters(self) -> None:
        """Each parameter counts at its first use; unused ones in a draft of their own."""
        sizes = {name: p.numel() for name, p in self._blueprint.module.named_parameters()}
        # Tied parameters are listed once, under their first name.
        firsts = {names[0]: sizes[names[0]] for names in self._trace.parameters.values() if names[0] in sizes}
        for event in self._trace.events:
            draft = self._draft_of.get(event.index)
            if draft is not None:
                for value in event.inputs:
                    names = self._graph.derived.get(value.storage)
                    draft.parameters += firsts.pop(names[0], 0) if names else 0
        for name, size in firsts.items():
            part = self._segments.of_name(name)
            drafts = self._drafts.setdefault(part, {})
            unused = drafts.setdefault(
                ("unused", "elementwise", ""), Draft(name="unused", kind="elementwise", split="replicate")
            )
            unused.parameters += size

    def _share_out_kept(self) -> None:
        keeps: dict[int, list[KeptStorage]] = {}
        for kept in self._kept:
            draft = self._keeper(kept)
            if draft is not None and draft.name != LOSS and not kept.is_scores:
                keeps.setdefault(id(draft), []).append(kept)
        fused = {kept.storage for kept in self._kept if not kept.again}
        for drafts in self._drafts.values():
            for draft in drafts.values():
                count_kept(draft, self._graph, keeps.get(id(draft), ()), fused, self._dtype)

    def _keeper(self, kept: KeptStorage) -> Draft | None:
        """The operator that is divided as the storage is: the first that wants it, else the one that makes it."""
        candidates = [self._draft_of.get(event.index) for event in kept.savers]
        if kept.producer is not None:
            candidates.append(self._draft_of.get(kept.producer.index))
        drafts = [draft for draft in candidates if draft is not None]
        if not drafts:
            return None
        # A storage may be wanted by an operator of the next block; it is kept by the block that made it.
        home = {id(draft): draft for draft in self._drafts.get(self._part_of(kept), {}).values()}
        drafts = [draft for draft in drafts if id(draft) in home] or drafts
        is_divided = kept.storage in self._kinds.divided
        whole = ("sequence", "replicate")
        return next((draft for draft in drafts if (draft.split not in whole) == is_divided), drafts[0])

    def _part_of(self, kept: KeptStorage) -> int:
        event = kept.saver or kept.producer
        return STEM if event is None else self._segments.of_event[event.index]

    def _profile(self) -> Profile:
        blueprint, segments = self._blueprint, self._segments
        stem, tail = self._part(STEM, "stem"), self._part(segments.tail, "tail")
        blocks = self._blocks()
        if not blocks:  # nothing repeats: the whole model is one block
            blocks = (replace(stem, name="model"),)
            stem = Block(name="stem", operators=(), entry_elements_per_token=0.0)
        elif stem.entry_elements_per_token:
            stem = replace(stem, entry_elements_per_token=0.0)
        entry = blocks[0].entry_elements_per_token
        parts = {id(block): block for block in (stem, *blocks, tail)}.values()
        return Profile(
            name=type(blueprint.module).__name__,
            sequence_length=self._length,
            stem=stem,
            blocks=blocks,
            tail=replace(tail, entry_elements_per_token=entry),
            hidden_size=self._hidden_size(),
            vocabulary_size=(blueprint.vocabulary_size or 0) if blueprint.vocabulary_head else 0,
            tied=self._is_tied(),
            divisible=tuple(blueprint.divisible.items()) if blueprint.splits else (),
            num_experts=_num_experts(parts),
            facts=facts_of_blueprint(blueprint),
            **holding_of(blueprint.module),
        )

    def _blocks(self) -> tuple[Block, ...]:
        """Alike blocks become one object."""
        made: dict[tuple[Operator, ...], Block] = {}
        blocks: list[Block] = []
        for part, name in enumerate(self._segments.blocks):
            block = self._part(part, type(self._blueprint.module.get_submodule(name)).__name__)
            # One object for all alike blocks: caches of the cost model are keyed by identity.
            blocks.append(made.setdefault(block.operators, block))
        return tuple(blocks)

    def _part(self, part: int, name: str) -> Block:
        drafts = self._drafts.get(part, {}).values()
        operators = tuple(operator_of(draft, self._graph, self._tokens, self._length) for draft in drafts)
        return Block(name=name, operators=operators, entry_elements_per_token=self._entry(part))

    def _entry(self, part: int) -> float:
        value = self._entering(part)
        return 0.0 if value is None else value.numel / self._tokens

    def _entering(self, part: int) -> Value | None:
        """The activation that enters a block; of a model of one block, its input."""
        if 0 <= part < self._segments.tail:
            value = self._trace.entries.get(self._segments.blocks[part])
            return None if value is None else value[1]
        if self._segments.blocks:
            return None
        working = (event for event in self._trace.events if self._graph.works(event))
        return next((v for event in working for v in event.inputs if v.storage in self._trace.per_sample), None)

    def _hidden_size(self) -> int:
        value = self._entering(0) if self._segments.blocks else None
        if value is not None:
            return value.shape[1] if len(value.shape) == 4 else value.shape[-1]
        parts = [self._part(part, "") for part in self._drafts]
        return max((one.n for part in parts for one in part.operators if one.kind == "matmul"), default=1)

    def _is_tied(self) -> bool:
        """Whether a lookup and a product share a parameter."""
        uses: dict[str, set[str]] = {}
        for event in self._trace.events:
            for value in event.inputs:
                if value.storage in self._graph.derived:
                    uses.setdefault(self._graph.derived[value.storage][0], set()).add(kind_of(event))
        return any({"gather", "matmul"} <= kinds for kinds in uses.values())


def _num_experts(parts: Iterable[Block]) -> int:
    """Groups of the expert products."""
    operators = [operator for block in parts for operator in block.operators]
    counts = [operator.groups for operator in operators if operator.split == "expert" and operator.kind == "matmul"]
    return max(counts, default=0)


def _expert_modules(root: nn.Module, graph: Graph, segments: Segments) -> tuple[str, ...]:
    """Modules that hold routed experts: stacks of matrices used in grouped products, and lists of modules inside blocks
    of which each works on fewer rows than there are in the batch."""
    names: dict[str, None] = {}
    rows: dict[str, dict[str, float]] = {}
    entering = {part: _rows_of(graph, name) for part, name in enumerate(segments.blocks)}
    for event in graph.trace.events:
        if kind_of(event) != "matmul" or not graph.works(event):
            continue
        part = segments.of_event[event.index]
        for name in graph.weights(event):
            if root.get_parameter(name).dim() == 3:
                names[name.rpartition(".")[0]] = None
            container, element = _list_of(root, name, segments.prefix(part))
            if container:
                # Rows of this product over rows that enter the block: below 1 for an expert, which gets some tokens.
                share = event.outputs[0].numel / event.outputs[0].shape[-1] / max(entering.get(part, 1.0), 1.0)
                counted = rows.setdefault(container, {})
                counted[element] = max(counted.get(element, 0.0), share)
    names |= {container: None for container, counts in rows.items() if len(counts) > 1 and max(counts.values()) < 1}
    return tuple(names)


def _rows_of(graph: Graph, module: str) -> float:
    entry = graph.trace.entries.get(module)
    return 0.0 if entry is None else entry[1].numel / max(entry[1].shape[-1], 1)


def _list_of(root: nn.Module, parameter: str, prefix: str) -> tuple[str, str]:
    """The innermost `nn.ModuleList` around a parameter inside a block, and which element of it."""
    parts = parameter.split(".")
    for at in range(len(parts) - 2, prefix.count("."), -1):
        if parts[at].isdecimal() and isinstance(root.get_submodule(".".join(parts[:at])), nn.ModuleList):
            return ".".join(parts[:at]), parts[at]
    return "", ""
