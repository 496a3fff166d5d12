"""Shards for what no optimizer shard holds: parameters that are not trained, and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.comm.mesh import Mesh
from weft.techniques.core import CheckpointShard, ModelLayout, ParameterLayout, first_element


def module_shards(
    module: nn.Module, layout: ModelLayout, mesh: Mesh, trained: Collection[str]
) -> list[CheckpointShard]:
    """Return the shards of a model part's parameters (`model/…`) but for those `trained`, and of its persistent
    buffers (`buffer/…`).

    `trained` are the names, in the whole model, of what the gradient reducers' shards hold, also while a loop has
    frozen it.  Buffers that are not persistent are recomputed by their module and not saved.  No collective; the part's
    tensors must be contiguous.
    """
    # Stores hold masters of what is trained, and yield shards of them; the parameters themselves are casts of those.
    others = [(name, tensor) for name, tensor in module.named_parameters() if layout[name].name not in trained]
    shards = [_shard("model/", layout[name], parameter, mesh) for name, parameter in others]
    shards.extend(_shard("buffer/", layout[name], buffer, mesh) for name, buffer in _saved_buffers(module))
    return shards


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = set(module.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _shard(prefix: str, entry: ParameterLayout, tensor: Tensor, mesh: Mesh) -> CheckpointShard:
    start, copies, shape = 0, entry.reducing(mesh), entry.shape
    if isinstance(tensor, DTensor):  # under ZeRO-3 frozen parameters are cut like the others
        assert tensor.placements[-1] == Shard(0), f"{entry.name} is cut as {tensor.placements}, not along dim 0"
        start, copies = first_element(tensor.shape, entry.sharding(mesh)), entry.replicating(mesh)
        tensor = tensor.to_local()
    if tensor.is_complex():  # stored as real and imaginary parts, as those that are trained are
        tensor, shape = torch.view_as_real(tensor), torch.Size((*shape, 2))
    assert tensor.is_contiguous(), f"{entry.name} is not contiguous, so it has no flat storage to load into"
    return CheckpointShard(
        name=prefix + entry.name,
        shape=shape,
        tensor=tensor.detach().view(-1),
        split=entry.split,
        start=start,
        counts=entry.is_first_copy(mesh) and copies.index == 0,
    )
