"""From the events of one part of a model to its operators, in sizes per token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from weft.describe._events import Event, Value
from weft.describe._graph import Graph, WrittenAttention, kind_of
from weft.describe._kept import KeptStorage
from weft.describe._trace import LOSS
from weft.profile import Operator, OperatorKind, OperatorSplit

_STATISTIC_BYTES = 4
_NORM = re.compile(r"norm", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Draft:
    """An operator while its events are gathered.  Sizes are those of the traced batch."""

    name: str
    kind: OperatorKind
    split: OperatorSplit
    events: list[Event] = field(default_factory=list[Event])
    rows: float = 0.0
    n: int = 0
    k: int = 0
    groups: int = 1
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    value_head_size: int = 0
    keys: int = 0
    causal: bool = False
    dropout: bool = False
    weights: dict[str, None] = field(default_factory=dict[str, None])
    parameters: int = 0
    kept_elements: float = 0.0
    kept_bytes: float = 0.0
    unfused_elements: float = 0.0
    unfused_bytes: float = 0.0
    """Bytes that are kept beyond or, where negative, below what fused kernels keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Names of operators inside one part."""

    prefix: str
    root: nn.Module
    """The whole model."""

    def owner(self, parameter: str) -> tuple[str, bool]:
        """A parameter's module inside the part, and whether it is one of several alike (an expert of a list)."""
        module = parameter.rpartition(".")[0].removeprefix(self.prefix)
        return self._joined(module)

    def place(self, module: str) -> tuple[str, bool]:
        return self._joined(module.removeprefix(self.prefix) if f"{module}." != self.prefix else "")

    def _joined(self, inside: str) -> tuple[str, bool]:
        given = inside.split(".")
        parts, listed = [*given], False
        for at, part in enumerate(given):
            above = (self.prefix + ".".join(given[:at])).rstrip(".")
            if part.isdecimal() and isinstance(self.root.get_submodule(above), nn.ModuleList):
                parts[at], listed = "*", True
        return ".".join(parts), listed


def draft_key(naming: Naming, graph: Graph, event: Event) -> tuple[str, OperatorKind]:
    """What events of one operator have in common: products by weight, the rest by module and kind."""
    kind = kind_of(event)
    weights = graph.weights(event)
    if event.module == LOSS:
        return LOSS, kind
    if kind in ("matmul", "convolution", "gather") and weights:
        name, _ = naming.owner(_matrix_of(graph, event))
        leaf = _matrix_of(graph, event).rpartition(".")[2]
        return (name if leaf == "weight" else f"{name}.{leaf}".strip(".")), kind
    place, _ = naming.place(event.module)
    is_leaf = event.module and not any(True for _ in naming.root.get_submodule(event.module).children())
    suffix = "" if is_leaf and kind == "elementwise" else _SUFFIXES[kind]
    if kind == "matmul":  # of activations: one operator for each shape
        suffix += f".{event.inputs[-1].shape[-2]}x{event.inputs[-1].shape[-1]}"
    return f"{place}.{suffix}".strip("."), kind


_SUFFIXES = {
    "matmul": "product",
    "attention": "scores",
    "elementwise": "elementwise",
    "gather": "gather",
    "convolution": "convolution",
}


def _matrix_of(graph: Graph, event: Event) -> str:
    """The parameter with most dimensions that a product or lookup reads, not its bias."""
    found = {graph.name_of(v.storage, event): len(v.shape) for v in event.inputs if v.storage in graph.derived}
    return max(found, key=lambda name: found[name])


def add_event(draft: Draft, graph: Graph, event: Event) -> None:
    """Let one event count in its operator."""
    draft.events.append(event)
    draft.weights |= dict.fromkeys(graph.weights(event))
    match draft.kind:
        case "matmul":
            _add_matmul(draft, graph, event)
        case "convolution":
            _add_convolution(draft, event)
        case "attention":
            query, key, value = event.inputs[:3]
            _set_attention(draft, query.shape, key.shape, value.shape, graph.trace.samples)
            draft.causal |= bool(event.keywords["causal"])
            draft.dropout |= bool(event.keywords["dropout"])
        case _:
            pass


def _add_matmul(draft: Draft, graph: Graph, event: Event) -> None:
    a, b = event.inputs[-2:] if event.name in ("addmm", "baddbmm") else event.inputs[:2]
    k, n = b.shape[-2], b.shape[-1]
    if a.storage in graph.derived and b.storage not in graph.derived:
        rows, k, n = float(n), a.shape[-1], a.shape[-2]  # the weight stands on the left
    else:
        rows = float(a.numel / max(k, 1))
    batch = b.shape[0] if len(b.shape) == 3 else 1
    if batch > 1 or event.name == "_grouped_mm":
        draft.groups = max(draft.groups, batch)
    draft.rows += rows
    draft.n, draft.k = max(draft.n, n), max(draft.k, k)


def _add_convolution(draft: Draft, event: Event) -> None:
    weight, groups = event.inputs[1], int(event.arguments[8])
    output = event.outputs[0]
    transposed = bool(event.arguments[6])
    positions = event.inputs[0] if transposed else output
    channels = weight.shape[1] if transposed else weight.shape[0] // groups
    inner = weight.numel // weight.shape[0] if not transposed else weight.shape[0] // groups * _size(weight.shape[2:])
    draft.rows += positions.numel / positions.shape[1]
    draft.n, draft.k, draft.groups = channels * (_size(weight.shape[2:]) if transposed else 1), inner, groups
    if transposed:
        draft.k = weight.shape[0] // groups


def _size(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _set_attention(draft: Draft, query: Sequence[int], key: Sequence[int], value: Sequence[int], samples: int) -> None:
    """Shapes (…, heads, length, size); more batches than samples (windows of an image) count as rows."""
    draft.heads, draft.kv_heads = query[-3], key[-3]
    draft.head_size, draft.value_head_size = query[-1], value[-1]
    draft.keys = max(draft.keys, key[-2])
    draft.rows += float(_size(query[:-3]) * query[-2])


def written_draft(draft: Draft, attention: WrittenAttention, samples: int) -> None:
    """Let attention of two products count in its operator.  The products are (samples · heads, length, …)."""
    left, right = attention.first.inputs[-2:] if attention.first.name == "baddbmm" else attention.first.inputs[:2]
    value = attention.second.inputs[1]
    batch = left.shape[0]
    heads = batch // samples if batch % samples == 0 else 1
    query = (samples, heads, left.shape[1], left.shape[2])
    _set_attention(draft, query, (samples, heads, right.shape[2], right.shape[1]), (1, 1, 1, value.shape[2]), samples)
    draft.causal |= attention.masked
    draft.dropout |= attention.dropped
    draft.kept_bytes += _STATISTIC_BYTES * float(batch * left.shape[1])  # what a fused kernel keeps of the scores
    draft.events.append(attention.second)


def moved_elements(graph: Graph, draft: Draft) -> float:
    """Elements that enter the operator from others and leave it to others, each once: what fused kernels move."""
    made = {value.storage for event in draft.events for value in event.outputs}
    mine = {event.index for event in draft.events}
    entering: dict[int, Value] = {}
    leaving: dict[int, Value] = {}
    for event in draft.events:
        for value in event.inputs:
            if value.storage in graph.trace.per_sample and (value.storage not in made or draft.kind == "gather"):
                largest = entering.get(value.storage)
                if largest is None or largest.numel < value.numel:
                    entering[value.storage] = value
        for value in event.outputs:
            readers = graph.readers.get(value.storage, ())
            if not readers or any(reader.index not in mine for reader in readers):
                leaving[value.storage] = value
    if draft.kind == "gather":  # reads as much of a table as it writes
        return 2.0 * sum(value.numel for value in leaving.values())
    return float(sum(value.numel for value in (*entering.values(), *leaving.values())))


def add_kept(draft: Draft, kept: KeptStorage, dtype: torch.dtype) -> None:
    """Let a storage count with the operator that keeps it."""
    if not kept.is_scores:
        _count(draft, kept, dtype, sign=1, again=kept.again)


def _count(draft: Draft, kept: KeptStorage, dtype: torch.dtype, *, sign: int, again: bool) -> None:
    elements = sign * kept.size_bytes / kept.dtype.itemsize if kept.dtype == dtype else 0.0
    size_bytes = 0.0 if elements else float(sign * kept.size_bytes)
    if again:
        draft.unfused_elements += elements
        draft.unfused_bytes += size_bytes
    else:
        draft.kept_elements += elements
        draft.kept_bytes += size_bytes


def settle_norm(
    draft: Draft, graph: Graph, keeps: Sequence[KeptStorage], elsewhere: set[int], dtype: torch.dtype
) -> None:
    """A norm written out in several kernels: fused, it keeps its input and a statistic per row.

    `keeps` are the storages that count with it, `elsewhere` those that others keep.
    """
    mine = {event.index for event in draft.events}
    made = {value.storage for event in draft.events for value in event.outputs}
    outside = (value for event in draft.events for value in event.inputs if value.storage not in made)
    source = next((value for value in outside if value.storage in graph.trace.per_sample), None)
    assert source is not None
    for kept in keeps:
        if kept.storage in made and all(saver.index in mine for saver in kept.savers) and not kept.again:
            _count(draft, kept, dtype, sign=-1, again=False)
            _count(draft, kept, dtype, sign=1, again=True)
    entering = 0.0 if source.storage in elsewhere else float(source.numel)
    statistics = source.numel / source.shape[-1]
    draft.kept_elements += entering
    draft.unfused_elements -= entering
    if dtype == torch.float32:
        draft.kept_elements += statistics
        draft.unfused_elements -= statistics
    else:
        draft.kept_bytes += _STATISTIC_BYTES * statistics
        draft.unfused_bytes -= _STATISTIC_BYTES * statistics


def separate_norm_bytes(event: Event, dtype: torch.dtype) -> float:
    """What `nn.RMSNorm` keeps besides where it has no kernel of its own (torch on the CPU): in fp32 the quotient; in 16
    bits its fp32 input and quotient in place of its input.  Both statistics are one number per row."""
    if event.name != "rms_norm":
        return 0.0
    elements = event.inputs[0].numel
    return float(elements * dtype.itemsize) if dtype.itemsize >= 4 else float(elements * (8 - dtype.itemsize))


def add_separate_norms(draft: Draft, dtype: torch.dtype) -> None:
    """The same, to the norm's operator."""
    extra = sum(separate_norm_bytes(event, dtype) for event in draft.events)
    if dtype.itemsize >= 4:
        draft.unfused_elements += extra / dtype.itemsize
    else:
        draft.unfused_bytes += extra


def is_written_norm(draft: Draft) -> bool:
    """Whether a module computes a norm from separate kernels."""
    names = {event.name for event in draft.events}
    return draft.kind == "elementwise" and bool(_NORM.search(draft.name)) and "rsqrt" in names


def finished(draft: Draft, graph: Graph, tokens: float, length: int) -> Operator:
    """Sizes per token; negative differences between separate and fused kernels count as none."""
    per = 1.0 / tokens
    selective = draft.kind in ("attention", "elementwise")
    operator = Operator(
        name=draft.name,
        kind=draft.kind,
        split=draft.split,
        parameters=draft.parameters,
        kept_elements_per_token=draft.kept_elements * per,
        kept_bytes_per_token=draft.kept_bytes * per,
        unfused_elements_per_token=max(0.0, draft.unfused_elements) * per,
        unfused_bytes_per_token=max(0.0, draft.unfused_bytes) * per,
        selective=selective,
    )
    if draft.kind in ("matmul", "convolution"):
        return replace(operator, rows_per_token=draft.rows * per, n=draft.n, k=draft.k, groups=draft.groups)
    if draft.kind == "attention":
        return replace(
            operator,
            rows_per_token=draft.rows * per,
            heads=draft.heads,
            kv_heads=draft.kv_heads,
            head_size=draft.head_size,
            value_head_size=draft.value_head_size,
            causal=draft.causal,
            window=draft.keys if draft.keys < length else None,
            dropout=draft.dropout,
        )
    channels = sum(event.inputs[0].shape[1] for event in draft.events if "batch_norm" in event.name)
    return replace(operator, elements_moved_per_token=moved_elements(graph, draft) * per, batch_statistics=channels)


def count_groups(draft: Draft) -> None:
    """Experts of a list are groups of one product."""
    owners = {name.rpartition(".")[0] for name in draft.weights}
    if draft.kind == "matmul" and "*" in draft.name.split(".") and len(owners) > 1:
        draft.groups = len(owners)
