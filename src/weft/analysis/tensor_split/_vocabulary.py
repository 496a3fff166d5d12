"""How embeddings and the head split: tables by rows, the head by columns, and what they share alike or not at all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from weft.analysis.tensor_split._flow import OUTPUT, ForwardFlow, LinearLayer
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._pointwise import LAYOUT
from weft.model.blueprint import Blueprint
from weft.model.losses import token_loss
from weft.model.plain_layers import runs

_SMALL_TABLE = 0.01
"""Share of the parameters below which splitting a table is not worth a collective."""
_LOOKUPS = ("embedding", "_embedding_bag")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySplit:
    """Modules of a model that split by its vocabulary."""

    head: str | None
    """The linear layer that makes the logits, if it is cut."""
    fused: bool
    """Whether only the loss reads its result."""
    tables: tuple[str, ...]
    """Embeddings that are cut by rows."""
    left: tuple[tuple[str, str], ...]
    """Embeddings and heads that stay whole, and why."""


@dataclass(slots=True)
class VocabularyAnalysis:
    blueprint: Blueprint
    trace: Trace
    flow: ForwardFlow
    parts: int
    taken: Collection[str] = ()
    """Layers that split with others, those of blocks, and tables whose columns are divided."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(parameter.numel() for parameter in self.blueprint.module.parameters())

    def run(self) -> VocabularySplit:
        """A head that shares its weight is cut together with those tables or stays whole with them."""
        head = self._head()
        tables, left = self._tables(head)
        if head is not None:
            partners = self._owners(f"{head.name}.weight") - {head.name}
            whole = sorted(partners - set(tables))
            if whole:
                reasons = dict(left)
                why = reasons.get(whole[0], "no embedding that could be cut by rows")
                tables, left = self._tables(None)
                left.append((head.name, f"it shares its weight with {whole[0]}, which stays whole: {why}"))
                head = None
        fused = head is not None and self._is_read_by_the_loss_alone(head)
        return VocabularySplit(
            head=None if head is None else head.name, fused=fused, tables=tuple(tables), left=tuple(left)
        )

    def _owners(self, name: str) -> set[str]:
        """Modules that hold a parameter, each by the name that the trace knows it by."""
        names = next((names for names in self.trace.parameters.values() if name in names), (name,))
        root = self.blueprint.module
        first = {id(module): known for known, module in reversed(list(root.named_modules()))}
        return {first[id(root.get_submodule(other.rpartition(".")[0]))] for other in names}

    def _head(self) -> LinearLayer | None:
        """The linear layer that makes as many features as the vocabulary has entries."""
        blueprint = self.blueprint
        size = blueprint.vocabulary_size
        if not size or blueprint.vocabulary_head is not None or size % self.parts:
            return None
        for layer in reversed(list(self.flow.layers.values())):
            if layer.name in self.taken:
                continue
            module = blueprint.module.get_submodule(layer.name)
            # A hook would see a rank's part of the vocabulary, or what stands for logits that nobody makes.
            hooked = module._forward_hooks or module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
            whole = isinstance(module, nn.Linear) and module.out_features == size and not hooked
            is_big = whole and sum(p.numel() for p in module.parameters(recurse=False)) >= _SMALL_TABLE * self.total
            if is_big and blueprint.rule_of(layer.name) is None and self._runs_once(layer):
                return layer
        return None

    def _made(self, layer: LinearLayer) -> list[Event]:
        """Products of a layer."""
        weight = f"{layer.name}.weight"
        return [
            event
            for event in self.trace.events
            if event.module == layer.name
            and event.name not in LAYOUT
            and any(weight in self.trace.parameters.get(value.storage, ()) for value in event.inputs)
        ]

    def _runs_once(self, layer: LinearLayer) -> bool:
        """Whether it makes one product in a forward, and nobody but it and embeddings reads its parameters."""
        module = self.blueprint.module.get_submodule(layer.name)
        own = {f"{layer.name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}
        storages = {key for key, names in self.trace.parameters.items() if own.intersection(names)}
        strange = any(
            event.module != layer.name and event.name not in (*LAYOUT, *_LOOKUPS)
            for event in self.trace.events
            if any(value.storage in storages for value in event.inputs)
        )
        return len(self._made(layer)) == len(self.trace.outputs_of) and not strange

    def _is_read_by_the_loss_alone(self, head: LinearLayer) -> bool:
        """Whether the model returns what the head makes, as it is, and reads it nowhere."""
        if self.blueprint.loss is not token_loss:
            return False
        returned = [outputs[0] if outputs else None for outputs in self.trace.outputs_of]
        return all(logits is not None and self._is_only_returned(head, logits) for logits in returned)

    def _is_only_returned(self, head: LinearLayer, logits: Value) -> bool:
        inside = [event for event in self.trace.events if event.module == head.name]
        made = {value.storage for event in inside for value in event.outputs}
        if logits.storage not in made or self.flow.dims.get(logits, [()])[-1] != (head.made,):
            return False
        events = self.trace.events
        reads = {event.module for event in events if logits.storage in {value.storage for value in event.inputs}}
        reads |= self.trace.touched.get(logits.storage, frozenset())
        return reads <= {head.name} and self.flow.atoms.reason(head.made) == OUTPUT

    def _tables(self, head: LinearLayer | None) -> tuple[list[str], list[tuple[str, str]]]:
        """Embeddings to cut by rows, and those left whole with the reason."""
        tables: list[str] = []
        left: list[tuple[str, str]] = []
        for event in self.trace.events:
            module = self.blueprint.module.get_submodule(event.module) if event.module else None
            if event.name not in _LOOKUPS or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            reason = self._problem(event, module, head)
            if reason is None and event.module not in tables:
                tables.append(event.module)
            elif reason is not None and (event.module, reason) not in left:
                left.append((event.module, reason))
        refused = {name for name, _ in left}
        return [name for name in tables if name not in refused], left

    def _problem(self, event: Event, module: nn.Embedding | nn.EmbeddingBag, head: LinearLayer | None) -> str | None:
        if self.blueprint.rule_of(event.module) is not None:
            return "a rule of the recipe covers it"
        if not isinstance(module, nn.Embedding) or not self._looks_up_what_enters(event, module):
            return f"a {type(module).__name__} finds its rows itself, which Weft cannot cut by rows"
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "its options (max_norm, scale_grad_by_freq, sparse) want all rows in one place"
        owners = self._owners(f"{event.module}.weight")
        if owners.intersection(self.taken):
            return "its features are split with what reads them"
        owners -= {event.module}
        tied = head is not None and owners == {head.name}
        if owners and not tied:
            return f"it shares its weight with {', '.join(sorted(owners))}, which stays whole"
        if module.num_embeddings % self.parts:
            padded = -(-module.num_embeddings // self.parts) * self.parts
            return f"its {module.num_embeddings} rows do not divide by {self.parts}; {padded} would"
        if tied:
            return None
        if event.inputs[1].storage not in self.trace.per_sample:
            return "it is looked up by position, the same rows for every sample"
        if module.weight.numel() < _SMALL_TABLE * self.total:
            return f"it has less than {_SMALL_TABLE:.0%} of the parameters"
        return None

    def _looks_up_what_enters(self, lookup: Event, module: nn.Embedding) -> bool:
        """Whether its rows are those that its first argument names, and its result is at most a multiple of them: of a
        row that a rank has not got it makes zero then."""
        if runs(module, nn.Embedding.forward):
            return True
        entered = self.trace.entries.get(lookup.module)
        if entered is None or not _is_same(entered[1], lookup.inputs[1]):
            return False
        weight = lookup.inputs[0].storage
        for event in self.trace.events:
            if event.module != lookup.module or event.name in LAYOUT or event.name == "embedding":
                continue
            others = [value for value in event.inputs if value.storage in self.trace.per_sample]
            if event.name not in ("mul", "mul_") or len(others) != 1 or weight in {v.storage for v in event.inputs}:
                return False
        return True


def _is_same(a: Value, b: Value) -> bool:
    return (a.storage, a.offset, a.shape) == (b.storage, b.offset, b.shape)
