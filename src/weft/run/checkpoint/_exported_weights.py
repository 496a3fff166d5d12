"""Weights under other names and in other shapes, made one at a time.

An exporter takes all weights and returns others.  It is asked once with tensors that have no content and say so to
whoever looks (fake ones), and what it does to them is noted; a tensor is then made of those that it comes from when its
turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

logger = logging.getLogger(__name__)

Exporter = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class LazyWeights(Protocol):
    """Weights that are read when they are asked for."""

    def __getitem__(self, name: str) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> torch.Size: ...
    def dtype(self, name: str) -> torch.dtype: ...


class _TracedOperator(NamedTuple):
    """The operator that made a tensor, with its operands."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int
    """Index among the results of the function."""


class _NeedsContent(Exception):
    """The exporter reads or writes values, so it cannot be traced on fake tensors."""


@final
class _OperatorTrace(TorchDispatchMode):
    """Records the operator that made each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, _TracedOperator] = {}
        self._alive: list[Tensor] = []
        """Keeps identities from being given twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An exporter that writes in place changes a tensor after it was recorded; the trace has values only.
        if func._schema.is_mutable:
            raise _NeedsContent
        results = func(*args, **(kwargs or {}))
        for index, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor):
                self._alive.append(result)
                self.steps[id(result)] = _TracedOperator(func, args, kwargs or {}, index)
        return results


@final
class ExportedWeights(Mapping[str, Tensor]):
    """The weights that an exporter returns, each computed when it is asked for.

    Where an exporter looks into its tensors or writes to them, all weights are loaded at once and exported in memory.
    """

    def __init__(self, weights: LazyWeights, exporter: Exporter) -> None:
        self._weights = weights
        self._last: tuple[str, Tensor] | None = None
        self._sources: dict[int, str] = {}
        self._shells = list[Tensor]()
        """Keeps their identities from being given twice."""
        self._notes = _OperatorTrace()
        # Traced on tensors without content, so that an export never holds more than one weight and what it comes from.
        try:
            self._results = self._traced(exporter)
        except Exception as problem:  # what is wrong with the exporter itself is raised again here
            why = "writes to tensors or needs what is in them" if isinstance(problem, _NeedsContent) else repr(problem)
            logger.info("the exporter is given all weights at once, whole in memory: followed without them, it %s", why)
            self._sources, self._results = {}, exporter({name: weights[name] for name in weights})

    def _traced(self, exporter: Exporter) -> Mapping[str, Tensor]:
        """Return what an exporter makes of weights without content."""
        with torch.no_grad(), FakeTensorMode(), self._notes:
            shells = {n: torch.empty(self._weights.shape(n), dtype=self._weights.dtype(n)) for n in self._weights}
            self._sources = {id(shell): name for name, shell in shells.items()}
            self._shells = list(shells.values())
            results = exporter(shells)
        if not all(self._is_known(result) for result in results.values()):
            raise _NeedsContent
        return results

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from weights, or has content of its own."""
        if id(tensor) in self._sources:
            return True
        step = self._notes.steps.get(id(tensor))
        if step is None:
            return not isinstance(tensor, FakeTensor)
        inputs = (leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Tensor))
        return all(self._is_known(leaf) for leaf in inputs)

    def __getitem__(self, name: str) -> Tensor:
        return self._made(self._results[name])

    def _made(self, tensor: Tensor) -> Tensor:
        if (source := self._sources.get(id(tensor))) is not None:
            if self._last is None or self._last[0] != source:  # experts of a layer are cut out of one, in turn
                self._last = None
                self._last = source, self._weights[source].contiguous()
            return self._last[1]
        step = self._notes.steps.get(id(tensor)) if self._sources else None
        if step is None:
            return tensor
        # The operators are repeated, from the weights on, each time that a result is asked for: nothing is cached but
        # the last weight.
        args, kwargs = tree_map_only(Tensor, self._made, (step.args, step.kwargs))
        made = step.function(*args, **kwargs)
        return tree_leaves(made)[step.result]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def shape(self, name: str) -> torch.Size:
        return self._results[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._results[name].dtype
