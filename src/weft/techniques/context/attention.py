"""Attention of this rank's tokens to those of all ranks that share the sequence.

What a model's `scaled_dot_product_attention` would see of its own tokens alone is given to a function of our own, which
visits the keys of every rank (`exchange.py`) and merges what they give (`partial.py`).  The model's own forward stays:
its modules that call the function run under a mode that knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.attention.call import (
    PLAIN,
    AttentionTaker,
    MaskPattern,
    ScoreMod,
    attend_multi_head,
    multi_head_call,
)
from weft.model.attention.call import attend as attend_call
from weft.model.derivatives import once
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.exchange import KeyExchange
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.partial import (
    Partial,
    attend,
    attend_backward,
    gradient_of_sinks,
    merge,
    nothing_seen,
    with_sinks,
)
from weft.techniques.context.visibility import Pair, Visibility
from weft.techniques.core import StepContext
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.core.unkept import unkept
from weft.techniques.randomness.keyed_dropout import KeyedDropout


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        exchange: KeyExchange,
        who: Visibility,
    ) -> Tensor:
        # Only the merged output and L are kept, as flash attention does: the partial results of every source would take
        # c times the memory, and the backward recomputes its probabilities from L.
        with unkept():
            whole = attend_to_all(query, key, value, exchange, who)
            whole = whole if sinks is None else with_sinks(whole, sinks)
        output = whole.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, whole.log_sum)
        ctx.exchange, ctx.who = exchange, who
        return output

    @staticmethod
    @once("attention whose keys ranks share", "Use plan.mesh.context = 1.")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        gradient, whole = grads[0].contiguous(), Partial(output, log_sum)
        made = gradients_of_all(gradient, query, key, value, whole, ctx.exchange, ctx.who)
        by_sinks = None if sinks is None else gradient_of_sinks(gradient, whole, sinks)
        return *made, by_sinks, None, None


def gradients_of_all(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Partial,
    exchange: KeyExchange,
    who: Visibility,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values.  Call on every rank of the group."""
    back = _Backward(who, query, key.shape[1], gradient, whole)
    by_key, by_value = exchange.gradients(key, value, who.shown, back.of_source)
    return back.by_query.to(query.dtype), by_key, by_value


@final
class _Backward:
    """Accumulates the gradient of this rank's queries, and computes those of the keys that they see."""

    def __init__(self, who: Visibility, query: Tensor, kv_heads: int, gradient: Tensor, whole: Partial) -> None:
        self._who, self._query, self._gradient, self._whole = who, query, gradient, whole
        self._groups = query.shape[1] // kv_heads
        # Sums over sources in fp32: c additions in bf16 would lose the small ones.
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self.by_query = torch.zeros_like(query, dtype=self._wide)

    def of_source(self, source: int, keys: Tensor, values: Tensor, kv_heads: slice) -> tuple[Tensor, Tensor]:
        """See `Gradients`."""
        pairs = list(self._who.pairs(source))
        if len(pairs) == 1 and pairs[0].keys == slice(None):  # the usual case writes each gradient once, without zeros
            return self._of_pair(source, pairs[0], keys, values, kv_heads)
        by_key, by_value = (torch.zeros_like(tensor, dtype=self._wide) for tensor in (keys, values))
        for pair in pairs:
            columns = (slice(None), slice(None), pair.keys)
            gradients = self._of_pair(source, pair, keys[columns], values[columns], kv_heads)
            by_key[columns] += gradients[0]
            by_value[columns] += gradients[1]
        return by_key.to(keys.dtype), by_value.to(values.dtype)

    def _of_pair(self, source: int, pair: Pair, keys: Tensor, values: Tensor, kv_heads: slice) -> tuple[Tensor, Tensor]:
        heads = (kv_heads.start * self._groups, kv_heads.stop * self._groups)
        rows = (slice(None), slice(*heads), pair.queries)
        mine, by_key, by_value = attend_backward(
            self._gradient[rows],
            self._query[rows],
            keys,
            values,
            Partial(self._whole.output[rows], self._whole.log_sum[rows]),
            self._who.scoring(source, pair, heads),
            self._who.kept(source, pair, heads, self._query),
        )
        self.by_query[rows] += mine
        return by_key, by_value


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, exchange: KeyExchange, who: Visibility) -> Partial:
    """Return attention of this rank's queries to the keys of all ranks.  Call on every rank of the group."""
    seen: Partial | None = None
    heads = (0, query.shape[1])
    for source, keys, values in exchange.visit(key, value, who.shown):
        for pair in who.pairs(source):
            part = attend(
                query[:, :, pair.queries],
                keys[:, :, pair.keys],
                values[:, :, pair.keys],
                who.scoring(source, pair, heads),
                who.kept(source, pair, heads, query),
            )
            if part.output.shape[2] == query.shape[2]:
                seen = merge(seen, part)
                continue
            # Some queries only, as under a causal mask where a later rank's keys concern the tail run alone.
            seen = nothing_seen(query, value) if seen is None else seen
            _merge_rows(seen, part, pair.queries)
    return seen if seen is not None else nothing_seen(query, value)


def _merge_rows(seen: Partial, part: Partial, queries: slice) -> None:
    """Merge `part`, of the queries in a slice, into `seen`, of all queries, in place."""
    rows = (slice(None), slice(None), queries)
    merged = merge(Partial(seen.output[rows], seen.log_sum[rows]), part)
    seen.output[rows], seen.log_sum[rows] = merged.output, merged.log_sum


class Attend(Protocol):
    """The attention of one context scheme."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
        """Return attention, (samples, heads, own tokens, value size), of this rank's queries to the keys of all ranks.

        Query is (samples, heads, own tokens, size), key and value (samples, kv heads, own tokens, size), kv heads
        dividing heads.  Call on every rank of the group; its backward calls all of them again.
        """
        ...


@final
class VisitedAttention:
    """Attention in which the keys of all ranks come to the queries, in the order of a `KeyExchange`."""

    def __init__(self, view: GroupView, exchange: KeyExchange, *, together: int = 1) -> None:
        """`together`: neighbours whose tokens each rank of the group has, with some of the heads."""
        self._view, self._exchange, self._together = view, exchange, together

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
        """See `Attend`."""
        if torch.compiler.is_compiling():
            return self._in_graph(query, key, value, tokens, form)
        who = Visibility(tokens, self._view, form, self._together)
        return _ContextAttention.apply(query, key, value, form.mod.sinks, self._exchange, who)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

    def _in_graph(self, query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
        """Return the same as one operator of a compiler's graph (`operators.py`)."""
        view, dropped = self._view, form.dropped
        assert form.mod.is_plain, "compiled blocks were checked"
        output, _ = torch.ops.weft.shared_attention(
            query, key, value, tokens.documents, None if dropped is None else dropped.words,
            self._exchange.scheme, "" if view.group is None else str(view.group.group_name), view.ranks, view.index,
            self._together, tokens.length, form.pattern.causal, form.scale, form.pattern.window,
            0 if dropped is None else dropped.count, 0 if dropped is None else dropped.first_head,
        )  # fmt: skip
        return output


@final
@dataclass(frozen=True, slots=True)
class AttentionModule:
    """A module whose attention is shared.  An object of its own: of what compiled code holds by itself it would ask
    whether it is the very same one, and of the name so that every block were compiled for itself."""

    name: str
    attend: Attend
    is_causal: bool
    """Whether the model's attention is causal (`Blueprint.attention`), whatever documents there are."""
    ignores_masks: bool = False
    """Whether the masks that the module passes are known to hide nothing more."""


@final
class ContextAttentionMode(AttentionTaker):
    """Gives what calls `scaled_dot_product_attention`, `attend` or `nn.MultiheadAttention` the attention above."""

    def __init__(self, module: AttentionModule, tokens: LocalTokens) -> None:
        super().__init__()
        self._module, self._tokens = module, tokens
        self._ignores_masks = module.ignores_masks or tokens.documents is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._of_torch(*args, **(kwargs or {}))
        if func is attend_call:
            return self._share(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            call = multi_head_call(args, kwargs or {})
            if call is None:
                raise self._refused("attends by nn.MultiheadAttention with need_weights = True, or with keys added")
            return attend_multi_head(call, self._of_torch)
        if func is Tensor.unflatten and torch.compiler.is_compiling():  # which Dynamo cannot enter by its function
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _of_torch(
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
        """The arguments of `scaled_dot_product_attention`."""
        if dropout_p > 0.0:
            raise self._refused(f"drops attention with dropout_p = {dropout_p}, by a mask over all tokens")
        return self._share(query, key, value, MaskPattern(causal=is_causal), ScoreMod(scale=scale), mask=attn_mask)

    def _share(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: MaskPattern,
        mod: ScoreMod = PLAIN,
        *,
        mask: Tensor | None = None,
        dropout: nn.Module | None = None,
    ) -> Tensor:
        """The arguments of `attend`."""
        self._check(query, key, mask, pattern, mod)
        length, window, dropped = self._tokens.length, pattern.window, None
        if isinstance(dropout, KeyedDropout):
            dropped = DroppedAttention.of(dropout, query.shape[1], length)
        elif dropout is not None:
            raise self._refused(f"drops attention by a {type(dropout).__name__}, whose draws have no key")
        form = AttentionForm(
            # A call about one token may leave out that it is causal, so the model's own kind counts.
            pattern=MaskPattern(
                causal=self._module.is_causal, window=window if window is not None and window < length else None
            ),
            mod=mod,
            scale=query.shape[-1] ** -0.5 if mod.scale is None else mod.scale,
            dropped=dropped,
        )
        return self._module.attend(query, key, value, self._tokens, form)

    def _check(self, query: Tensor, key: Tensor, mask: Tensor | None, pattern: MaskPattern, mod: ScoreMod) -> None:
        is_causal = self._module.is_causal
        # Documents are those of the whole batch, so a mask that the model made of its own tokens says nothing more.
        if mask is not None and not self._ignores_masks:
            raise self._refused("gives attention a mask, which it made of the tokens of one rank")
        local = self._tokens.held
        if query.shape[2] != local or key.shape[2] != local:
            raise self._refused(f"attends from {query.shape[2]} to {key.shape[2]} tokens where this rank has {local}")
        if mask is None and pattern.causal != is_causal and local > 1:
            what = ("sees every token", "sees no later token")
            raise self._refused(f"{what[pattern.causal]}, where attention of this model {what[is_causal]}")
        if pattern.window is not None and not is_causal:
            raise self._refused("attends through a window, where attention of this model sees every token")
        for name, by_head in (("sinks", mod.sinks), ("slopes", mod.slopes)):
            if by_head is not None and tuple(by_head.shape) != (query.shape[1],):
                raise self._refused(f"has {by_head.numel()} {name} for {query.shape[1]} heads")

    def _refused(self, what: str) -> PlanError:
        return PlanError(
            f"plan.mesh.context lets ranks share a sequence, but {self._module.name} {what}. Use plan.mesh.context = 1,"
            " and tensor ranks or recomputation for long sequences."
        )


def wrap_attention(forward: Callable[..., Any], module: AttentionModule, context: StepContext) -> Callable[..., Any]:
    """Return a module's forward whose attention sees the tokens of all ranks, where a microbatch is in hand."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tokens = None if context.current is None else context.current.tokens
        if tokens is None:
            return forward(*args, **kwargs)
        with ContextAttentionMode(module, tokens):
            return forward(*args, **kwargs)

    return run
