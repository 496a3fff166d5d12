"""How the tensor axis divides each operator of a trace, from the model's split table."""

from __future__ import annotations

from weft.describe._events import Event
from weft.describe._graph import Graph, WrittenAttention, kind_of
from weft.models import Blueprint
from weft.profile import OperatorSplit


class SplitKinds:
    """Follows activations from column-parallel layers to the row-parallel ones that make them whole again."""

    def __init__(self, graph: Graph, blueprint: Blueprint, attentions: list[WrittenAttention]) -> None:
        self._graph, self._blueprint = graph, blueprint
        self._attending = {attention.first.module for attention in attentions} | {
            event.module for event in graph.trace.events if event.name == "attention"
        }
        self._has_sequence = any(rule.kind == "sequence" for rule in blueprint.split)
        self.divided: set[int] = set()
        """Storages of which each tensor rank has its part."""
        for event in graph.trace.events:
            self._follow(event)
        in_loss = graph.trace.events[graph.trace.loss_event :]
        self._loss_is_divided = any(value.storage in self.divided for event in in_loss for value in event.inputs)

    def _follow(self, event: Event) -> None:
        inputs = [value.storage for value in event.inputs]
        rule = self._rule(event)
        if rule in ("row", "vocab_rows") or (rule == "column" and self._gathers(event)):
            return
        if rule == "column" or any(storage in self.divided for storage in inputs):
            self.divided.update(value.storage for value in event.outputs)

    def _rule(self, event: Event) -> str | None:
        weights = self._graph.weights(event)
        if not weights or kind_of(event) not in ("matmul", "gather"):
            return None
        kind = self._blueprint.kind_of(weights[-1].rpartition(".")[0])
        return "vocab_rows" if kind == "vocab" else kind

    def _gathers(self, event: Event) -> bool:
        owner = self._graph.weights(event)[-1].rpartition(".")[0]
        rule = self._blueprint.rule_of(owner)
        return rule is not None and rule.gather_output and owner != self._blueprint.vocabulary_head

    def of(self, event: Event, *, in_block: bool) -> OperatorSplit:
        """How an event that is no expert's is divided."""
        if event.index >= self._graph.trace.loss_event:
            return "vocab" if self._loss_is_divided else "replicate"
        rule = self._rule(event)
        if rule == "vocab_rows":
            return "vocab"
        if rule in ("column", "row"):
            is_head = self._blueprint.vocabulary_head in {w.rpartition(".")[0] for w in self._graph.weights(event)}
            return "vocab" if is_head else rule  # pyright: ignore[reportReturnType]
        if any(value.storage in self.divided for value in (*event.inputs, *event.outputs)):
            return "heads" if event.module in self._attending else "column"
        kind = self._blueprint.kind_of(event.module)
        if kind == "sequence" or (in_block and self._has_sequence and kind != "replicate"):
            return "sequence"
        return "replicate"
