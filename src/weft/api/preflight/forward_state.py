"""What a forward or a loss leaves behind: state that it changes by itself, beside what the optimizer does.

One process has one such state, which saw every sample in turn.  Ranks with other samples, and microbatches one after
another, leave something else behind, and nobody would say so.  So a few samples are tried before training, together and
in two parts, on copies: what is then the same is fine (caches that grow as they are needed, the singular vectors of
`spectral_norm` on data ranks), and so is what nothing reads.  Batch norms are kept by a rule of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.api.preflight.sample_trials import Trials, changed
from weft.api.preflight.trial_copies import LOSS, KeptObject, TrialCopy, is_alike, is_same
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Batch
from weft.techniques.randomness.draws import is_alone

_AGAIN = 3
"""Forwards by which it is seen whether something that was left behind matters."""
_LATER = (1, 2, 3, 5, 10, 100, 1_000, 10_000)
"""Forwards later, at which a counter may have come to a number that matters."""
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedState:
    """State that forwards change by themselves, as the beginnings of sentences; empty: nothing that matters."""

    weights: str = ""
    """Weights that train."""
    frozen: str = ""
    """Weights that do not."""
    by_samples: str = ""
    """State in which two ranks with other samples differ."""
    by_forwards: str = ""
    """State in which two forwards over halves differ from one over the whole."""


def find_changed_state(trials: Trials) -> ChangedState:
    """Try a few samples.  Raises whatever the model's forward raises."""
    while True:
        known = set(trials.own)
        with trials.without_draws():
            change = _found(trials)
        if trials.own == known:
            return change


def runs_once(plan: Plan) -> bool:
    """Whether one forward of one process sees the whole batch: whatever it leaves behind is right as it comes."""
    return is_alone(plan) and not plan.memory.recomputes


def refuse_changed_state(state: ChangedState, plan: Plan) -> None:
    """Refuse a plan that would leave something else behind than one process does.

    Raises:
        PlanError: it would.
    """
    if runs_once(plan):
        return
    if state.weights and (plan.mesh.world_size > 1 or state.by_forwards):
        raise PlanError(
            f"{state.weights}, as nn.Embedding(max_norm=…) does. Every rank would do so by itself, and a plan may keep"
            f" weights elsewhere between two steps, so plans would differ. {_FIX}"
        )
    others = plan.mesh.data * plan.mesh.context
    if state.by_samples and others > 1:
        raise PlanError(
            f"{state.by_samples} by the samples that it is given, so that the {others} ranks of this plan, which have"
            f" different ones, would part from each other and from one process. {_FIX}"
        )
    if state.frozen and plan.data_parallel.shards_weights and plan.mesh.shard > 1:
        raise PlanError(
            f"{state.frozen}, and under ZeRO-3 each rank holds a part of it, so that what a forward writes to the whole"
            " is lost. Use data_parallel.zero = 1, keep it in a buffer, or make the change in the loop between two"
            " steps, on all ranks alike."
        )
    if state.by_forwards and plan.microbatch.is_split:
        raise PlanError(
            f"{state.by_forwards} in every forward, and this plan runs the model once for each microbatch, where one"
            f" process runs it once in a step, so that plans would differ. Use microbatch.per_step = 1. {_FIX}"
        )
    if state.by_forwards and plan.memory.recomputes:
        raise PlanError(
            f"{state.by_forwards} in every forward, and the plan's {plan.memory.recompute_line} runs forwards"
            ' again in the backward, so that plans would differ. Use memory.recompute = "none".'
        )


_FIX = (
    "Train on one process with the whole batch in one microbatch, or let nothing change there: call eval() on the"
    " module if that stops it, or make the change in the loop between two steps, on all ranks alike."
)


def _found(trials: Trials) -> ChangedState:
    before = trials.copied().state()
    whole, halves = trials.copied(), trials.copied()
    parts = [trials.run(halves, batch) for batch in (trials.first, trials.second)]  # some begin with a second forward
    together = trials.run(whole, trials.fields)
    after, after_halves = whole.state(), halves.state()
    # Most models change nothing: their forwards are kept for the next look.
    touched = _changed(before, after) + _changed(before, after_halves)
    if not touched:
        trials.seen = (together, parts[0], parts[1])
        return ChangedState()
    trained = {name for name, weight in trials.blueprint.module.named_parameters() if weight.requires_grad}
    written = [kept for kept in dict.fromkeys(touched) if kept.kind == "parameter"]
    weights = [kept for kept in written if kept.shown in trained]
    frozen = [kept for kept in written if kept.shown not in trained]
    # Two forwards each: some state is made in the first and only read from the second on.
    first, *others = [_after(trials, (batch, batch)).state() for batch in (trials.first, trials.second, trials.fields)]
    of_ranks = [kept for other in others for kept in _differing(first, other, before)]
    of_forwards = _differing(after, after_halves, before)
    # Two histories of as many forwards with other samples stand for two ranks; one forward over all and two over halves
    # for one process and two microbatches.
    ranks = (trials.first, trials.first), (trials.second, trials.second)
    steps = (trials.fields,), (trials.first, trials.second)
    return ChangedState(
        weights=_told(weights, trials),
        frozen=_told(frozen, trials),
        by_samples=_told(_mattering(list(dict.fromkeys(of_ranks)), trials, ranks), trials),
        by_forwards=_told(_mattering(of_forwards, trials, steps, counters=True), trials),
    )


def _after(trials: Trials, batches: Sequence[Batch]) -> TrialCopy:
    """A copy that has seen some batches."""
    copied = trials.copied()
    for batch in batches:
        trials.run(copied, batch)
    return copied


def _changed(before: Mapping[KeptObject, Any], after: Mapping[KeptObject, Any]) -> list[KeptObject]:
    return changed(before, after, lambda kept: is_same(before[kept], after[kept]))


def _differing(
    one: Mapping[KeptObject, Any], other: Mapping[KeptObject, Any], before: Mapping[KeptObject, Any]
) -> list[KeptObject]:
    """Return the objects that two copies have changed differently."""
    return changed(one, other, lambda kept: is_alike(one[kept], other[kept], before.get(kept)))


def _mattering(
    left: Sequence[KeptObject], trials: Trials, ways: tuple[Sequence[Batch], Sequence[Batch]], *, counters: bool = False
) -> list[KeptObject]:
    """Return the objects that are part of the model's state, or that make later forwards differ between copies that
    have gone two ways."""
    # What is saved with the model is part of the result of a training, whether or not a forward reads it.
    saved = [kept for kept in left if kept.is_saved]
    if saved or not left:
        return saved
    one, other = (_later(trials, _after(trials, way)) for way in ways)
    # Unlike state that no later output shows; only a counter may matter later, when it has come further.
    if not _differ([one, other]):
        return [kept for kept in left if _counts(kept, trials)] if counters else []
    return [kept for kept in left if _differ([one, _exchanged(kept, trials, ways)])] or list(left)


def _exchanged(kept: KeptObject, trials: Trials, ways: tuple[Sequence[Batch], Sequence[Batch]]) -> list[torch.Tensor]:
    """Return the later outputs of the copy that went the first way, with one object as it is after the second."""
    mine, theirs = (_after(trials, way) for way in ways)
    mine.set_value(kept, theirs.value_of(kept))
    return _later(trials, mine)


def _later(trials: Trials, copied: TrialCopy) -> list[torch.Tensor]:
    """Return a copy's outputs of the same samples from now on, in training and out of it."""
    seen = [trials.run(copied, trials.first) for _ in range(_AGAIN)]
    copied.model.eval()
    return [number for one in (*seen, trials.run(copied, trials.first)) for number in one.numbers]


def _counts(kept: KeptObject, trials: Trials) -> bool:
    """Whether a counter of forwards matters once it has come further."""
    start = trials.copied().value_of(kept)
    if not isinstance(start, int | float) or isinstance(start, bool):
        return False
    once = trials.copied()
    trials.run(once, trials.first)
    step = once.value_of(kept) - start
    seen: list[list[torch.Tensor]] = []
    for number in _LATER:
        copied = trials.copied()
        copied.set_value(kept, start + number * step)
        seen.append(trials.run(copied, trials.first).numbers)
    return _differ(seen)


def _differ(seen: Sequence[list[torch.Tensor]]) -> bool:
    first, *others = seen
    return any(
        len(first) != len(other) or not all(_equal(*pair) for pair in zip(first, other, strict=True))
        for other in others
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and bool(torch.equal(one, other))
    return torch.allclose(one, other, rtol=16 * torch.finfo(one.dtype).eps, atol=0.0, equal_nan=True)


def _told(left: Sequence[KeptObject], trials: Trials) -> str:
    """`vq changes its buffers embed and cluster_size`."""
    if not left:
        return ""
    owner = left[0].owner
    own = [kept for kept in left if kept.owner == owner and kept.kind == left[0].kind]
    names = [kept.name for kept in own[:_NAMED]]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    kind = type(trials.blueprint.module).__name__
    who = owner if owner == LOSS else f"the forward of {owner} in {kind}" if owner else f"the forward of {kind}"
    what = {"parameter": "weight", "buffer": "buffer", "attribute": "attribute"}[left[0].kind]
    return f"{who} changes its {what}{'s' if len(names) > 1 else ''} {listed}"
