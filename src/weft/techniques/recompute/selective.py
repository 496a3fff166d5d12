"""Selective recomputation of what torch may also write in place.

Torch's own caches a result and refuses, or misses, that the block writes into its memory afterwards, as recurrent
layers do on a CPU.  Here such a result is not kept but computed again, so that recomputation never changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from weft.techniques.core.activation_store import ActivationStore


@dataclass(slots=True)
class _Result:
    """What an operator returned in the forward, until the recomputation takes it."""

    operation: Any
    value: Any
    """Detached, or the ticket of the activation store; None once it was written to or taken."""
    watched: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])
    """Tensors of its memory with their versions: a write to any of them changes the value."""

    def take(self) -> Any:
        """The value as it was returned; None where it is gone or was written to since."""
        value, watched = self.value, self.watched
        self.drop()
        return None if any(tensor._version != version for tensor, version in watched) else value

    def drop(self) -> None:
        """Let go of the value."""
        self.value, self.watched = None, []


class _Results:
    """The kept results of one block's forward, in order.  `activation_store` takes those that may leave the device."""

    def __init__(self, activation_store: ActivationStore | None) -> None:
        self.activation_store = activation_store
        self.in_order: list[_Result] = []
        self._by_storage: dict[int, list[_Result]] = {}

    def keep(self, operation: Any, value: Any) -> None:
        result = _Result(operation, tree_map(_detached, value))
        self.in_order.append(result)
        for leaf in tree_leaves(result.value):
            if isinstance(leaf, Tensor):
                self._by_storage.setdefault(_storage(leaf), []).append(result)
                result.watched.append((leaf, leaf._version))
        if self.activation_store is not None:
            self._send(result, self.activation_store)

    def _send(self, result: _Result, activation_store: ActivationStore) -> None:
        """Offload a result as far as possible; a tensor without memory stays and counts its versions."""

        def send(leaf: Any) -> Any:
            waiting = activation_store.pack(leaf) if isinstance(leaf, Tensor) else None
            return leaf if waiting is None else waiting

        result.value = tree_map(send, result.value)
        result.watched = [(activation_store.watch(tensor), version) for tensor, version in result.watched]

    def watch(self, value: Any) -> None:
        """Watch tensors that share kept memory but have version counters of their own (`_unsafe_view`)."""
        for leaf in tree_leaves(value):
            for result in self._by_storage.get(_storage(leaf), ()) if isinstance(leaf, Tensor) else ():
                if result.value is not None:
                    watch = _detached if self.activation_store is None else self.activation_store.watch
                    result.watched.append((watch(leaf), leaf._version))

    def forget(self, written: Tensor) -> None:
        """Drop the results whose memory an operator is about to write to."""
        for result in self._by_storage.pop(_storage(written), ()):
            result.drop()


class _Keeping(TorchDispatchMode):
    """Around the forward."""

    def __init__(self, results: _Results, keeps: Callable[[Any], bool]) -> None:
        super().__init__()
        self._results, self._keeps = results, keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        # Before the call: afterwards the kept result would hold the overwritten numbers.
        for tensor in _written(func, args, keywords):
            self._results.forget(tensor)
        value = func(*args, **keywords)
        if self._keeps(func):
            self._results.keep(func, value)
        elif "unsafe" in func.__name__:
            self._results.watch(value)
        return value


class _Taking(TorchDispatchMode):
    """Around the recomputation, which makes the same calls in the same order."""

    def __init__(self, results: _Results, keeps: Callable[[Any], bool]) -> None:
        super().__init__()
        self._results, self._keeps = results, keeps
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._keeps(func):
            return func(*args, **(kwargs or {}))
        kept = self._results.in_order
        number, self._next = self._next, self._next + 1
        if number >= len(kept) or kept[number].operation is not func:
            raise RuntimeError(
                f"a recomputed block calls {func} where its forward did not: what it does depends on something that"
                " changes between forward and backward. Use plan.memory.recompute = 'none' for this block."
            )
        value = kept[number].take()
        if value is None:  # dropped, because it was written to: it is computed again
            return func(*args, **(kwargs or {}))
        activation_store = self._results.activation_store
        return value if activation_store is None else tree_map(activation_store.fetch, value)


def selective_contexts(
    keeps: Callable[[Any], bool], activation_store: ActivationStore | None = None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes for a block's forward and its recomputation.

    `keeps` says which operators are not run again; `activation_store` takes their results, if they leave the device.
    """
    results = _Results(activation_store)
    return _Keeping(results, keeps), _Taking(results, keeps)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False)] + [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    written = [value for argument, value in values if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _detached(value: Any) -> Any:
    """Return a tensor without its graph, which would keep the result alive, and with its version counter."""
    if not isinstance(value, Tensor):
        return value
    counts_versions = torch._C.DispatchKey.ADInplaceOrView  # pyright: ignore[reportPrivateUsage]
    with torch._C._SetExcludeDispatchKeyGuard(counts_versions, False):  # pyright: ignore[reportPrivateUsage]
        return value.detach()
