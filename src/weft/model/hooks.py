"""Find what a plan cannot keep: hooks of a single parameter or module, or a replaced forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weft.errors import RecipeError

_KINDS = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}


def refuse_given(model: nn.Module, head: str | None, where: str) -> None:
    """Refuse hooks that somebody else than Weft has set on parameters, and a vocabulary head (`head`, by name) that
    does more than its class.  `where` they are not to be set: "before prepare", "in module:factory".

    Raises:
        RecipeError: there are some; the first is named.
    """
    for name, parameter in model.named_parameters():
        for attribute, method in _KINDS.items():
            hooks: Mapping[int, Any] = getattr(parameter, attribute, None) or {}
            if not all(map(_is_ours, hooks.values())):
                raise RecipeError(
                    f"{name} has a hook ({method}). Under a plan it would see this rank's gradient of one microbatch,"
                    f" before it is scaled and summed, or none at all. Set none {where} (handle.remove() takes one"
                    " away): clip by max_grad_norm; mask or scale a gradient in the model's forward."
                )
    if head is not None:
        _refuse_other_head(head, dict(model.named_modules()).get(head), where)


def _refuse_other_head(name: str, head: nn.Module | None, where: str) -> None:
    """The loss may take its place, and a rank may have a part of what it makes."""
    if head is None:  # whoever looks for it says so
        return
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())  # pyright: ignore[reportPrivateUsage]
    hooked = not all(map(_is_ours, hooks))
    if hooked or ("forward" in vars(head) and not _is_ours(head.forward)):
        what = "has hooks on its forward" if hooked else "was given another forward"
        raise RecipeError(
            f"{name} is named as the vocabulary head, which the loss may do without, and {what} {where}. Do the same in"
            " the model's forward, or name no vocabulary head."
        )


def _is_ours(function: Any) -> bool:
    """Whether it is one of Weft's, which an earlier session may have left."""
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith("weft.")
