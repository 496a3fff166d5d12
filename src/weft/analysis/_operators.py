"""Turn the events of one part of a model into its operators, in sizes per token."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.analysis._kept import KeptStorage
from weft.analysis.trace._events import Event, Value
from weft.analysis.trace._graph import AttentionShapes, Graph, WrittenAttention, kind_of
from weft.analysis.trace._trace import LOSS
from weft.model.profile import Operator, OperatorKind, OperatorSplit

_STATISTIC_BYTES = 4
_NORM = re.compile(r"norm", re.IGNORECASE)


@dataclass(slots=True)
class _KeptAmount:
    """Size that is kept of the traced batch: elements in the precision that is described, and bytes of other dtypes."""

    elements: float = 0.0
    size_bytes: float = 0.0

    def add(self, elements: float, size_bytes: float) -> None:
        self.elements += elements
        self.size_bytes += size_bytes


@dataclass(slots=True, kw_only=True)
class Draft:
    """An operator while its events are gathered."""

    name: str
    kind: OperatorKind
    split: OperatorSplit
    events: list[Event] = field(default_factory=list[Event])
    written: dict[int, WrittenAttention] = field(default_factory=dict[int, WrittenAttention])
    """Attention of two products, by the index of the second, which stands for it among the events."""
    parameters: int = 0
    summed_elements: float = 0.0
    """Elements of what it reads whose gradient is a sum over tensor ranks."""
    kept: _KeptAmount = field(default_factory=_KeptAmount)
    unfused: _KeptAmount = field(default_factory=_KeptAmount)
    """Size that is kept beyond or, where negative, below the size that fused kernels keep."""


def draft_key(root: nn.Module, prefix: str, graph: Graph, event: Event) -> tuple[str, OperatorKind]:
    """Return the key that events of one operator share: products by weight, the rest by module and kind."""
    kind = kind_of(event)
    if event.module == LOSS:
        return LOSS, kind
    if kind in ("matmul", "convolution", "gather") and graph.weights(event):
        owner, _, leaf = _matrix_of(graph, event).rpartition(".")
        name = place(root, prefix, owner)
        return (name if leaf == "weight" else f"{name}.{leaf}".strip(".")), kind
    is_leaf = event.module and not any(True for _ in root.get_submodule(event.module).children())
    suffix = "" if is_leaf and kind == "elementwise" else _SUFFIXES[kind]
    if kind == "matmul":  # of activations: one operator for each shape
        suffix += f".{event.inputs[-1].shape[-2]}x{event.inputs[-1].shape[-1]}"
    return f"{place(root, prefix, event.module)}.{suffix}".strip("."), kind


def place(root: nn.Module, prefix: str, module: str) -> str:
    """A module's name inside the part that begins with `prefix`, with `*` for the elements of a list (experts).

    What runs between two blocks may be another module's: it has its whole name.
    """
    if not f"{module}.".startswith(prefix):
        prefix = ""
    inside = "" if f"{module}." == prefix else module.removeprefix(prefix)
    parts = inside.split(".")
    lists = [(prefix + ".".join(parts[:at])).rstrip(".") for at in range(len(parts))]
    return ".".join(
        "*" if part.isdecimal() and isinstance(root.get_submodule(above), nn.ModuleList) else part
        for part, above in zip(parts, lists, strict=True)
    )


_SUFFIXES = {
    "matmul": "product",
    "attention": "scores",
    "elementwise": "elementwise",
    "gather": "gather",
    "convolution": "convolution",
}


def _matrix_of(graph: Graph, event: Event) -> str:
    """The parameter with most dimensions that a product or lookup reads, not its bias."""
    ranks = {graph.name_of(v.storage, event): len(v.shape) for v in event.inputs if v.storage in graph.derived}
    return max(ranks, key=lambda name: ranks[name])


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


def count_kept(
    draft: Draft, graph: Graph, keeps: Iterable[KeptStorage], elsewhere: Collection[int], dtype: torch.dtype
) -> None:
    """Add the bytes of storages to the operator that keeps them; `elsewhere` are all that fused kernels keep.

    A norm written out in several kernels keeps its input and a statistic per row once it is fused, and nothing inside.
    """
    mine, made = {event.index for event in draft.events}, _made(draft)
    norm = _entering_norm(draft, graph, made)
    for storage in keeps:
        inside = storage.storage in made and all(saver.index in mine for saver in storage.savers)
        elements = storage.size_bytes / storage.dtype.itemsize if storage.dtype == dtype else 0.0
        amount = draft.unfused if storage.again or (norm is not None and inside) else draft.kept
        amount.add(elements, 0.0 if elements else float(storage.size_bytes))
    extra = sum(separate_norm_bytes(event, dtype) for event in draft.events)
    draft.unfused.add(*((extra / dtype.itemsize, 0.0) if dtype.itemsize >= 4 else (0.0, extra)))
    for rows in (attention.num_rows for attention in draft.written.values()):
        draft.kept.add(0.0, _STATISTIC_BYTES * float(rows))  # what a fused kernel keeps of the scores
    if norm is not None:
        entering = 0.0 if norm.storage in elsewhere else float(norm.numel)
        statistics = norm.numel / norm.shape[-1]
        is_wide = dtype == torch.float32
        fused = (entering + (statistics if is_wide else 0.0), 0.0 if is_wide else _STATISTIC_BYTES * statistics)
        draft.kept.add(*fused)
        draft.unfused.add(-fused[0], -fused[1])


def _made(draft: Draft) -> set[int]:
    return {value.storage for event in draft.events for value in event.outputs}


def _entering_norm(draft: Draft, graph: Graph, made: Collection[int]) -> Value | None:
    """The activation that a norm made of separate kernels normalises; None where the operator is no such norm."""
    names = {event.name for event in draft.events}
    if draft.kind != "elementwise" or not _NORM.search(draft.name) or "rsqrt" not in names:
        return None
    outside = (value for event in draft.events for value in event.inputs if value.storage not in made)
    return next(value for value in outside if value.storage in graph.trace.per_sample)


def separate_norm_bytes(event: Event, dtype: torch.dtype) -> float:
    """Return the bytes that `nn.RMSNorm` keeps besides where it has no kernel of its own (torch on the CPU): in fp32
    the quotient; in 16 bits its fp32 input and quotient in place of its input. Both statistics are one number per row.
    """
    if event.name != "rms_norm":
        return 0.0
    elements = event.inputs[0].numel
    return float(elements * dtype.itemsize) if dtype.itemsize >= 4 else float(elements * (8 - dtype.itemsize))


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def operator_of(draft: Draft, graph: Graph, tokens: float, length: int) -> Operator:
    """Sizes per token; negative differences between separate and fused kernels count as none."""
    per = 1.0 / tokens
    return Operator(
        name=draft.name,
        kind=draft.kind,
        split=draft.split,
        parameters=draft.parameters,
        summed_elements_per_token=draft.summed_elements * per,
        kept_elements_per_token=draft.kept.elements * per,
        kept_bytes_per_token=draft.kept.size_bytes * per,
        unfused_elements_per_token=max(0.0, draft.unfused.elements) * per,
        unfused_bytes_per_token=max(0.0, draft.unfused.size_bytes) * per,
        selective=draft.kind in ("attention", "elementwise"),
        **_sizes(draft, graph, per, length),
    )


def _sizes(draft: Draft, graph: Graph, per: float, length: int) -> Mapping[str, Any]:
    match draft.kind:
        case "matmul":
            products = [_product_sizes(graph, event) for event in draft.events]
            rows, n, k, groups = zip(*products, strict=True)
            listed = {name.rpartition(".")[0] for event in draft.events for name in graph.weights(event)}
            is_list = "*" in draft.name.split(".") and len(listed) > 1  # experts of a list are groups of one product
            groups = len(listed) if is_list else max(groups)
            return {"rows_per_token": sum(rows) * per, "n": max(n), "k": max(k), "groups": groups}
        case "convolution":
            calls = [_convolution_sizes(event) for event in draft.events]
            _, n, k, groups = calls[-1]
            return {"rows_per_token": sum(call[0] for call in calls) * per, "n": n, "k": k, "groups": groups}
        case "attention":
            return _attention_sizes(draft, graph.trace.samples, per, length)
        case _:
            channels = sum(event.inputs[0].shape[1] for event in draft.events if "batch_norm" in event.name)
            return {"elements_moved_per_token": _moved_elements(graph, draft) * per, "batch_statistics": channels}


def _product_sizes(graph: Graph, event: Event) -> tuple[float, int, int, int]:
    """Rows, columns and inner size of a product, and how many stand side by side."""
    a, b = event.inputs[-2:] if event.name in ("addmm", "baddbmm") else event.inputs[:2]
    k, n = b.shape[-2], b.shape[-1]
    groups = b.shape[0] if len(b.shape) == 3 else 1
    if a.storage in graph.derived and b.storage not in graph.derived:  # the weight stands on the left
        return float(n), a.shape[-2], a.shape[-1], groups
    return float(a.numel / max(k, 1)), n, k, groups


def _convolution_sizes(event: Event) -> tuple[float, int, int, int]:
    """Positions, output channels (of every kernel position where it is transposed), inner size and groups."""
    (entering, weight), groups = event.inputs[:2], int(event.arguments[8])
    is_transposed = bool(event.arguments[6])
    positions = entering if is_transposed else event.outputs[0]
    rows = positions.numel / positions.shape[1]
    if is_transposed:
        return rows, weight.shape[1] * math.prod(weight.shape[2:]), weight.shape[0] // groups, groups
    return rows, weight.shape[0] // groups, weight.numel // weight.shape[0], groups


def _attention_sizes(draft: Draft, samples: int, per: float, length: int) -> Mapping[str, Any]:
    """Shapes are (…, heads, length, size); more batches than samples (windows of an image) count as rows."""
    calls = [draft.written[e.index].shapes(samples) if e.index in draft.written else _shapes(e) for e in draft.events]
    fused = [event.keywords for event in draft.events if event.index not in draft.written]
    keys = max(key[-2] for _, key, _ in calls)
    query, key, value = calls[-1]
    return {
        "rows_per_token": sum(float(math.prod(query[:-3]) * query[-2]) for query, _, _ in calls) * per,
        "heads": query[-3],
        "kv_heads": key[-3],
        "head_size": query[-1],
        "value_head_size": value[-1],
        "causal": any(call["causal"] for call in fused) or any(one.masked for one in draft.written.values()),
        "window": keys if keys < length else None,
        "dropout": any(call["dropout"] for call in fused) or any(one.dropped for one in draft.written.values()),
    }


def _shapes(event: Event) -> AttentionShapes:
    query, key, value = event.inputs[:3]
    return query.shape, key.shape, value.shape


def _moved_elements(graph: Graph, draft: Draft) -> float:
    """Elements that enter the operator from others and leave it to others, each once: what fused kernels move."""
    made, mine = _made(draft), {event.index for event in draft.events}
    entering: dict[int, Value] = {}
    leaving: dict[int, Value] = {}
    for event in draft.events:
        for value in event.inputs:
            if value.storage in graph.trace.per_sample and value.storage not in made:
                entering[value.storage] = max(entering.get(value.storage, value), value, key=lambda one: one.numel)
        for value in event.outputs:
            readers: Sequence[Event] = graph.readers.get(value.storage, ())
            if not readers or any(reader.index not in mine for reader in readers):
                leaving[value.storage] = value
    if draft.kind == "gather":  # reads as much of a table as it writes
        return 2.0 * sum(value.numel for value in leaving.values())
    return float(sum(value.numel for value in (*entering.values(), *leaving.values())))
