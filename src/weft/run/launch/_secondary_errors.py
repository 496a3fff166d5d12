"""Recognises secondary errors: those that only say that another rank is gone."""

from __future__ import annotations

_SECONDARY_TEXTS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "connectFullMesh failed",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "remote process exited",
    "the process of rank",
    "has left the group",
    "aborted the group",
    "so this one could not go on",
)
"""Texts of Gloo, NCCL and Weft on a rank whose peer has left.  Such an error is never the cause if there is another."""


def is_secondary_error(message: str) -> bool:
    """Whether an error only says that another rank is gone."""
    return any(text in message for text in _SECONDARY_TEXTS)
