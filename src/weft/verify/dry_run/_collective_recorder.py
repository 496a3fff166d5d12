"""Stands between the step of a dry run and torch: records every collective, and answers questions that need values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,  # pyright: ignore[reportPrivateImportUsage]
    unset_fake_temporarily,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.fake import group_of
from weft.comm.mesh import GroupName, Mesh

_AXES: tuple[GroupName, ...] = ("tensor", "context", "shard", "replicate", "data", "pipeline", "world")
_NAMES: Mapping[str, str] = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}


def _one(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _all_of(tensor: Tensor) -> Tensor:
    """Return the result of `nonzero` for a tensor without zeros: (elements, dims)."""
    return torch.zeros((tensor.numel(), tensor.ndim), dtype=torch.int64, device=tensor.device)


ANSWERS: Mapping[Any, Callable[[Tensor], Any]] = {
    torch.ops.aten.equal.default: lambda tensor: True,
    torch.ops.aten._local_scalar_dense.default: _one,
    torch.ops.aten.nonzero.default: _all_of,
}
"""Answers to questions that need real values: comparisons hold, counts and norms are 1, nothing is zero."""


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """One collective or message, as this rank starts it."""

    op: str
    axis: str
    """Name of the mesh's group, or of one that was made for something: `tied`, and `pipeline` for a channel of its own
    between two ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    size_bytes: int
    """Size of the largest of its tensors: what an all-gather ends with, and a reduce-scatter or an exchange of all with
    all starts from."""
    dtype: torch.dtype
    peer: int | None = None
    """Global rank of a message's other end, or a broadcast's source."""


class CollectiveRecorder(TorchDispatchMode):
    """Use it inside a `FakeTensorMode`.

    Fake tensors have shapes and no values.  Where the engine asks for a value it gets that of a step in which all goes
    well: norms and counts are 1, a comparison is true, every label counts.  One parameter counts as unused, so the
    small all-reduces of flags by which ranks agree on it are among the collectives.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.issued: list[IssuedCollective] = []
        self._mesh = mesh
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        for axis in _AXES:
            view = mesh[axis]
            if view.group is not None:
                self._groups.setdefault(view.group.group_name, (axis, view.ranks))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A DeviceMesh steps out of fake tensors to look at its ranks.
        if args and isinstance(args[0], FakeTensor) and func in ANSWERS:
            return ANSWERS[func](args[0])
        if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            return _grouped(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func._opname in _NAMES:
            self._write_down(func._opname, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _write_down(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs)
        group = group_of(given["process_group"])
        axis, ranks = self._groups.get(group.group_name, (group.group_desc, ()))
        if not ranks:
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
        # What comes in from others in an exchange may be larger than what a rank sends.
        whole = given["input"] if name == "alltoall_base_" else max(_tensors(args), key=lambda tensor: tensor.nbytes)
        peer = given.get("dst", given.get("src", given.get("root_rank")))
        self.issued.append(
            IssuedCollective(
                _NAMES[name], axis, ranks, whole.nbytes, whole.dtype, None if peer is None else ranks[int(peer)]
            )
        )


def _grouped(rows: Tensor, matrices: Tensor, offs: Tensor | None = None, *more: Any, **named: Any) -> Tensor:
    """A grouped product of fakes: torch's answer knows bf16 alone, and widths of whole 16 bytes in it (2.13); CPUs
    compute others, too.  Either operand has two dims where groups are runs of it (`offs`), else three."""
    groups = (offs.shape[0],) if offs is not None and rows.dim() == matrices.dim() == 2 else ()
    groups = rows.shape[:1] if rows.dim() == matrices.dim() == 3 else groups
    return rows.new_empty(*groups, rows.shape[-2], matrices.shape[-1])


class Copies(TorchFunctionMode):
    """Lets modules be copied inside a `FakeTensorMode`: what has no fake tensor has none in its copy either.

    Torch refuses a copy of another type than the tensor's, which is what that mode makes of one on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
