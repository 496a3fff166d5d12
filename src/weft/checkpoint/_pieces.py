"""Pieces for what no optimizer shard holds: frozen parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.comm import Mesh
from weft.parallel import ModelLayout, ParameterLayout, Piece
from weft.parallel.zero3 import first_element


def module_pieces(module: nn.Module, layout: ModelLayout, mesh: Mesh) -> list[Piece]:
    """Return the pieces of a model part's frozen parameters (`model/…`) and persistent buffers (`buffer/…`).

    Trained parameters are left out: the gradient store's shards hold them.  Buffers that are not persistent are
    recomputed by their module and not saved.  No collective; the part's tensors must be contiguous.
    """
    pieces = list[Piece]()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            pieces.append(_sharded_piece(layout[name], parameter, mesh))
        else:
            pieces.append(_piece("model/", layout[name], parameter, mesh))
    pieces.extend(_piece("buffer/", layout[name], buffer, mesh) for name, buffer in _saved_buffers(module))
    return pieces


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = set(module.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _piece(prefix: str, entry: ParameterLayout, tensor: Tensor, mesh: Mesh) -> Piece:
    assert tensor.is_contiguous(), f"{entry.name} is not contiguous, so it has no flat storage to load into"
    return Piece(
        name=prefix + entry.name,
        shape=entry.shape,
        tensor=tensor.detach().view(-1),
        split=entry.split,
        counts=entry.is_first_copy(mesh) and entry.reducing(mesh).index == 0,
    )


def _sharded_piece(entry: ParameterLayout, parameter: DTensor, mesh: Mesh) -> Piece:
    """Under ZeRO-3 a frozen parameter is cut like the others."""
    cuts = [placement for placement in parameter.placements if isinstance(placement, Shard)]
    assert cuts == [Shard(0)], f"{entry.name} is cut as {parameter.placements}, not along dim 0"
    local = parameter.to_local().detach()
    return Piece(
        name=f"model/{entry.name}",
        shape=entry.shape,
        tensor=local.view(-1),
        split=entry.split,
        start=first_element(parameter.shape, entry.sharding(mesh)),
        counts=entry.is_first_copy(mesh) and entry.replicating(mesh).index == 0,
    )
