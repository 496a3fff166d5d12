"""Blocks that only some samples run: the samples decide which way a forward takes.

Under ZeRO-3 all data ranks gather the weights of a block together, which a rank cannot whose samples do not come there.
So a few samples of the first batch are tried one by one.  A block that some of them run and others do not is no unit of
its own: its weights are gathered with what stands outside of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from weft.api.preflight.sample_trials import Trials, is_costly
from weft.config.plan import Plan
from weft.model.blueprint import Batch

_MOST_SAMPLES = 32
_NAMED = 3


def gathers_blocks(plan: Plan) -> bool:
    """Whether ranks gather the weights of each block together."""
    return plan.data_parallel.shards_weights and plan.mesh.shard * plan.mesh.context > 1


def find_conditional_blocks(trials: Trials, blocks: Sequence[str]) -> list[str]:
    """Try a few samples, alone and in parts, and return the blocks that not all of them run alike.  Raises whatever the
    model's forward raises on several samples."""
    grown = trials.grown(_MOST_SAMPLES // 2)
    many = trials if is_costly(grown, share=0.1) else grown
    names = set[str]()
    with trials.without_draws():
        whole = _way(many, many.fields, blocks)
        names |= set(blocks) - set(whole) | _apart([_way(many, half, blocks) for half in (many.first, many.second)])
        try:
            names |= _apart([_way(many, one, blocks) for one in _each(many.fields)])
        except Exception:  # a forward that wants several samples
            names |= _apart([_way(trials, part, blocks) for part in (trials.first, trials.second)])
    return [name for name in blocks if name in names]


def _each(fields: Batch) -> Iterable[Batch]:
    number = len(fields["sample_ids"])
    return ({name: value[place : place + 1] for name, value in fields.items()} for place in range(number))


def _way(trials: Trials, batch: Batch, blocks: Sequence[str]) -> list[str]:
    """The blocks that a forward calls, in their order."""
    way: list[str] = []

    def note(name: str, module: nn.Module, args: Any) -> None:
        way.append(name)

    copied = trials.copied()
    for name in blocks:
        copied.model.get_submodule(name).register_forward_pre_hook(partial(note, name))
    trials.forward(copied, batch)
    return way


def _apart(ways: Sequence[list[str]]) -> set[str]:
    """Return the modules that some ways have more often than others, or at another place."""
    conditional = {name for way in ways for name in way if len({other.count(name) for other in ways}) > 1}
    kept = [[name for name in way if name not in conditional] for way in ways]
    places = [set(names) for names in zip(*kept, strict=True)]
    return conditional.union(*(names for names in places if len(names) > 1))


def conditional_blocks_note(branches: Sequence[str], plan: Plan) -> str:
    """Return a sentence for the user about conditional blocks; empty: there are none."""
    if not branches or not gathers_blocks(plan):
        return ""
    names = ", ".join(branches[:_NAMED])
    more = f" and {len(branches) - _NAMED} more" if len(branches) > _NAMED else ""
    return (
        f"the samples decide whether a forward runs {names}{more}: so all ranks gather these weights with what stands"
        " outside of the blocks, and hold them through the whole step"
    )
