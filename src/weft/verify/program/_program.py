"""Composes a rank's sends in a step from what every technique predicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.techniques.registry import sending
from weft.techniques.send_trace import ModelShare, Outline, Phase, RankSend, When
from weft.verify.program import _optimizer as optimizer
from weft.verify.program._compare import Traffic


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Sends of one rank in a step."""

    sends: tuple[RankSend, ...]

    def traffic(
        self,
        *occasions: When,
        phases: Collection[Phase] = ("gradients", "agreement", "update"),
        rows: Mapping[tuple[str, int], int] | None = None,
    ) -> Traffic:
        """Return how often each operation goes over each axis with how many bytes in a step of these `occasions`
        (`always` is one of every step).

        `rows` are how many there are, by table or mixture and number of the exchange (`RankSend.rows_of`); where it
        does not say so, no rows of a table are sent but their number, and to each expert equally many.
        """
        traffic: Traffic = Counter()
        for send in self.sends:
            if send.phase not in phases or (send.when != "always" and send.when not in occasions):
                continue
            times = 1 if send.rows_of is None else (rows or {}).get(send.rows_of, send.assumed_rows)
            # None: only the data know how many rows are sent, so the exchange is left out.
            if times or (times is not None and send.assumed_rows is not None):  # an exchange without rows is one
                traffic[send.axis, send.operation, times * send.size_bytes] += send.count
        return traffic


def occasions_of(recipe: Recipe, plan: Plan, step: int, *, is_first: bool, some_unused: bool) -> tuple[When, ...]:
    """Return the occasions on which a step, counted from 0, sends more than others.

    `is_first`: its process has taken none before.  `some_unused`: some parameter took no part on some rank.
    """
    chosen, occasions = plan.data_parallel, list[When]()
    if is_first:
        occasions.append("first")
    if some_unused:
        occasions.append("unused")
    if chosen.ends_round(step, recipe.run.steps):
        occasions.append("round")
    if chosen.frozen_after is not None:
        occasions.append("warm_up" if step < chosen.frozen_after else "after_warm_up")
    return tuple(occasions)


def program_of(
    recipe: Recipe,
    plan: Plan,
    outline: Outline,
    rank: int = 0,
    *,
    labels: Sequence[int] | None = None,
    on_cores: bool = True,
    cuts_anywhere: bool = True,
    is_fingerprinted: bool = False,
    is_widened: bool = False,
) -> RankProgram:
    """Return the program of `rank` of a plan's world.

    `labels` are how many count in each microbatch of the rank's step, which the data decide; by default all do.
    `on_cores`: ranks compute on a CPU.  `cuts_anywhere`, `is_fingerprinted`, `is_widened`: see `ModelShare`.
    """
    share = ModelShare(
        outline=outline,
        recipe=recipe,
        plan=plan,
        rank=rank,
        labels=labels,
        on_cores=on_cores,
        cuts_anywhere=cuts_anywhere,
        is_fingerprinted=is_fingerprinted,
        is_widened=is_widened,
    )
    sends: list[RankSend] = []
    for name in sending(plan):  # only the programs of this plan's techniques are loaded
        sends += import_module(name).sends(share)
    return RankProgram((*sends, *optimizer.sends(share)))
