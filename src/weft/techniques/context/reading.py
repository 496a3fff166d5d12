"""Shared attention of modules that write theirs out; loaded where a model does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.attention.place_biases import Place
from weft.model.attention.sample_biases import BiasesOfRank, WholeBiases
from weft.model.attention.scored import DrawnDropout
from weft.model.attention.written import AttentionReader
from weft.model.blueprint import Blueprint
from weft.techniques.context.attention import Attend, Shared, Sharing
from weft.techniques.context.form import AttentionForm
from weft.techniques.core import StepContext
from weft.techniques.core.local_tokens import LocalTokens


def reading(
    forward: Callable[..., Any],
    name: str,
    attend: Attend,
    context: StepContext,
    *,
    is_causal: bool,
    ignores_masks: bool,
    view: GroupView,
    biases: BiasesOfRank | None,
    windows: Mapping[Place, int],
) -> Callable[..., Any]:
    """Return the same as `sharing` of a module whose attention may be written out.  `view`: its tensor ranks; `biases`:
    who knows what it adds to its scores, of places alone; `windows`: see `Blueprint`."""
    readers: dict[int, AttentionReader] = {}
    shared = Shared(name, _apart(attend), is_causal, ignores_masks)

    def drawn(rate: float) -> DrawnDropout:
        from weft.techniques.randomness.token_draws import claimed  # loaded where something draws by functions

        return claimed(rate, context, view)

    def reader_of(tokens: int) -> AttentionReader:
        if tokens not in readers:
            readers[tokens] = AttentionReader(
                tokens, causal=is_causal, windows=windows, refused=_unread, drawn=drawn, biases=biases
            )  # fmt: skip
        return readers[tokens]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tokens = None if context.current is None else context.current.tokens
        if tokens is None:
            return forward(*args, **kwargs)
        reader = reader_of(tokens.held)
        reader.enter(name, None)
        try:
            with Sharing(shared, tokens), reader:
                return forward(*args, **kwargs)
        finally:
            reader.leave()

    return run


def _apart(attend: Attend) -> Attend:
    """The same attention, of which what stands around a module reads nothing."""

    def run(query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return attend(query, key, value, tokens, form)

    return run


def _unread(name: str, what: str) -> PlanError:
    return PlanError(
        f"plan.mesh.context lets ranks share a sequence, but {name} writes its attention out, and {what}. Use"
        " plan.mesh.context = 1, and tensor ranks or recomputation for long sequences."
    )


def leave_out_masks(module: nn.Module, context: StepContext, biases: BiasesOfRank | None) -> None:
    """Let attention that a model of transformers writes out get masks of whole samples alone, and none of a rank's own
    tokens; and `biases` know when a forward begins."""
    from weft.model.hf import drop_masks, making_masks  # models of one's own may need nothing of transformers

    written, forward = drop_masks(module, written=True), module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        state = context.current
        if state is not None and state.tokens is not None:
            if biases is not None:
                biases.begin()
            return forward(*args, **kwargs)
        with making_masks(written):
            return forward(*args, **kwargs)

    module.forward = functools.wraps(forward)(run)


def biases_of(
    blueprint: Blueprint, root: nn.Module, dtype: torch.dtype, context: StepContext, view: GroupView
) -> BiasesOfRank | None:
    """Return who knows what modules of `root` add to their scores; None: nothing.  `view`: its tensor ranks."""
    if not blueprint.biased:
        return None

    def tokens() -> tuple[int, int]:
        held = context.require().tokens
        assert held is not None, "asked of ranks that share a sequence"
        return held.length, held.held

    return BiasesOfRank(WholeBiases(blueprint, dtype), root, tokens, lambda heads: view.index * heads)
