"""Mistakes that are easily made where convolutions are split by channels; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from weft.model.blueprint import Blueprint
from weft.techniques.core import Split
from weft.techniques.randomness import keyed_dropout as randomness
from weft.techniques.tensor import channels, cuts, layers

Patch = tuple[Any, str, Any]


def _bias_of_every_rank() -> list[Patch]:
    """Every rank adds the bias to its part of the sum."""

    def summed(module: Any, reduce: Callable[[Tensor], Tensor], clear: Callable[[], None]) -> None:
        module.forward = lambda x: reduce(module._conv_forward(x, module.weight, module.bias))

    return [(channels, "sum_channels", summed)]


def _input_channels_not_summed() -> list[Patch]:
    """A rank goes on with what its own channels give."""
    plain = channels.sum_channels

    def alone(module: nn.Module, reduce: Callable[[Tensor], Tensor], clear: Callable[[], None]) -> None:
        plain(module, lambda x: x, clear)

    return [(channels, "sum_channels", alone)]


def _gradients_of_inputs_by_rank() -> list[Patch]:
    """What the convolution before is told is what this rank's output channels say."""
    return [(layers._Splitter, "_copied", lambda self, x: x)]


def _statistics_of_the_other_rank() -> list[Patch]:
    """Running statistics are saved and loaded as those of other channels."""
    plain = layers.split_parameters

    def swapped(blueprint: Blueprint, view: Any) -> dict[str, Split]:
        found = plain(blueprint, view)
        running = {name: split for name, split in found.items() if ".running_" in name}
        turned = {n: replace(split, index=split.parts - 1 - split.index) for n, split in running.items()}
        return found | turned

    return [(layers, "split_parameters", swapped)]


def _blocks_of_channels_lost() -> list[Patch]:
    """A norm behind fused halves takes the first of all channels, and the convolution some of each half."""
    plain = cuts._split

    def unfused(name: str, tensor: Tensor, dim: int, rule: Any, view: Any) -> Split:
        return plain(name, tensor, dim, replace(rule, blocks=1) if rule.kind == "channels" else rule, view)

    return [(cuts, "_split", unfused)]


def _channels_dropped_by_rank() -> list[Patch]:
    """Each rank drops of its channels those that the first rank drops of its own."""
    return [(randomness.KeyedDropout, "_offsets", lambda self, x, state, width: (0, 0))]


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "bias of every rank": _bias_of_every_rank,
    "input channels not summed": _input_channels_not_summed,
    "gradients of inputs by rank": _gradients_of_inputs_by_rank,
    "statistics of the other rank": _statistics_of_the_other_rank,
    "blocks of channels lost": _blocks_of_channels_lost,
    "channels dropped by rank": _channels_dropped_by_rank,
}
