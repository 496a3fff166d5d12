"""Pieces for what no optimizer shard holds: parameters that are not trained, and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.comm.mesh import Mesh
from weft.techniques.core import ModelLayout, ParameterLayout, Piece, first_element


def module_pieces(module: nn.Module, layout: ModelLayout, mesh: Mesh, trained: Collection[str]) -> list[Piece]:
    """Return the pieces of a model part's parameters (`model/…`) but for those `trained`, and of its persistent
    buffers (`buffer/…`).

    `trained` are the names, in the whole model, of what the gradient reducers' shards hold, also while a loop has
    frozen it.  Buffers that are not persistent are recomputed by their module and not saved.  No collective; the part's
    tensors must be contiguous.
    """
    others = [(name, each) for name, each in module.named_parameters() if layout[name].name not in trained]
    pieces = [_piece("model/", layout[name], parameter, mesh) for name, parameter in others]
    pieces.extend(_piece("buffer/", layout[name], buffer, mesh) for name, buffer in _saved_buffers(module))
    return pieces


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = set(module.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _piece(prefix: str, entry: ParameterLayout, tensor: Tensor, mesh: Mesh) -> Piece:
    start, copies, shape = 0, entry.reducing(mesh), entry.shape
    if isinstance(tensor, DTensor):  # under ZeRO-3 frozen parameters are cut like the others
        assert tensor.placements[-1] == Shard(0), f"{entry.name} is cut as {tensor.placements}, not along dim 0"
        start, copies = first_element(tensor.shape, entry.sharding(mesh)), entry.replicating(mesh)
        tensor = tensor.to_local()
    if tensor.is_complex():  # stored as real and imaginary parts, as those that are trained are
        tensor, shape = torch.view_as_real(tensor), torch.Size((*shape, 2))
    assert tensor.is_contiguous(), f"{entry.name} is not contiguous, so it has no flat storage to load into"
    return Piece(
        name=prefix + entry.name,
        shape=shape,
        tensor=tensor.detach().view(-1),
        split=entry.split,
        start=start,
        counts=entry.is_first_copy(mesh) and copies.index == 0,
    )
