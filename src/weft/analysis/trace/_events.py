"""A trace of a forward: its operators in order, on values that are known by their storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as an operator saw it: a view of a storage."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        storage = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage] # the only name of a storage without memory
        return cls(storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operator of a forward."""

    index: int
    name: str
    """`mm`, `native_layer_norm`; `attention` and `rms_norm` for what fused kernels compute."""
    arguments: tuple[Any, ...]
    """Arguments as passed, with a `Value` for each tensor."""
    keywords: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    module: str
    """Innermost module that was running."""
    call: int
    """Number of the user-level call (`F.linear`, `x * y`) that it belongs to."""
    mutates: bool
    reads: tuple[tuple[bool, str, int], ...] = ()
    """Values of each operand that has any, where they were asked for: whether it has one value, its dtype and a hash,
    with equal rows of several samples taken once."""


@dataclass(frozen=True, slots=True)
class Save:
    """A storage that autograd keeps for backward, and the call that wants it."""

    storage: int
    call: int


@dataclass(slots=True, kw_only=True)
class Trace:
    """A forward and its loss, of `samples` samples."""

    samples: int
    events: list[Event]
    saves: list[Save]
    storage_bytes: Mapping[int, int]
    storage_dtypes: Mapping[int, torch.dtype]
    parameters: Mapping[int, tuple[str, ...]]
    """Storage → all names of the parameter in it, the first one first."""
    buffers: Mapping[int, str]
    """Storage → name of the buffer in it."""
    per_sample: frozenset[int]
    """Storages of what is computed from the batch: the others are as large whatever the batch."""
    entries: Mapping[str, tuple[int, Value]]
    """Module → index of the first event inside, and the first tensor that enters it."""
    exits: Mapping[str, int]
    """Module → index of the event after its last one."""
    results: Mapping[str, tuple[Value | None, ...]]
    """Module → the leaves of what it returned when it ran first, None for those that are no tensors."""
    num_runs: Mapping[str, int]
    """Module → how often it ran."""
    touched: Mapping[int, frozenset[str]]
    """Storage → modules in which a function was called with it, even one that did nothing (`x.float()`), or a property
    was asked for."""
    inputs: Mapping[str, Value]
    """Fields of the batch."""
    outputs_of: tuple[tuple[Value, ...], ...]
    """Values that the model returns, by forward."""
    loss_event: int
    """Index of the first event of the loss."""
    notes: tuple[str, ...]

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Values that the model returns in any forward."""
        return tuple(value for outputs in self.outputs_of for value in outputs)
