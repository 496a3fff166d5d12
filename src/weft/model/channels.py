"""Modules whose channels tensor ranks share out: convolutions by output or input channels, and what stands between."""

from __future__ import annotations

from typing import Any

from torch import nn

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_CONVOLVING = frozenset((cls.forward, vars(cls)["_conv_forward"]) for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
"""Functions that torch's own convolutions call."""


def is_convolution(module: nn.Module) -> bool:
    """Whether it is a convolution that is not transposed."""
    return isinstance(module, Convolution)


def computes_plainly(module: nn.Module) -> bool:
    """Whether a convolution does nothing of its own beside convolving; of any other module: true."""
    own: Any = type(module)
    return not isinstance(module, Convolution) or (own.forward, own._conv_forward) in _CONVOLVING


def groups_of(module: nn.Module) -> str | None:
    """The attribute of a module that works channel by channel which counts groups of channels; None: it has none."""
    if isinstance(module, nn.GroupNorm):
        return "num_groups"
    return "groups" if isinstance(module, Convolution) else None


def channel_tensors(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters and buffers of a module that works channel by channel, each with an entry per channel
    along dim 0; none: it is no such module.

    Such are batch norms, group norms and convolutions in groups.
    """
    if isinstance(module, nn.GroupNorm) or (isinstance(module, Convolution) and module.groups > 1):
        leaves = ("weight", "bias")
    elif isinstance(module, _BatchNorm):
        leaves = ("weight", "bias", "running_mean", "running_var")
    else:
        return ()
    return tuple(leaf for leaf in leaves if getattr(module, leaf, None) is not None)


def is_channelwise(module: nn.Module) -> bool:
    """Whether it works channel by channel, or group by group; see `channel_tensors`."""
    return isinstance(module, nn.GroupNorm | _BatchNorm) or (isinstance(module, Convolution) and module.groups > 1)


def channel_cuts(module: nn.Module, kind: str) -> dict[str, int] | None:
    """Dimension along which each tensor of a module is cut under `channel_out`, `channel_in` or `channels`; None: the
    module does not split so."""
    if kind == "channels":
        return dict.fromkeys(channel_tensors(module), 0) if is_channelwise(module) else None
    if not isinstance(module, Convolution) or module.groups > 1:
        return None
    return {"weight": 0, "bias": 0} if kind == "channel_out" else {"weight": 1}
