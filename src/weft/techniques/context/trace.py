"""Where a model lets its tokens see one another: forwards in training and in evaluation on the meta device, at two
lengths.

Ranks that share a sequence give `scaled_dot_product_attention` what it needs of other ranks.  Whatever else mixes
tokens would silently see those of one rank alone.  A blueprint says that there is nothing else (`Blueprint.attention`);
this is a net below that word, not a proof: it refuses by name convolutions and recurrent layers, norms over the batch,
and tensors of tokens × tokens that are made outside of that function (attention written out), but sees no shift along
the sequence and no sum over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

from weft.errors import PlanError
from weft.model.attention.call import ATTENTION
from weft.model.blueprint import Blueprint
from weft.model.meta_forward import copy_on_meta

_MIXING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.RNNBase, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.BatchNorm3d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
_ATTENTION = (*ATTENTION, F.multi_head_attention_forward)
_Square = tuple[str, str, tuple[int, ...]]
"""Module, operator and the dims that are as long as the sequence, where there are two or more."""


def attending_modules(blueprint: Blueprint) -> list[str]:
    """Return the modules that ever call an attention function themselves.  Not collective; takes no memory.

    Raises:
        PlanError: the model mixes tokens in another way, or not at all.
    """
    for name, module in blueprint.module.named_modules():
        if isinstance(module, _MIXING):
            raise _refused(f"{name} is an nn.{type(module).__name__}, which does not work token by token")
    if blueprint.example is None:
        raise _refused("it brings no example batch, so nothing shows where its tokens see one another")
    # A dry run's modes would make fakes of what is on the meta device.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        batch = blueprint.example(1)
        length = batch["tokens"].shape[1]
        if length < 3:
            raise _refused(f"samples of {length} tokens are too short to be shared")
        runs = [
            [_watched(blueprint, batch, size, trains=trains) for size in (length, length - 1)]
            for trains in (True, False)
        ]
    attending = list(dict.fromkeys(name for run in runs for name in run[0].attending))
    for run in runs:
        _check(*run)
    return attending


def _check(first: _Watch, second: _Watch) -> None:
    if both := [square for square in first.squares if square in second.squares]:
        name, operator, _ = both[0]
        raise _refused(
            f"{name or 'the forward'} makes a tensor of tokens × tokens by {operator}: write attention as a call of"
            " F.scaled_dot_product_attention, whose scores ranks compute together"
        )
    if not first.attending:
        raise _refused("it never calls scaled_dot_product_attention")


def _refused(what: str) -> PlanError:
    return PlanError(
        f"plan.mesh.context lets ranks share a sequence, but {what}, and a rank would see its own tokens alone."
        " Use plan.mesh.context = 1, and tensor ranks or recomputation for long sequences."
    )


def _watched(blueprint: Blueprint, batch: Mapping[str, Tensor], length: int, *, trains: bool) -> _Watch:
    """One forward, in training or in evaluation, of samples of `length` tokens, without positions or documents of their
    own."""
    watch = _Watch(length)
    module = copy_on_meta(blueprint.module).to("meta").train(trains)
    for name, inner in module.named_modules():
        inner.register_forward_pre_hook(partial(watch.enter, name))
        inner.register_forward_hook(watch.leave)
    inputs = {keyword: batch[field] for keyword, field in blueprint.inputs.items() if field == "tokens"}
    with watch.calls(), watch.operators(), torch.set_grad_enabled(trains):
        module(**{keyword: field[:, :length] for keyword, field in inputs.items()})
    return watch


class _Watch:
    """What a forward was seen to do."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.inside: list[str] = []
        self.attending: list[str] = []
        self.squares: list[_Square] = []
        self.is_within = False
        """Whether the attention function is at work, which may make what it likes."""

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.inside.append(name)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inside.pop()

    def calls(self) -> _Calls:
        return _Calls(self)

    def operators(self) -> _Operators:
        return _Operators(self)


class _Calls(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ATTENTION:
            return func(*args, **(kwargs or {}))
        self._watch.attending.append(self._watch.inside[-1])
        self._watch.is_within = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._watch.is_within = False


class _Operators(TorchDispatchMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            made = args[0].new_empty(args[0].shape[0], args[1].shape[2])  # the kernel would ask for bf16
        else:
            made = func(*args, **(kwargs or {}))
        watch = self._watch
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and not watch.is_within:
                dims = tuple(dim for dim, size in enumerate(leaf.shape) if size == watch.length)
                if len(dims) > 1:
                    inside = watch.inside[-1] if watch.inside else ""
                    watch.squares.append((inside, func.overloadpacket.__name__, dims))
        return made
