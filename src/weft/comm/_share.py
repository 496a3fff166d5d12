"""The first rank's table of choices for all: ranks that chose by tables of their own would wait for one another."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.comm.algorithms import ChoiceTable, table_from_json, table_to_json
from weft.comm.mesh import GroupView


def share_table(mine: ChoiceTable | None, view: GroupView) -> ChoiceTable | None:
    """Return the first rank's table, whatever the others have.  Call on every rank of the group."""
    if view.group is None:
        return mine
    text = table_to_json(mine).encode() if mine is not None and view.index == 0 else b""
    length = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(length, src=view.ranks[0], group=view.group)
    if not int(length):
        return None
    content = torch.zeros(int(length), dtype=torch.uint8)
    if view.index == 0:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(content, src=view.ranks[0], group=view.group)
    return table_from_json(bytes(content.tolist()).decode())
