"""A loss that is called to see what it does."""

from __future__ import annotations

from typing import Any


def on_trial(loss: Any) -> Any:
    """Return what may be called in place of a loss without changing what the user's own keeps from call to call."""
    if getattr(loss, "__module__", "").startswith("weft.model"):
        return loss  # keeps nothing
    from weft.model.meta_forward.copied_calls import copied_call  # loaded for losses of the user's own

    return copied_call(loss, {})
