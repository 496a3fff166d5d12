"""What a user reads when a group of ranks cannot go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm._failure import ErrorCode, Failure, name_of
from weft.comm.shared_memory._call import OPS, Call, Kind, Message
from weft.errors import CollectiveError

_AGAIN = "The group cannot be used any more: leave it on every rank (destroy_process_group) and form a new one"


def explain(failure: Failure, call: Call | Message | None, ranks: Sequence[int], seconds: float) -> CollectiveError:
    """Return the error for `failure`, whose ranks are positions in `ranks` (global ranks)."""
    if isinstance(call, Message):
        what = _spell_message(call, ranks)
    else:
        what = "The group's last call" if call is None else _spell(call)
    who = name_of(failure.culprit, ranks)
    match failure.code:
        case ErrorCode.DIED:
            text = f"{what} cannot be finished: the process of {who} has died."
        case ErrorCode.LEFT:
            text = (
                f"{what} cannot be finished: {who} has left the group (destroy_process_group, or the end of its"
                f" program) without making this call."
            )
        case ErrorCode.DEADLINE:
            text = (
                f"{what} timed out: it was not finished in {seconds:g} s: {who} has not come. It may be stopped, busy,"
                f" or waiting in another group. If it was only slow, give its groups a longer timeout"
                f" (compute.collective_timeout_seconds in the plan)."
            )
        case ErrorCode.MISMATCH if isinstance(call, Message):
            detail = f", which {failure.detail}" if failure.detail else ""
            text = (
                f"{what} does not fit what {who} did{detail}. A message must be received in a tensor of as many bytes"
                f" as were sent, and messages of one tag in the order in which they are sent."
            )
        case ErrorCode.MISMATCH:
            detail = f": {failure.detail}" if failure.detail else ""
            text = (
                f"{what} does not fit what {who} called at the same place in their order{detail}. All ranks of a group"
                f" must make the same calls, in one order, with equal sizes."
            )
        case ErrorCode.ABORTED:
            text = f"{what} was given up: {name_of(failure.reporter, ranks)} aborted the group."
        case _:
            return CollectiveError(f"{what} cannot be made: this rank has left the group.", status=1)
    another = ", with another in its place" if failure.code is ErrorCode.DIED else ""
    return CollectiveError(text, advice=f"{_AGAIN}{another}.", status=1)


def undefined(dtype: torch.dtype, op: int) -> CollectiveError:
    """Return the error for a reduction that nothing here carries out."""
    name = OPS[op] if 0 <= op < len(OPS) else "premul_sum" if op == len(OPS) else f"torch's operation number {op}"
    what = f"a reduction ({name}) of {dtype} is not defined over shared memory"
    if dtype.is_complex:
        return CollectiveError(
            f"{what}: of complex numbers there are sums and averages. Gather the tensors and combine them."
        )
    if op >= len(OPS):
        return CollectiveError(f"{what}, as it is not over Gloo. Multiply the tensor first, and sum it.")
    return CollectiveError(
        f"{what}. Convert the tensor first, or reduce it in another group, over Gloo: new_group(backend='gloo')."
    )


def _spell_message(message: Message, ranks: Sequence[int]) -> str:
    other = name_of(message.peer, ranks) if message.peer >= 0 else "any rank"
    done = (
        f"Sending {message.num_bytes:,} bytes to" if message.is_sent else f"Receiving {message.num_bytes:,} bytes from"
    )
    return f"{done} {other} (tag {message.tag})"


def _spell(call: Call) -> str:
    if call.kind is Kind.BARRIER:
        return "A barrier"
    op = f" ({OPS[call.op]})" if call.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) else ""
    return f"{call.kind.title.capitalize()}{op} of {call.size_bytes:,} bytes"
