"""Name what is likely wrong, from how a plan's numbers differ from those of one process.

Every sentence is computed: a factor that is exactly the size of an axis, the ranks that disagree, the samples whose
gradient is missing, the kind of parameters that alone differ.  Where nothing fits, it says what is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from weft.config.plan import Plan, axis_coordinates
from weft.formatting import format_number
from weft.model.blueprint import Blueprint
from weft.techniques.core import CheckpointShard
from weft.verify.numerics._comparison import Comparison, Mismatch, TrialResult
from weft.verify.numerics._reference import Contributions
from weft.verify.numerics._trial import Trial

_CLOSE = 1e-7
"""Relative; causes are looked for in fp64."""
_AXES = ("replicate", "shard", "context", "tensor", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A trial in fp64 that is not equal to one process."""

    plan: Plan
    blueprint: Blueprint
    reference: TrialResult
    candidate: TrialResult
    trials: Sequence[Trial]
    """One per rank."""
    contributions: Contributions
    comparison: Comparison

    @property
    def first(self) -> Mismatch:
        return self.comparison.mismatches[0]

    def mismatching(self, kind: str) -> list[str]:
        return [mismatch.name for mismatch in self.comparison.mismatches if mismatch.kind == kind]

    def tied(self) -> set[str]:
        """First names of the parameters that two modules share."""
        seen: dict[int, str] = {}
        shared: set[str] = set()
        for name, parameter in self.blueprint.module.named_parameters(remove_duplicate=False):
            if seen.setdefault(id(parameter), name) != name:
                shared.add(seen[id(parameter)])
        return shared

    def kind_of(self, parameter: str) -> str | None:
        """The split rule of the module that holds a parameter."""
        module = parameter.rpartition(".")[0]
        return next((rule.kind for rule in self.blueprint.split if fnmatchcase(module, rule.match)), None)


def likely_cause(evidence: Evidence) -> str:
    """Return a sentence about the first thing that differs."""
    first = evidence.first
    if first.kind == "initial weight":
        return _initial(evidence)
    if first.kind == "loss" and first.step == 1:
        return _loss(evidence)
    if first.kind == "gradient":
        return _gradient(evidence)
    if first.kind == "gradient norm" and first.step == 1:
        return _norm(evidence)
    return _update(evidence)


# ── factors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _counts(plan: Plan) -> dict[str, int]:
    """Things a step has several of, with how many."""
    mesh = plan.mesh
    counts = {axis: int(getattr(mesh, axis)) for axis in _AXES}
    counts["data (replicate × shard)"] = mesh.data if mesh.replicate > 1 and mesh.shard > 1 else 1
    counts["microbatches per rank"] = max(plan.microbatch.shares(mesh.data))
    counts["processes"] = mesh.world_size
    return {name: count for name, count in counts.items() if count > 1}


def _factor(reference: Tensor, candidate: Tensor) -> float | None:
    """c when `candidate` is c × `reference`, c not 1."""
    one, other = reference.double().flatten(), candidate.double().flatten()
    square = float(one @ one)
    if not square or not bool(other.isfinite().all()):
        return None
    # The factor of least squares; what it leaves over says whether a factor explains the difference at all.
    factor = float(one @ other) / square
    rest = float((other - factor * one).norm())
    fits = rest <= _CLOSE * math.sqrt(square) * max(abs(factor), 1.0)
    return factor if fits and abs(factor - 1) > _CLOSE else None


def factor_sentence(factor: float, plan: Plan) -> str:
    """Say what a factor between two results means under a plan."""
    counts = _counts(plan)
    times = [f"{name} {count}" for name, count in counts.items() if abs(factor - count) <= _CLOSE * count]
    over = [f"{name} {count}" for name, count in counts.items() if abs(factor * count - 1) <= _CLOSE]
    if times:
        return f"exactly {factor:.0f} times too large: summed once too often, or not divided, over {' or '.join(times)}"
    if over:
        return f"exactly 1/{1 / factor:.0f} of it: divided once too often over {' or '.join(over)}, or one rank's part"
    if abs(factor) <= _CLOSE:
        return "zero: it never arrives"
    if abs(factor + 1) <= _CLOSE:
        return "right but for its sign"
    return f"exactly {format_number(factor, 9)} times the right one: a wrong divisor or scale"


# ── the first step ────────────────────────────────────────────────────────────────────────────────────────────────────


def _initial(evidence: Evidence) -> str:
    """Weights differ before any step."""
    names = evidence.mismatching("initial weight")
    name = names[0]
    key = f"model/{name}"
    some = f"{len(names)} of {len(evidence.reference.initial)} initial weights differ"
    reference, candidate = evidence.reference.initial.get(key), evidence.candidate.initial.get(key)
    if reference is None or candidate is None:
        return f"{some}: {name} is {'missing' if candidate is None else 'unknown to one process'}"
    order = _permutation(evidence, key, reference, candidate)
    if order is not None:
        return f"{some}: the parts of {name} are right but lie in another order, {order}: a wrong slice or a wrong join"
    axis = _axis_of_disagreement(evidence, "initial", key)
    if axis is not None:
        return f"{some}: ranks along {axis} hold different copies of {name}"
    if not bool(candidate.isfinite().all()):
        return f"{some}: part of {name} is held by no rank, or is not finite"
    return f"{some}: {name} is drawn or cut otherwise than in one process"


def _loss(evidence: Evidence) -> str:
    reference, candidate = evidence.reference.losses[0], evidence.candidate.losses[0]
    gradients = evidence.mismatching("gradient")
    total = evidence.comparison.num_gradients
    also = f"{len(gradients)} of {total} gradients differ too" if gradients else "all gradients are equal"
    if not math.isfinite(candidate):
        apart = len({trial.losses[0] for trial in evidence.trials if trial.losses[0] == trial.losses[0]}) > 1
        what = "ranks report different losses: their sum over all ranks is missing" if apart else "it is not finite"
        return f"{what}; {also}"
    for who, mean in _means(evidence.contributions).items():
        if _near(candidate, mean) and not _near(reference, mean):
            return f"it is the mean of the {who}' own means: divided by each one's count, not the global one; {also}"
    factor = candidate / reference if reference else 0.0
    if reference and not gradients:
        return f"{factor_sentence(factor, evidence.plan)}; {also}, so only its count or sum over ranks is wrong"
    counts = {*_counts(evidence.plan).values()}
    if any(_near(factor, count) or _near(factor * count, 1.0) for count in counts):
        return f"{factor_sentence(factor, evidence.plan)}; {also}"
    return f"the forward computes something else; {also}"


def _means(contributions: Contributions) -> dict[str, float]:
    """The loss of the first step, were it the mean of means."""
    ranks = [[sum(values) for values in zip(*totals, strict=True)] for totals in contributions.totals]
    microbatches = [total for totals in contributions.totals for total in totals]

    def mean(totals: Sequence[Sequence[float]]) -> float:
        counted = [total / count for total, count in totals if count]
        return sum(counted) / max(1, len(counted))

    return {"data ranks": mean(ranks), "microbatches": mean(microbatches)}


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))


def _gradient(evidence: Evidence) -> str:
    """Gradients differ under an equal loss: a backward or a reduction is wrong."""
    # In the order of how much a rule proves: a subset of samples that adds up exactly, or one factor for all, leaves no
    # doubt, while a kind of parameters that alone differs is a hint.
    for rule in _GRADIENT_RULES:
        sentence = rule(evidence)
        if sentence is not None:
            return sentence
    names = evidence.mismatching("gradient")
    nearest = names[-1]
    return (
        f"{len(names)} of {evidence.comparison.num_gradients} gradients differ under an equal loss; the backward goes"
        f" wrong at or after {nearest}, the last of them in the forward"
    )


def _own_samples_only(evidence: Evidence) -> str | None:
    """Every shard is the gradient of some data ranks' samples only."""
    parts = evidence.contributions.of_data_rank
    if len(parts) < 2:
        return None
    name = evidence.first.name
    seen: list[tuple[int, tuple[int, ...]]] = []
    for rank, shard in _shards(evidence, "gradients", f"gradient/{name}"):
        wholes = [_slice(part[name], shard) for part in parts]
        if not shard.tensor.numel():
            continue
        subset = _subset(wholes, shard.tensor.double())
        if subset is None:
            return None
        seen.append((_data_index(evidence.plan, rank), subset))
    if not seen or all(len(subset) == len(parts) for _, subset in seen):
        return None
    if all(subset == (mine,) for mine, subset in seen):
        return f"every data rank keeps the gradient of its own samples of {name}: the sum over data ranks is missing"
    shown = ", ".join(f"data rank {mine} has the samples of {list(subset)}" for mine, subset in seen[:3])
    return f"{name} lacks some data ranks' samples: {shown}"


def _subset(parts: Sequence[Tensor], shard: Tensor) -> tuple[int, ...] | None:
    """Return the indices of the parts that add up to the shard, preferring all of them; None if none do."""
    scale = max(float(part.norm()) for part in parts)
    # All parts before some: a parameter that no sample touches (zero gradient) belongs to every subset.
    for size in range(len(parts), 0, -1):
        for chosen in itertools.combinations(range(len(parts)), size):
            total = torch.stack([parts[index] for index in chosen]).sum(0)
            if float((total - shard).norm()) <= _CLOSE * scale:
                return chosen
    return None


def _one_factor_for_all(evidence: Evidence) -> str | None:
    names = evidence.mismatching("gradient")
    factors = [_gradient_factor(evidence, name) for name in names]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or not known or max(known) - min(known) > _CLOSE * max(abs(f) for f in known):
        return None
    every = len(names) == evidence.comparison.num_gradients
    who = "every gradient is" if every else f"{_list(names)} {'is' if len(names) == 1 else 'are'}"
    kind = "" if every else _kind_clause(evidence, names)
    return f"{who} {factor_sentence(known[0], evidence.plan)}{kind}"


def _gradient_factor(evidence: Evidence, name: str) -> float | None:
    reference, candidate = (
        evidence.reference.gradients.get(f"gradient/{name}"),
        evidence.candidate.gradients.get(f"gradient/{name}"),
    )
    return None if reference is None or candidate is None else _factor(reference, candidate)


def _only_some_kind(evidence: Evidence) -> str | None:
    names = evidence.mismatching("gradient")
    clause = _kind_clause(evidence, names)
    return f"only {_list(names)} differ{'s' if len(names) == 1 else ''}{clause}" if clause else None


def _kind_clause(evidence: Evidence, names: Sequence[str]) -> str:
    """Return a clause on what the differing parameters have in common; empty if all parameters differ."""
    everyone = {name.partition("/")[2] for name in evidence.reference.gradients}
    if set(names) == everyone:
        return ""
    if set(names) <= evidence.tied():
        return ", a tied weight: the gradients of its copies are not added up, or one copy too often"
    kinds = {evidence.kind_of(name) for name in names}
    mesh, sequence = evidence.plan.mesh, evidence.plan.tensor_parallel.sequence
    if mesh.tensor > 1 and sequence and kinds <= {"sequence", "row"}:
        return ", which work on shards of the sequence: their partial gradients are not added up over tensor"
    if mesh.tensor > 1 and kinds == {"row"} and all(name.endswith("bias") for name in names):
        return f", biases of row-parallel layers: added once per tensor rank ({mesh.tensor} times)"
    if mesh.tensor > 1 and kinds <= {"column", "row", "vocab"}:
        return ", all cut over tensor: a wrong slice, or a collective between the parts is missing"
    if mesh.tensor > 1 and kinds == {None}:
        return ", none of them cut over tensor: partial gradients of replicated parameters are not added up"
    return ""


def _zeros(evidence: Evidence) -> str | None:
    """Elements that are zero and should not be, whole shards of ranks at a time."""
    key = f"gradient/{evidence.first.name}"
    reference, candidate = evidence.reference.gradients.get(key), evidence.candidate.gradients.get(key)
    if reference is None or candidate is None or reference.shape != candidate.shape:
        return None
    # Only where everything else is right do zeros explain the difference.
    lost = (candidate == 0) & (reference != 0)
    rest = torch.where(lost, reference, candidate.nan_to_num(math.inf)) - reference
    if not bool(lost.any()) or float(rest.norm()) > _CLOSE * float(reference.norm()):
        return None
    ranks = [
        rank
        for rank, shard in _shards(evidence, "gradients", key)
        if shard.tensor.numel() and not bool(shard.tensor.any()) and bool(_slice(reference, shard).any())
    ]
    where = f", the whole part of rank{'s' if len(ranks) > 1 else ''} {_list([str(r) for r in ranks])}" if ranks else ""
    return f"{int(lost.sum())} of {lost.numel()} elements are zero{where}: a reduction or a gather never fills them"


def _shuffled(evidence: Evidence) -> str | None:
    key = f"gradient/{evidence.first.name}"
    reference, candidate = evidence.reference.gradients.get(key), evidence.candidate.gradients.get(key)
    if reference is None or candidate is None:
        return None
    order = _permutation(evidence, key, reference, candidate)
    return None if order is None else f"its parts are right but lie in another order, {order}: a wrong slice or join"


def _permutation(evidence: Evidence, key: str, reference: Tensor, candidate: Tensor) -> str | None:
    """The order of the tensor ranks' parts in `candidate`, when it is `reference` in another order."""
    splits = [
        shard.split.cuts[0]
        for kind in ("initial", "gradients")
        for _, shard in _shards(evidence, kind, key)
        if shard.split
    ]
    if not splits or reference.shape != candidate.shape:
        return None
    split, scale = splits[0], _CLOSE * float(reference.norm())
    shards = split.parts * split.blocks
    mine, theirs = reference.chunk(shards, split.dim), candidate.chunk(shards, split.dim)
    order = [
        next(
            (index for index, part in enumerate(mine) if part.shape == p.shape and float((part - p).norm()) <= scale),
            -1,
        )
        for p in theirs
    ]
    return str(order) if sorted(order) == list(range(shards)) and order != sorted(order) else None


def _disagreement(evidence: Evidence) -> str | None:
    axis = _axis_of_disagreement(evidence, "gradients", f"gradient/{evidence.first.name}")
    if axis is None:
        return None
    return f"ranks along {axis} hold different gradients of {evidence.first.name}: their sum over {axis} is missing"


def _not_finite(evidence: Evidence) -> str | None:
    key = f"gradient/{evidence.first.name}"
    candidate = evidence.candidate.gradients.get(key)
    if candidate is None:
        return f"no rank holds a gradient of {evidence.first.name}"
    if bool(candidate.isfinite().all()):
        return None
    bad = [rank for rank, shard in _shards(evidence, "gradients", key) if not bool(shard.tensor.isfinite().all())]
    if bad:
        return f"the gradient of {evidence.first.name} is not finite on rank {bad[0]}"
    return f"part of the gradient of {evidence.first.name} is held by no rank"


_GRADIENT_RULES: tuple[Callable[[Evidence], str | None], ...] = (
    _own_samples_only,
    _one_factor_for_all,
    _zeros,
    _shuffled,
    _only_some_kind,
    _disagreement,
    _not_finite,
)
"""The most telling first."""


# ── after the gradients ───────────────────────────────────────────────────────────────────────────────────────────────


def _norm(evidence: Evidence) -> str:
    """All gradients are right, their norm is not: something is counted too often or left out."""
    reference, candidate = evidence.reference.norms[0], evidence.candidate.norms[0]
    if not math.isfinite(candidate):
        return "ranks do not agree on the norm, or it is not finite, while all gradients are equal"
    scale = _gradient_scale(evidence)
    # The square of the norm is a sum over parameters, so what is counted n times adds n - 1 of its own squares.
    excess = (candidate * candidate - reference * reference) / scale
    for who, squares in _countable(evidence).items():
        for count in sorted({*_counts(evidence.plan).values()}):
            if squares and abs(excess - (count - 1) * squares) <= 1e-9 * abs(excess):
                return f"all gradients are equal, but {who} count {count} times"
        if squares and abs(excess + squares) <= 1e-9 * squares:
            return f"all gradients are equal, but {who} do not count"
    factor = candidate / reference
    return (
        f"all gradients are equal, but the norm is {format_number(factor, 9)} times the right one: squares counted"
        " twice or left out"
    )


def _gradient_scale(evidence: Evidence) -> float:
    """Square of the factor between the reported norm and that of the compared gradients."""
    total = sum(float(tensor.double().square().sum()) for tensor in evidence.reference.gradients.values())
    return evidence.reference.norms[0] ** 2 / total if total else 1.0


def _countable(evidence: Evidence) -> Mapping[str, float]:
    """Sums of squares of gradients that may be counted too often, by who they are."""
    cut = {shard.name for trial in evidence.trials for shard in trial.gradients if shard.split}
    squares = {name: float(t.double().square().sum()) for name, t in evidence.reference.gradients.items()}
    tied = {f"gradient/{name}" for name in evidence.tied()}
    return {
        "all parameters": sum(squares.values()),
        "parameters that every tensor rank holds": sum(v for name, v in squares.items() if name not in cut),
        "parameters cut over tensor": sum(v for name, v in squares.items() if name in cut),
        "tied weights": sum(v for name, v in squares.items() if name in tied),
    }


def _update(evidence: Evidence) -> str:
    """The first step's gradients and norm are right, and what comes of them is not."""
    weights, buffers = evidence.mismatching("weight"), evidence.mismatching("buffer")
    if not weights and buffers:
        return f"only {_list(buffers)} differ: statistics of a part of the batch, or taken twice"
    if not weights:
        return "gradients and weights are equal: only the evaluation, or a sum over ranks, is wrong"
    start = "the first step's gradients are equal"
    still = [name for name in weights if _unchanged(evidence, name)]
    if still:
        return f"{start}, but {_list(still)} never changed: not updated, or the update is not gathered"
    for name in weights:
        axis = _axis_of_disagreement(evidence, "state", f"model/{name}")
        if axis is not None:
            return f"{start}, but ranks along {axis} end with different copies of {name}"
    every = len(weights) == len([name for name in evidence.reference.state if name.startswith("model/")])
    if every:
        return f"{start}, and all weights differ: the optimizer's step, the clip factor, or stale weights in step 2"
    return f"{start}, and {len(weights)} weights differ, first {weights[0]}{_kind_clause(evidence, weights)}"


def _unchanged(evidence: Evidence, name: str) -> bool:
    key = f"model/{name}"
    before, after, reference = (
        outcome.get(key) for outcome in (evidence.candidate.initial, evidence.candidate.state, evidence.reference.state)
    )
    return before is not None and after is not None and reference is not None and torch.equal(before, after)


# ── shards ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shards(evidence: Evidence, kind: str, key: str) -> Iterator[tuple[int, CheckpointShard]]:
    """(rank, shard) of one tensor."""
    for rank, trial in enumerate(evidence.trials):
        shards: Sequence[CheckpointShard] = getattr(trial, kind)
        yield from ((rank, shard) for shard in shards if shard.name == key)


def _slice(whole: Tensor, shard: CheckpointShard) -> Tensor:
    """Return the elements of a full tensor that belong to a rank's shard, flat."""
    return shard.split.slice(whole).double().flatten()[shard.start : shard.start + shard.tensor.numel()]


def _data_index(plan: Plan, rank: int) -> int:
    place = axis_coordinates(plan.mesh, rank)
    return place["replicate"] * plan.mesh.shard + place["shard"]


def _axis_of_disagreement(evidence: Evidence, kind: str, key: str) -> str | None:
    """The axis along which two ranks hold different values of the same elements."""
    # Only copies of the same elements are compared.  Two ranks that differ along one axis alone name it; others say
    # less.
    copies = list(_shards(evidence, kind, key))
    for (rank, shard), (other_rank, other) in itertools.combinations(copies, 2):
        same = (shard.split, shard.start, shard.tensor.shape) == (other.split, other.start, other.tensor.shape)
        if not same or torch.allclose(shard.tensor, other.tensor, rtol=_CLOSE, atol=0.0, equal_nan=True):
            continue
        mine, theirs = axis_coordinates(evidence.plan.mesh, rank), axis_coordinates(evidence.plan.mesh, other_rank)
        apart = [axis for axis in _AXES if mine[axis] != theirs[axis]]
        if len(apart) == 1:
            return apart[0]
    return None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
