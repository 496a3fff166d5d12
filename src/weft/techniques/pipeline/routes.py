"""Which messages travel between the ranks of a pipeline, in which order, and what their arrival proves.  No torch.

Every rank knows every rank's order of actions, so nothing needs to be negotiated.  A *channel* is a directed pair of
ranks; its messages travel in the order in which the sender produces them, and the receiver posts its receives in that
order.  As channels never wait for one another, no order of posting can deadlock, on any backend and without tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.techniques.pipeline.orders import Action, Orders

HEADER_WORDS = 10
"""int64 words of the header before the first activation of a kind: dtype, number of dims, up to eight sizes."""


class StageMessage(NamedTuple):
    """An activation or its gradient on the way to `stage`."""

    kind: Literal["activation", "gradient"]
    stage: int
    microbatch: int

    @property
    def boundary(self) -> int:
        """The later of the two stages between which it travels: an activation and its gradient have the same shape."""
        return self.stage if self.kind == "activation" else self.stage + 1


def wanted_by(action: Action, num_stages: int) -> StageMessage | None:
    """The message that an action needs, None when it needs none."""
    if action.kind == "F" and action.stage > 0:
        return StageMessage("activation", action.stage, action.microbatch)
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return StageMessage("gradient", action.stage, action.microbatch)
    return None


def sent_by(action: Action, num_stages: int) -> StageMessage | None:
    """The message that an action produces, None when it produces none."""
    if action.kind == "F" and action.stage < num_stages - 1:
        return StageMessage("activation", action.stage + 1, action.microbatch)
    if action.kind in ("B", "I") and action.stage > 0:
        return StageMessage("gradient", action.stage - 1, action.microbatch)
    return None


@dataclass(slots=True)
class Routes:
    """One rank's view of a step's messages."""

    incoming: dict[int, list[StageMessage]] = field(default_factory=dict[int, list[StageMessage]])
    """Source rank → its messages to this rank, in its order."""
    proves: dict[StageMessage, list[StageMessage]] = field(default_factory=dict[StageMessage, list[StageMessage]])
    """Message received → messages sent that must have arrived, because the peer used them before it sent this one.
    A sent tensor can be let go then, without asking the backend and without waiting."""


def plan_routes(orders: Orders, ranks: Sequence[int], rank: int) -> Routes:
    """Return the routes of pipeline rank `rank`; `ranks` is the rank of each stage."""
    routes, num_stages = Routes(), len(ranks)
    for peer, actions in enumerate(orders):
        if peer == rank:
            continue
        used: list[StageMessage] = []
        for action in actions:
            received, sent = wanted_by(action, num_stages), sent_by(action, num_stages)
            if received is not None and _source(received, ranks) == rank:
                used.append(received)
            if sent is not None and ranks[sent.stage] == rank:
                routes.incoming.setdefault(peer, []).append(sent)
                routes.proves[sent], used = used, []
    return routes


def _source(message: StageMessage, ranks: Sequence[int]) -> int:
    return ranks[message.stage - 1 if message.kind == "activation" else message.stage + 1]
