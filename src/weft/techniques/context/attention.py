"""Attention of this rank's tokens to those of all ranks that share the sequence.

What a model's `scaled_dot_product_attention` would see of its own tokens alone is given to a function of our own, which
visits the keys of every rank (`exchange.py`) and merges what they give (`partial.py`).  The model's own forward stays:
its modules that call the function run under a mode that knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.comm import GroupView
from weft.errors import PlanError
from weft.models.dropping import attend_dropping
from weft.parallel import StepContext
from weft.parallel.local_tokens import LocalTokens
from weft.parallel.randomness import KeyedDropout
from weft.parallel.unkept import unkept
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.exchange import KeyExchange
from weft.techniques.context.partial import Kept, Partial, attend, attend_backward, merge, nothing_seen
from weft.techniques.context.shares import runs_of


class _Pair(NamedTuple):
    """Which of this rank's queries see which keys of a source."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Visibility:
    """Who sees whom, of the tokens of one rank and those of any other."""

    tokens: LocalTokens
    view: GroupView
    causal: bool
    dropped: DroppedAttention | None = None
    """What is dropped of their attention; None: nothing."""

    def pair(self, source: int) -> _Pair | None:
        """Return what is computed where the keys of rank `source` are there; None: nothing."""
        mine, length = self.view.index, self.tokens.length
        every = slice(None)
        if self.tokens.documents is not None:
            return _Pair(every, every, mask=self._documents(source, self.tokens.documents))
        if not self.causal:
            return _Pair(every, every)
        if source == mine:
            return _Pair(every, every, causal=True)  # runs stand in the order of their positions
        (head, tail), (other, _) = runs_of(length, self.view.size, mine), runs_of(length, self.view.size, source)
        if source < mine:  # its head stands before all of mine, its tail behind
            found = _Pair(every, slice(0, other[1] - other[0]))
            return found if other[1] > other[0] else None
        found = _Pair(slice(head[1] - head[0], None), every)
        return found if tail[1] > tail[0] else None

    def _documents(self, source: int, documents: Tensor) -> Tensor:
        """(samples, 1, queries, keys): same document and, where attention is causal, not later."""
        mine, theirs = (self._positions(index, documents.device) for index in (self.view.index, source))
        mask = documents[:, mine, None] == documents[:, None, theirs]
        return (mask & (mine[:, None] >= theirs) if self.causal else mask)[:, None]

    def kept(self, source: int, pair: _Pair, query: Tensor) -> Kept | None:
        """Factors of the probabilities of a pair, whose queries are some of `query`."""
        if (dropped := self.dropped) is None:
            return None
        heads, wide = query.shape[1], torch.promote_types(query.dtype, torch.float32)
        rows = self._positions(self.view.index, query.device)[pair.queries]
        theirs = LocalTokens(length=self.tokens.length, runs=runs_of(self.tokens.length, self.view.size, source))
        start, stop, _ = pair.keys.indices(theirs.held)
        keys = theirs.within(start, stop)

        def factors(chunk: slice) -> Tensor:
            return dropped.kept((0, heads), rows[chunk], keys).to(wide).mul_(dropped.scale)

        return factors

    def _positions(self, index: int, device: torch.device) -> Tensor:
        runs = runs_of(self.tokens.length, self.view.size, index)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: KeyExchange, who: Visibility, scale: float
    ) -> Tensor:
        with unkept():  # results of every source would stay until the backward, and are no use to it
            whole = _attend_to_all(query, key, value, exchange, who, scale)
        output = whole.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, whole.log_sum)
        ctx.exchange, ctx.who, ctx.scale = exchange, who, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, output, log_sum = ctx.saved_tensors
        gradient = grads[0].contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        by_query = torch.zeros_like(query, dtype=wide)

        def of_source(source: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            by_key, by_value = torch.zeros_like(keys), torch.zeros_like(values)
            pair = ctx.who.pair(source)
            if pair is not None:
                rows, columns = (slice(None), slice(None), pair.queries), (slice(None), slice(None), pair.keys)
                mine, by_key[columns], by_value[columns] = attend_backward(
                    gradient[rows],
                    query[rows],
                    keys[columns],
                    values[columns],
                    Partial(output[rows], log_sum[rows]),
                    scale=ctx.scale,
                    causal=pair.causal,
                    mask=pair.mask,
                    kept=ctx.who.kept(source, pair, query),
                )
                by_query[rows] += mine
            return by_key, by_value

        by_key, by_value = ctx.exchange.gradients(key, value, ctx.who.tokens.length, of_source)
        return by_query.to(query.dtype), by_key, by_value, None, None, None


def _attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, exchange: KeyExchange, who: Visibility, scale: float
) -> Partial:
    seen = None
    for source, keys, values in exchange.visit(key, value, who.tokens.length):
        pair = who.pair(source)
        if pair is None:
            continue
        part = attend(
            query[:, :, pair.queries],
            keys[:, :, pair.keys],
            values[:, :, pair.keys],
            scale=scale,
            causal=pair.causal,
            mask=pair.mask,
            kept=who.kept(source, pair, query),
        )
        seen = merge(seen, _placed(part, query, value, pair.queries))
    return seen if seen is not None else nothing_seen(query, value)


def _placed(part: Partial, query: Tensor, value: Tensor, queries: slice) -> Partial:
    """Attention of all queries, where some have seen nothing."""
    if part.output.shape[2] == query.shape[2]:
        return part
    whole = nothing_seen(query, value)
    whole.output[:, :, queries] = part.output.to(whole.output.dtype)
    whole.log_sum[:, :, queries] = part.log_sum.to(whole.log_sum.dtype)
    return whole


class Attend(Protocol):
    """How the attention of a scheme is called."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tokens: LocalTokens,
        *,
        causal: bool,
        scale: float | None,
        dropped: DroppedAttention | None = None,
    ) -> Tensor:
        """Return attention, (samples, heads, own tokens, value size), of this rank's queries to the keys of all ranks.

        Query is (samples, heads, own tokens, size), key and value (samples, kv heads, own tokens, size), kv heads
        dividing heads.  `dropped`: what is dropped of its probabilities, of whole samples.  Call on every rank of the
        group; its backward calls all of them again.
        """
        ...


@final
class VisitedAttention:
    """Keys of all ranks come to the queries, as an exchange shows them."""

    def __init__(self, view: GroupView, exchange: KeyExchange) -> None:
        self._view, self._exchange = view, exchange

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tokens: LocalTokens,
        *,
        causal: bool,
        scale: float | None,
        dropped: DroppedAttention | None = None,
    ) -> Tensor:
        """See `Attend`."""
        who = Visibility(tokens, self._view, causal=causal, dropped=dropped)
        return shared(query, key, value, self._exchange, who, query.shape[-1] ** -0.5 if scale is None else scale)


def shared(query: Tensor, key: Tensor, value: Tensor, exchange: KeyExchange, who: Visibility, scale: float) -> Tensor:
    """Return attention of this rank's queries to the keys that an exchange shows."""
    return _SharedAttention.apply(query, key, value, exchange, who, scale)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


@final
class _Sharing(TorchFunctionMode):
    """Gives what calls `scaled_dot_product_attention` the attention above."""

    def __init__(
        self, name: str, tokens: LocalTokens, attend: Attend, *, is_causal: bool, ignores_masks: bool = False
    ) -> None:
        super().__init__()
        self._name, self._tokens, self._shared, self._is_causal = name, tokens, attend, is_causal
        self._ignores_masks = ignores_masks or tokens.documents is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:  # whose own call of attention would not come here
            raise self._refused("attends by nn.MultiheadAttention")
        if func is attend_dropping:
            return self._attend_dropping(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p > 0.0:
            raise self._refused(f"drops attention with dropout_p = {dropout_p}, by a mask over all tokens")
        self._check(query, key, attn_mask, is_causal=is_causal)
        return self._shared(query, key, value, self._tokens, causal=self._is_causal, scale=scale)

    def _attend_dropping(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: nn.Module,
        *,
        causal: bool,
        scale: float | None = None,
    ) -> Tensor:
        self._check(query, key, mask, is_causal=causal)
        if not isinstance(dropout, KeyedDropout):
            raise self._refused(f"drops attention by a {type(dropout).__name__}, whose draws have no key")
        dropped = DroppedAttention.of(dropout, query.shape[1], self._tokens.length)
        return self._shared(query, key, value, self._tokens, causal=self._is_causal, scale=scale, dropped=dropped)

    def _check(self, query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool) -> None:
        # Documents are those of the whole batch, so a mask that the model made of its own tokens says nothing more.
        if mask is not None and not self._ignores_masks:
            raise self._refused("gives attention a mask, which it made of the tokens of one rank")
        local = self._tokens.held
        if query.shape[2] != local or key.shape[2] != local:
            raise self._refused(f"attends from {query.shape[2]} to {key.shape[2]} tokens where this rank has {local}")
        # A call about one token may leave out that it is causal, so the model's own kind counts.
        if mask is None and is_causal != self._is_causal and local > 1:
            what = ("sees every token", "sees no later token")
            raise self._refused(f"{what[is_causal]}, where attention of this model {what[self._is_causal]}")

    def _refused(self, what: str) -> PlanError:
        return PlanError(
            f"plan.mesh.context lets ranks share a sequence, but {self._name} {what}. Use plan.mesh.context = 1, and"
            " tensor ranks or recomputation for long sequences."
        )


def sharing(
    forward: Callable[..., Any],
    name: str,
    attend: Attend,
    context: StepContext,
    *,
    is_causal: bool,
    ignores_masks: bool = False,
) -> Callable[..., Any]:
    """Return a module's forward whose attention sees the tokens of all ranks, where a microbatch is in hand.

    `is_causal`: what the model's attention is (`Blueprint.attention`), whatever documents there are.  `ignores_masks`:
    the masks that it gives are known to say nothing.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tokens = None if context.current is None else context.current.tokens
        if tokens is None:
            return forward(*args, **kwargs)
        with _Sharing(name, tokens, attend, is_causal=is_causal, ignores_masks=ignores_masks):
            return forward(*args, **kwargs)

    return run
