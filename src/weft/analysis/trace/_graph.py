"""The graph of a trace: makers and readers of values, and the kind of operator of each call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.analysis.trace._events import Event, Trace, Value
from weft.model.profile import OperatorKind

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
)
_KINDS: Mapping[str, OperatorKind] = {
    **dict.fromkeys(MATMULS, "matmul"),
    "attention": "attention",
    "convolution": "convolution",
    **dict.fromkeys(
        (
            "embedding",
            "_embedding_bag",
            "index",
            "index_select",
            "index_add",
            "index_add_",
            "index_put",
            "index_put_",
            "gather",
            "scatter",
            "scatter_add",
            "scatter_add_",
            "scatter_reduce",
        ),
        "gather",
    ),
}
_REDUCTIONS = (
    "native_layer_norm",
    "rms_norm",
    "native_group_norm",
    *BATCH_NORMS,
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "mean",
    "sum",
    "var",
    "var_mean",
    "native_dropout",
    "dropout",
    "max_pool2d_with_indices",
)
"""Operators that no compiler would compute a second time from their input's neighbours, or that draw at random."""


def kind_of(event: Event) -> OperatorKind:
    return _KINDS.get(event.name, "elementwise")


def is_pointwise(event: Event) -> bool:
    """Whether a fusing compiler computes it again in the backward rather than keep its result."""
    return kind_of(event) == "elementwise" and event.name not in _REDUCTIONS


@dataclass(frozen=True, slots=True)
class Graph:
    """A trace with its edges."""

    trace: Trace
    producer: Mapping[int, Event]
    """Storage → the event that first wrote it."""
    readers: Mapping[int, tuple[Event, ...]]
    """Storage → events that read it, views left out."""
    derived: Mapping[int, tuple[str, ...]]
    """Storage → names of the parameters that it is, or is a copy or cast of."""
    by_call: Mapping[int, tuple[Event, ...]]

    @classmethod
    def of(cls, trace: Trace) -> Graph:
        producer: dict[int, Event] = {}
        readers: defaultdict[int, list[Event]] = defaultdict(list)
        derived: dict[int, tuple[str, ...]] = dict(trace.parameters)
        by_call: defaultdict[int, list[Event]] = defaultdict(list)
        for event in trace.events:
            by_call[event.call].append(event)
            fresh = [value for value in event.outputs if value.storage not in {v.storage for v in event.inputs}]
            for value in fresh:
                producer.setdefault(value.storage, event)
            if fresh or event.mutates:
                for value in event.inputs:
                    readers[value.storage].append(event)
            sources = [derived[value.storage] for value in event.inputs if value.storage in derived]
            # A copy, cast or reshape of one parameter stands for it; with an activation among the operands it is a use.
            if len(sources) == 1 and not any(value.storage in trace.per_sample for value in event.inputs):
                for value in fresh:
                    derived.setdefault(value.storage, sources[0])
        return cls(
            trace,
            producer,
            {key: tuple(events) for key, events in readers.items()},
            derived,
            {key: tuple(events) for key, events in by_call.items()},
        )

    def works(self, event: Event) -> bool:
        """Whether the event costs anything per sample: no view, no table that is the same for every batch."""
        return self.is_computed(event) and any(value.storage in self.trace.per_sample for value in event.outputs)

    def is_computed(self, event: Event) -> bool:
        inputs = {value.storage for value in event.inputs}
        return event.mutates or any(value.storage not in inputs for value in event.outputs)

    def main(self, call: int) -> Event | None:
        """The event that a call is about: its attention, product, convolution, lookup, else its first."""
        order = ("attention", "matmul", "convolution", "gather", "elementwise")
        events = [event for event in self.by_call.get(call, ()) if self.works(event)]
        return min(events, key=lambda event: order.index(kind_of(event)), default=None)

    def weights(self, event: Event) -> tuple[str, ...]:
        """Parameters that an event reads, those of several names by the one in the module that runs."""
        storages = dict.fromkeys(v.storage for v in event.inputs if v.storage in self.derived)
        return tuple(self.name_of(storage, event) for storage in storages)

    def name_of(self, storage: int, event: Event) -> str:
        """The parameter's name, as the module that runs knows it."""
        names = self.derived[storage]
        return next((name for name in names if name.rpartition(".")[0] == event.module), names[0])


AttentionShapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shapes of query, key and value: (…, heads, length, size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAttention:
    """Attention made of two products and a softmax."""

    first: Event
    second: Event
    inside: frozenset[int]
    """Events between the products, the first one included, by index."""
    masked: bool
    dropped: bool

    @property
    def _operands(self) -> tuple[Value, Value]:
        inputs = self.first.inputs
        return inputs[-2:] if self.first.name == "baddbmm" else inputs[:2]  # pyright: ignore[reportReturnType]

    @property
    def num_rows(self) -> int:
        """Rows of scores, over all samples and heads."""
        left, _ = self._operands
        return left.shape[0] * left.shape[1]

    def shapes(self, samples: int) -> AttentionShapes:
        """Shapes of query, key and value, as (samples, heads, length, size); the products have samples · heads in one
        dim."""
        left, right = self._operands
        heads = left.shape[0] // samples if left.shape[0] % samples == 0 else 1
        value = self.second.inputs[1]
        return (
            (samples, heads, *left.shape[1:]),
            (samples, heads, right.shape[2], right.shape[1]),
            (samples, heads, *value.shape[1:]),
        )


def written_attentions(graph: Graph) -> list[WrittenAttention]:
    """Find every softmax between two products of activations."""
    attentions: list[WrittenAttention] = []
    for event in graph.trace.events:
        if event.name in ("_softmax", "_safe_softmax") and graph.works(event):
            before, back = _walk_back(graph, event)
            after, forth = _walk_on(graph, event)
            # softmax(Q Kᵀ …) V: between both products only element-wise operators (scale, mask, dropout).
            if before is not None and after is not None:
                inside = [*back, event, *forth, before]
                names = {item.name for item in inside}
                attentions.append(
                    WrittenAttention(
                        first=before,
                        second=after,
                        inside=frozenset(item.index for item in inside),
                        masked=bool(names & {"masked_fill", "masked_fill_", "where"}) or _adds_mask(graph, back),
                        dropped="dropout" in names,
                    )
                )
    return attentions


def _adds_mask(graph: Graph, events: Iterable[Event]) -> bool:
    """Whether something the same for every sample is added to the scores."""
    return any(
        event.name == "add" and any(value.storage not in graph.trace.per_sample for value in event.inputs)
        for event in events
    )


def _walk_back(graph: Graph, start: Event) -> tuple[Event | None, list[Event]]:
    passed: list[Event] = []
    event = start
    while True:
        source = next((v.storage for v in event.inputs if v.storage in graph.trace.per_sample), None)
        before = None if source is None else graph.producer.get(source)
        if before is None or kind_of(before) != "elementwise":
            break
        event = before
        passed.append(event)
    if before is not None and _multiplies_activations(graph, before):
        return before, passed
    return None, passed


def _walk_on(graph: Graph, start: Event) -> tuple[Event | None, list[Event]]:
    passed: list[Event] = []
    event = start
    while True:
        following = [reader for value in event.outputs for reader in graph.readers.get(value.storage, ())]
        # In the order of execution: a later reader cannot be the next step.
        following = [reader for reader in following if graph.works(reader) and reader.index > event.index]
        if not following:
            return None, passed
        event = following[0]
        if kind_of(event) == "matmul":
            return (event if _multiplies_activations(graph, event) else None), passed
        if kind_of(event) != "elementwise" or event.name in ("_softmax", "_log_softmax"):
            return None, passed
        passed.append(event)


def _multiplies_activations(graph: Graph, event: Event) -> bool:
    return event.name in ("bmm", "baddbmm") and not graph.weights(event)
