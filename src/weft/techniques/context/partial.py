"""Attention over some of the keys, and how results over different keys become one.

With S the scores of a query and L = log Σ exp S over the keys that it has seen, two results over disjoint keys merge as
O = O₁·exp(L₁ − L) + O₂·exp(L₂ − L), L = log(exp L₁ + exp L₂): the online softmax of Milakov and Gimelshein 2018
(https://arxiv.org/abs/1805.02867), as ring attention has it (Liu et al. 2023, https://arxiv.org/abs/2310.01889).
Backward needs no merge: a score's probability is exp(S − L) with the whole L, so each part of the keys gives its own
share of the gradients (Dao 2023, https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.techniques.context.kernels import Scoring, kernel_for

Kept = Callable[[slice], Tensor]
"""Function rows of queries → factors of their probabilities, (samples, heads, queries, keys): zero, or 1 / (1 − p)."""
_CHUNK_SCORES = 1 << 24
"""The most scores that exist at once where no kernel returns L: 64 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of some queries over some keys."""

    output: Tensor
    """(samples, heads, queries, value size), in the inputs' dtype, or wider once merged."""
    log_sum: Tensor
    """L: (samples, heads, queries), fp32 or wider; −inf where a query has seen no key."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    kept: Kept | None = None,
) -> Partial:
    """Attend from (samples, heads, queries, size) to (samples, kv heads, keys, size), kv heads dividing heads.

    `kept`: probabilities are dropped after the softmax, so L is what it would be without, and results merge as ever.
    """
    mask = scoring.mask
    if kept is None and scoring.is_plain and (kernel := kernel_for(query, key, value, scoring)):
        output, log_sum = kernel.attend(query, key, value, scoring)
        if mask is not None:  # kernels disagree about queries that see no key
            sees = mask.to(query.device).any(-1)
            output, log_sum = output.masked_fill(~sees[..., None], 0.0), log_sum.masked_fill(~sees, -torch.inf)
        return Partial(output, log_sum)
    scoring = _masked(scoring, query, key)
    groups = query.shape[1] // key.shape[1]  # heads of queries that share one head of keys
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts: list[Partial] = []
    for rows in _chunks(query, key):
        factors = None if kept is None else kept(rows)
        parts.append(_attend_plainly(query[:, :, rows], key, value, scoring.of_rows(rows), factors))
    return Partial(torch.cat([part.output for part in parts], 2), torch.cat([part.log_sum for part in parts], 2))


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Partial,
    scoring: Scoring,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of the gradients of query, key and value that these keys give.

    `gradient` and `whole` are those of the queries over all keys, `whole.output` in the dtype of `query`.
    """
    if kept is None and scoring.is_plain and (kernel := kernel_for(query, key, value, scoring)):
        return kernel.backward(gradient, (query, key, value), whole.output, whole.log_sum, scoring)
    scoring = _masked(scoring, query, key)
    return _backward_plainly(gradient, query, key, value, whole, scoring, kept)


def merge(one: Partial | None, other: Partial) -> Partial:
    """Return attention over the keys of both, in fp32 or wider; zero for queries that have seen no key."""
    wide = torch.promote_types(other.output.dtype, torch.float32)
    if one is None:
        return Partial(other.output.to(wide), other.log_sum)
    # Differences of logarithms, never exp L itself, which overflows fp32 from 89 on.  The output stays wide between
    # merges, so c − 1 merges round once at the end and not c − 1 times.
    log_sum = torch.logaddexp(one.log_sum, other.log_sum)
    first, second = (_share(part.log_sum, log_sum).to(wide) for part in (one, other))
    return Partial(one.output.to(wide) * first + other.output.to(wide) * second, log_sum)


def with_sinks(whole: Partial, sinks: Tensor) -> Partial:
    """Return attention with sinks, (heads,): one more score per head in the softmax, of a key without a value."""
    sink = sinks.to(whole.log_sum.dtype)[:, None]
    log_sum = torch.logaddexp(whole.log_sum, sink.expand_as(whole.log_sum))
    return Partial(whole.output * _share(whole.log_sum, log_sum).to(whole.output.dtype), log_sum)


def gradient_of_sinks(gradient: Tensor, whole: Partial, sinks: Tensor) -> Tensor:
    """Return the part of the gradient of sinks, (heads,), that comes from these queries.

    A sink's probability is p = exp(sink − L), and raising it takes p·O from the output.  The gradients of the keys need
    no more than `whole` with the sinks in it: a probability is exp(S − L) with the L of all scores.
    """
    wide = whole.log_sum.dtype
    share = (sinks.to(wide)[:, None] - whole.log_sum).exp()
    return -(share * (gradient.to(wide) * whole.output.to(wide)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def nothing_seen(query: Tensor, value: Tensor) -> Partial:
    """Return the neutral element of `merge`: output zero and L = −∞, for queries that have seen no key."""
    wide = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
    return Partial(output, output.new_full(query.shape[:-1], -torch.inf))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part − whole), (…, 1), and zero where nothing was seen at all."""
    return torch.where(part == -torch.inf, 0.0, (part - whole).exp())[..., None]


def _masked(scoring: Scoring, query: Tensor, key: Tensor) -> Scoring:
    """The same with a mask on the queries' device in place of `causal`."""
    mask = scoring.mask
    if mask is None and scoring.causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    return replace(scoring, mask=None if mask is None else mask.to(query.device))


def _chunks(query: Tensor, key: Tensor) -> list[slice]:
    """Return runs of queries whose scores may exist at once; at least one run, even without queries."""
    rows = max(1, _CHUNK_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    return [slice(start, start + rows) for start in range(0, max(1, query.shape[2]), rows)]


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _scores(query: Tensor, key: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return scores (samples, heads, queries, keys), and the derivative of a soft cap at each; None: there is no cap.

    Scores are in fp32 or wider: bf16 has 8 bits, and an error of 2⁻⁸ of a score of 20 moves its probability by 8 %.
    """
    scores, slope = _widened(query) * scoring.scale @ _widened(key).transpose(-1, -2), None
    if scoring.softcap is not None:
        bent = torch.tanh(scores / scoring.softcap)
        scores, slope = bent * scoring.softcap, 1.0 - bent.square()
    if scoring.bias is not None:
        scores = scores + scoring.bias
    return (scores if scoring.mask is None else scores.masked_fill(~scoring.mask, -torch.inf)), slope


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, kept: Tensor | None) -> Partial:
    scores, _ = _scores(query, key, scoring)
    log_sum = scores.logsumexp(-1)
    probabilities = _probabilities(scores, log_sum)
    return Partial((probabilities if kept is None else probabilities * kept).to(value.dtype) @ value, log_sum)


def _probabilities(scores: Tensor, log_sum: Tensor) -> Tensor:
    """Return exp(S − L); zero for queries that see no key."""
    # L = −∞ there, and −∞ − (−∞) would be NaN.
    return (scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0)[..., None]).exp()


def _backward_plainly(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Partial,
    scoring: Scoring,
    kept: Kept | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # With P = exp(S − L) and D = rowsum(dO ∘ O):  dV = Pᵀ·dO,  dS = P ∘ (dO·Vᵀ − D),  dQ = dS·K,  dK = dSᵀ·Q.  D is
    # over all keys and comes from the merged output, so no part of the keys must know of the others (Dao 2023).
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    by_query = torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    by_key, by_value = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    row_sums = (gradient.to(wide) * whole.output.to(wide)).sum(-1)  # D, (samples, heads, queries)
    for rows in _chunks(query, key):
        scores, slope = _scores(query[:, :, rows], keys, scoring.of_rows(rows))
        probabilities = _probabilities(scores, whole.log_sum[:, :, rows])
        output_gradient = gradient[:, :, rows]
        weights, by_probability = probabilities, _widened(output_gradient) @ _widened(values).transpose(-1, -2)
        if kept is not None:  # with dropout O holds the same factors, so D stays the sum over the kept probabilities
            drop = kept(rows)
            weights, by_probability = probabilities * drop, by_probability * drop
        by_value += (weights.to(output_gradient.dtype).transpose(-1, -2) @ output_gradient).to(wide)
        by_score = probabilities * (by_probability - row_sums[:, :, rows, None]) * scoring.scale
        by_score = (by_score if slope is None else by_score * slope).to(query.dtype)
        by_query[:, :, rows] = by_score @ keys
        by_key += (by_score.transpose(-1, -2) @ query[:, :, rows]).to(wide)
    # Heads of queries that share a head of keys add up: (samples, kv heads · groups, …) → (samples, kv heads, …).
    by_key, by_value = (tensor.unflatten(1, (-1, groups)).sum(2).to(key.dtype) for tensor in (by_key, by_value))
    return by_query, by_key, by_value
