"""How the tensor axis divides each operator of a trace, from the model's split table."""

from __future__ import annotations

from collections.abc import Mapping

from weft.analysis.trace._events import Event, Value
from weft.analysis.trace._graph import Graph, WrittenAttention, kind_of
from weft.config.recipe import SplitKind
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule
from weft.model.profile import OperatorSplit

_CHANNELS: Mapping[SplitKind, OperatorSplit] = {"channel_out": "column", "channel_in": "row"}


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
        self._trained = {
            storage
            for storage, names in graph.trace.parameters.items()
            if blueprint.module.get_parameter(names[0]).requires_grad
        }
        """Storages that gradients flow back to."""
        self.summed: dict[int, float] = {}
        """Convolution that is cut by its output channels, by the index of its event → elements of what it reads whose
        gradient is a sum over tensor ranks; of several in turn with one input, the first."""
        self._read: Value | None = None
        for event in graph.trace.events:
            self._follow(event)
        in_loss = graph.trace.events[graph.trace.loss_event :]
        self._loss_is_divided = any(value.storage in self.divided for event in in_loss for value in event.inputs)

    def _follow(self, event: Event) -> None:
        if any(value.storage in self._trained for value in event.inputs):
            self._trained.update(value.storage for value in event.outputs if value.dtype.is_floating_point)
        owner, rule = self._layer(event)
        kind = None if rule is None else rule.kind
        if kind == "channel_out" and event.inputs[0] != self._read:
            self._read = event.inputs[0]
            self.summed[event.index] = float(self._read.numel if self._read.storage in self._trained else 0)
        elif kind in ("row", "channel_in"):
            self._read = None
        gathers = rule is not None and rule.gather_output and owner != self._blueprint.vocabulary_head
        if kind in ("row", "channel_in", "vocab") or (kind == "column" and gathers):
            return
        if kind in ("column", "channel_out") or any(value.storage in self.divided for value in event.inputs):
            self.divided.update(value.storage for value in event.outputs)

    def _layer(self, event: Event) -> tuple[str, SplitRule | None]:
        """The layer whose weight an event multiplies or looks up, and its rule."""
        weights = self._graph.weights(event)
        if not weights or kind_of(event) not in ("matmul", "gather", "convolution"):
            return "", None
        owner = weights[-1].rpartition(".")[0]
        return owner, self._blueprint.rule_of(owner)

    def of(self, event: Event, *, in_block: bool) -> OperatorSplit:
        """How an event that is no expert's is divided."""
        if event.index >= self._graph.trace.loss_event:
            return "vocab" if self._loss_is_divided else "replicate"
        _, rule = self._layer(event)
        if rule is not None and rule.kind in _CHANNELS:
            return _CHANNELS[rule.kind]
        if rule is not None and rule.kind in ("column", "row", "vocab"):
            owners = {name.rpartition(".")[0] for name in self._graph.weights(event)}
            return "vocab" if rule.kind == "vocab" or self._blueprint.vocabulary_head in owners else rule.kind
        if any(value.storage in self.divided for value in (*event.inputs, *event.outputs)):
            return "heads" if event.module in self._attending else "column"
        kind = self._blueprint.kind_of(event.module)
        if kind == "sequence" or (in_block and self._has_sequence and kind != "replicate"):
            return "sequence"
        return "replicate"
