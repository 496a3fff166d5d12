"""What ranks that share a sequence compute together, as operators: a compiler puts each into its graph unopened.

A compiler cannot follow messages that travel beside the attention, nor look into a group.  Its graph has one operator
for the attention of all ranks, one for the gradients of it, and one for an exchange of heads; what they are of is said
in numbers and names, which are the same in every block and step, so that one graph serves all blocks of a kind.
Loaded where blocks that share a sequence are compiled; without a compiler nothing goes through here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from weft.comm.mesh import GroupView
from weft.model.attention.call import MaskPattern
from weft.techniques.context.attention import attend_to_all, gradients_of_all
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.exchange import GatherExchange, RingExchange
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.partial import Partial
from weft.techniques.context.ulysses import exchange_parts
from weft.techniques.context.visibility import Visibility
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness.keyed_dropout import layer_words


def _view_of(group: str, ranks: Sequence[int], index: int) -> GroupView:
    resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage]
    return GroupView(tuple(ranks), index, resolve(group) if group else None)


def _called(
    documents: Tensor | None,
    words: Tensor | None,
    scheme: str,
    group: str,
    ranks: Sequence[int],
    index: int,
    together: int,
    length: int,
    causal: bool,
    scale: float,
    window: int | None,
    dropped: int,
    first_head: int,
) -> tuple[RingExchange | GatherExchange, Visibility]:
    """How keys are exchanged, and who sees whom."""
    view = _view_of(group, ranks, index)
    drops = None if words is None else DroppedAttention(words, dropped, first_head, length)
    form = AttentionForm(pattern=MaskPattern(causal=causal, window=window), scale=scale, dropped=drops)
    tokens = LocalTokens(length=length, runs=(), documents=documents)
    exchange = RingExchange(view) if scheme == "ring" else GatherExchange(view)
    return exchange, Visibility(tokens, view, form, together)


def _shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    words: Tensor | None,
    scheme: str,
    group: str,
    ranks: Sequence[int],
    index: int,
    together: int,
    length: int,
    causal: bool,
    scale: float,
    window: int | None,
    dropped: int,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """Return attention and L of each query (`partial.py`).  Call on every rank of the group."""
    exchange, who = _called(
        documents, words, scheme, group, ranks, index, together, length, causal, scale, window, dropped, first_head
    )
    whole = attend_to_all(query, key, value, exchange, who)
    return whole.output.to(query.dtype).contiguous(), whole.log_sum.contiguous()


def _like_shared(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output, query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _shared_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    documents: Tensor | None,
    words: Tensor | None,
    scheme: str,
    group: str,
    ranks: Sequence[int],
    index: int,
    together: int,
    length: int,
    causal: bool,
    scale: float,
    window: int | None,
    dropped: int,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.  Call on every rank of the group."""
    exchange, who = _called(
        documents, words, scheme, group, ranks, index, together, length, causal, scale, window, dropped, first_head
    )
    whole = Partial(output, log_sum)
    made = gradients_of_all(gradient.contiguous(), query, key, value, whole, exchange, who)
    by_query, by_key, by_value = (tensor.contiguous() for tensor in made)
    return by_query, by_key, by_value


def _like_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return by_query, by_key, by_value


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, words, *settings = inputs
    ctx.save_for_backward(query, key, value, *output, documents, words)
    ctx.settings = settings


def _backward(ctx: Any, gradient: Tensor, *unused: Tensor | None) -> tuple[Any, ...]:
    made = torch.ops.weft.shared_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return *made, None, None, *(None for _ in ctx.settings)


def _exchanged(flat: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Send run j of a flat tensor, `given[j]` elements, to member j; return what comes from all, end to end."""
    return exchange_parts(flat, list(sent), list(received), _view_of(group, range(len(sent)), 0))


def _like_exchanged(flat: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    return flat.new_empty(sum(received))


def _note_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.group = inputs


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.weft.exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _like_words(sample_ids: Tensor, moment: Tensor, name: Tensor, call: int) -> Tensor:
    return torch.empty_like(sample_ids)


@functools.cache
def make_known() -> None:
    """Make the operators known to torch, once.  Call before what uses them is compiled."""
    torch.library.custom_op("weft::shared_attention", _shared_attention, mutates_args=())
    torch.library.register_fake("weft::shared_attention", _like_shared)
    torch.library.register_autograd("weft::shared_attention", _backward, setup_context=_keep_for_backward)
    torch.library.custom_op("weft::shared_attention_backward", _shared_attention_backward, mutates_args=())
    torch.library.register_fake("weft::shared_attention_backward", _like_backward)
    torch.library.custom_op("weft::exchanged", _exchanged, mutates_args=())
    torch.library.register_fake("weft::exchanged", _like_exchanged)
    torch.library.register_autograd("weft::exchanged", _exchange_back, setup_context=_note_exchange)
    torch.library.custom_op("weft::layer_words", layer_words, mutates_args=())
    torch.library.register_fake("weft::layer_words", _like_words)
