"""Blocking collectives over a `GroupView`, for layers that need the result at once.

Every function returns at once where the view has one member, and must otherwise be called on every rank of it, in the
same order.  Sequences are cut along a dim into shards whose lengths differ by at most one, the longer ones first; ranks
pad to the longest shard for the wire and trim afterwards, so that any length works, also one below the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from weft.comm.device import all_gather_single, reduce_scatter_single, runs_on_gloo
from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_reduce, traced_as
from weft.comm.trace_event import num_bytes


def shard_bounds(length: int, view: GroupView, index: int | None = None) -> tuple[int, int]:
    """Return [start, stop) of this rank's (or member `index`'s) shard of `length` positions."""
    return _bounds(length, view.size, view.index if index is None else index)


def all_reduce(tensor: Tensor, view: GroupView, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a contiguous tensor in place over the group and return it."""
    if view.group is not None:
        dist.all_reduce(tensor, op, group=view.group)
    return tensor


def all_gather(tensor: Tensor, view: GroupView) -> Tensor:
    """Return the tensors of all members, stacked along a new dim 0: (members, *shape).  Shapes must agree."""
    if view.group is None:
        return tensor[None]
    gathered = tensor.new_empty((view.size * tensor.numel(),))
    all_gather_single(gathered, tensor.contiguous().view(-1), view.group)
    return gathered.view(view.size, *tensor.shape)


def all_gather_shards(shard: Tensor, view: GroupView, dim: int, length: int) -> Tensor:
    """Return the whole tensor, `length` along `dim`, from every member's shard (see `shard_bounds`)."""
    if view.group is None:
        return shard
    longest = -(-length // view.size)
    gathered = all_gather(_padded(shard, dim, longest), view).unbind(0)
    if length % view.size == 0:
        return torch.cat(gathered, dim)
    sizes = [_extent(length, view.size, index) for index in range(view.size)]
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(gathered, sizes, strict=True)], dim)


def reduce_scatter_shards(whole: Tensor, view: GroupView, dim: int) -> Tensor:
    """Return this rank's shard along `dim` of the sum of `whole` over the group."""
    if view.group is None:
        return whole
    if torch.compiler.is_compiling():
        # One operator to the compiler, which cannot look into a group to tell what carries it and who watches.
        name = str(view.group.group_name)
        return torch.ops.weft.reduce_scatter_shards(whole, name, view.size, view.index, dim)
    length = whole.shape[dim]
    longest = -(-length // view.size)
    if runs_on_gloo(whole.device, view.group):  # its own reduce-scatter is one all-reduce per rank
        summed = whole.clone(memory_format=torch.contiguous_format)
        size_bytes = num_bytes(whole) // max(length, 1) * longest * view.size
        traced_as("reduce_scatter", size_bytes, view, lambda: start_all_reduce(summed, view))()
        return shard_of(summed, view, dim)
    sizes = [_extent(length, view.size, index) for index in range(view.size)]
    parts = torch.stack([_padded(part, dim, longest) for part in whole.split(sizes, dim)])
    summed = torch.empty_like(parts[0])
    reduce_scatter_single(summed.view(-1), parts.view(-1), view.group)
    return summed.narrow(dim, 0, sizes[view.index])


def _reduce_scatter_compiled(whole: Tensor, group: str, size: int, index: int, dim: int) -> Tensor:
    resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage]
    return reduce_scatter_shards(whole, GroupView(tuple(range(size)), index, resolve(group)), dim).clone()


def _like_reduce_scatter(whole: Tensor, group: str, size: int, index: int, dim: int) -> Tensor:
    shape = list(whole.shape)
    shape[dim] = _extent(shape[dim], size, index)
    return whole.new_empty(shape)


torch.library.custom_op("weft::reduce_scatter_shards", _reduce_scatter_compiled, mutates_args=())
torch.library.register_fake("weft::reduce_scatter_shards", _like_reduce_scatter)


def shard_of(whole: Tensor, view: GroupView, dim: int) -> Tensor:
    """Return this rank's shard along `dim` of a tensor that every member holds: no communication, own storage."""
    if view.group is None:
        return whole
    start, stop = shard_bounds(whole.shape[dim], view)
    return whole.narrow(dim, start, stop - start).contiguous()


def _bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    share, longer = divmod(length, parts)
    start = index * share + min(index, longer)
    return start, start + share + (index < longer)


def _extent(length: int, parts: int, index: int) -> int:
    start, stop = _bounds(length, parts, index)
    return stop - start


def _padded(shard: Tensor, dim: int, length: int) -> Tensor:
    missing = length - shard.shape[dim]
    if not missing:
        return shard
    shape = list(shard.shape)
    shape[dim] = missing
    return torch.cat([shard, shard.new_zeros(shape)], dim)
