"""Convolutions cut by channels over the tensor group, and what works channel by channel between them.

A convolution cut by its output channels runs as it is, on the whole image; so do batch norms, group norms and
convolutions in groups, on this rank's channels.  One cut by its input channels gives a part of each sum.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.channels import Convolution, computes_plainly, groups_of
from weft.model.localising import set_number


def check_bare(blueprint: Blueprint) -> None:
    """Raise PlanError where a convolution that is split is one inside an adapter, whose pair has no rule, or does more
    than its class of torch's, which is all that is computed of one that sums over input channels."""
    for name, module in blueprint.module.named_modules():
        if blueprint.kind_of(name) == "channel_in" and not computes_plainly(module):
            raise PlanError(
                f'model.split gives {name}, a {type(module).__name__} with a forward of its own, the kind "channel_in",'
                " and ranks would compute nothing of it but the convolution. Use a plain nn.Conv1d, Conv2d or Conv3d,"
                ' or the kind "replicate".'
            )
        if name.endswith(".base_layer") and blueprint.kind_of(name) in ("channel_out", "channel_in"):
            raise PlanError(
                f"plan.mesh.tensor > 1 cannot be had with model.adapter on {name.removesuffix('.base_layer')}: nothing"
                " says how an adapter beside a convolution splits. Leave convolutions out of model.adapter.targets, or"
                " use plan.mesh.tensor = 1."
            )


def sum_channels(module: nn.Module, reduce: Callable[[Tensor], Tensor], clear: Callable[[], None]) -> None:
    """Let a convolution sum over all input channels, of which each rank has a part, and add its bias once.

    `clear` is called before: nobody reads the input of the columns before it any more.
    """
    assert isinstance(module, Convolution), "the cut was checked"

    def forward(input: Tensor) -> Tensor:
        clear()
        output = reduce(module._conv_forward(input, module.weight, None))  # pyright: ignore[reportPrivateUsage]
        if module.bias is None:
            return output
        return output + module.bias.view(-1, *(1,) * len(module.kernel_size))

    module.forward = forward


def share_channels(module: nn.Module, view: GroupView) -> None:
    """Let a module that works in groups of channels count those of this rank."""
    counted = groups_of(module)
    if counted is not None:
        set_number(module, counted, getattr(module, counted) // view.size)
