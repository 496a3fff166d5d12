"""Attention that a model writes out by itself (product, scale, mask, softmax, dropout, product), read as one call.

Under `AttentionReader` the product of queries and keys is not computed: it gives `Scores`, which know what they would
be.  What a model then does to them is understood, step by step, and their product with the values is one call of
`scaled_dot_product_attention`, or of what drops or sees through a window (`dropping.py`), for whichever mode stands
below.  Whatever is not understood is refused by name.  The look at a model's forward, the outline of what its ranks
send and the ranks themselves read by this one, so what they take a model to compute is the same.

Who sees whom is taken from values: of a mask that a buffer or the forward itself has, or of what a mask of
`transformers` was made from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from weft.model.attention import sinks
from weft.model.attention.dropping import attend_dropping, attend_in_window
from weft.model.attention.place_biases import Added, Biases, Place, has_values, joined
from weft.model.attention.repeats import REPEATS, TURNS, note_repeat, unrepeated
from weft.model.attention.scored import DrawnDropout, attend_scored
from weft.model.attention.scores import (
    CASTS,
    FACTS,
    SIZES,
    Scores,
    State,
    UnreadError,
    asked,
    cast_of,
    changed,
    has_scores,
    name_of,
    operands_of,
    shape_of,
    versions_of,
)
from weft.model.attention.sights import NUMBERS, Sight, is_corner, note_number, number_of, plain_number, seen_in

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
_HIDDEN = -1e4
"""A score no greater than this is hidden: beside any other its exponential is zero, in fp64, too."""
_MOST_KNOWN = 64
"""Masks of whose values is remembered what they say."""


class AttentionReader(TorchFunctionMode):
    """Reads written attention among so many tokens.  The modes that take its calls must stand below it.

    `causal`: whether masks of `transformers` are left out, so that attention of which nothing hides a score is causal,
    and sees through one of `windows` where these have one.
    `refused`: makes an error of what is not understood: the end of a sentence that begins with the module.  `drawn`:
    what drops by a rate where a module drops its probabilities by a function, asked for when it does.  `biases`: who
    knows what may be added to scores; None: nothing but masks.
    """

    def __init__(
        self,
        tokens: int,
        *,
        causal: bool,
        refused: Callable[[str, str], Exception],
        windows: Mapping[Place, int] | None = None,
        drawn: Callable[[float], DrawnDropout] = DrawnDropout,
        biases: Biases | None = None,
    ) -> None:
        super().__init__()
        self._tokens, self._causal, self._refused, self._drawn = tokens, causal, refused, drawn
        self._biases, self._windows = biases, windows or {}
        self.seen: dict[Place, int | None] = {}
        """Windows through which attention saw by masks that ranks leave out; None: through none."""
        self._places: list[tuple[str, nn.Module | None]] = []
        self._counts: list[int] = []
        """Attentions of each of the calls that are running."""
        self.has_begun = False
        """Whether there was a product of queries and keys."""
        self._known: dict[tuple[object, ...], tuple[Tensor, Sight | None]] = {}

    def enter(self, name: str, module: nn.Module | None) -> None:
        """Say that a module begins to run; None: one that is no dropout, nor are those inside of it that are called."""
        self._places.append((name, module))
        self._counts.append(0)

    def leave(self) -> None:
        """Say that the innermost module has run."""
        self._places.pop()
        self._counts.pop()

    def watch(self, root: nn.Module) -> None:
        """Know which module of `root` is running, and read all that it runs.  For a copy that nobody else uses."""
        for name, module in root.named_modules():

            def enter(module: nn.Module, args: Any, name: str = name) -> None:
                self.enter(name, module)

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                self.leave()

            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)
        forward = root.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        root.forward = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Mapping[str, Any] = kwargs or {}
        name = name_of(func)
        try:
            if has_scores(args, given):
                return self._of_scores(func, name, args, given)
            if name in _PRODUCTS and (begun := self._begun(name, args, given)) is not None:
                return begun
        except UnreadError as problem:
            raise self._refused(self._place[0], str(problem)) from problem
        if name == "tensor" and self._biases is not None:
            given = self._biases.made(given)
        made = func(*args, **given)
        if isinstance(made, Tensor):
            if name in NUMBERS:
                note_number(made, name, args, given)
            elif (called := name_of(func.__self__) if name == "__get__" else name) in REPEATS or called in TURNS:
                note_repeat(made, called, args, given)
        return made

    @property
    def _place(self) -> tuple[str, nn.Module | None]:
        return self._places[-1] if self._places else ("", None)

    # ── the product of queries and keys ───────────────────────────────────────────────────────────────────────────────

    def _begun(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores | None:
        """Scores, where this is a product of queries and keys of all tokens at hand; None: it is another one."""
        names = ("input", "batch1", "batch2") if name == "baddbmm" else ("input", "mat2" if name == "bmm" else "other")
        operands = [*args[: len(names)], *(kwargs[each] for each in names[len(args) :] if each in kwargs)]
        if len(operands) != len(names) or not {*kwargs} <= {*names, "beta", "alpha"} or len(args) > len(names):
            return None
        if not all(isinstance(each, Tensor) for each in operands):
            return None
        query, key = operands[-2:]
        if query.dim() not in (3, 4) or query.dim() != key.dim() or not query.is_floating_point():
            return None
        if query.shape[:-2] != key.shape[:-2] or query.shape[-1] != key.shape[-2] or query.shape[-1] < 2:
            return None
        if not query.shape[-2] == key.shape[-1] == self._tokens > 1:
            return None
        self.has_begun = True
        lead = tuple(query.shape[:-2])
        heads = (lead[0], lead[1]) if len(lead) == 2 else None
        made = Scores.of(
            State(
                query=query,
                key=key,
                lead=lead,
                heads=heads,
                dtype=query.dtype,
                scale=1.0,
                place=self._place[0],
                with_gradients=torch.is_grad_enabled(),
                versions=versions_of(query, key),
            )  # fmt: skip
        )
        return made if name != "baddbmm" else self._begun_with(made, operands[0], kwargs)

    def _begun_with(self, scores: Scores, base: Any, kwargs: Mapping[str, Any]) -> Scores:
        """The scores of a product that begins with something: beta · base + alpha · query · keyᵀ."""
        beta, scale = (plain_number(kwargs.get(each, 1.0)) for each in ("beta", "alpha"))
        if beta is None or scale is None or not 0.0 < scale < math.inf:
            raise UnreadError(f"multiplies scores by {scale}")
        scores = changed(scores, scale=scale)
        if beta == 0.0 or number_of(base) == 0.0:
            return scores
        if self._biases is None or not self._biases.takes(base):
            raise UnreadError("adds scores to something that is not known to be zero (positions, it may be)")
        return changed(scores, added=(Added(base, beta, len(scores.state.lead)),))

    # ── what is done to scores ────────────────────────────────────────────────────────────────────────────────────────

    def _of_scores(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "__get__":
            name = name_of(func.__self__)
            if name in FACTS:
                return asked(func, args, kwargs)
            raise UnreadError(f"asks for {name} of its scores")
        if name in SIZES:
            return asked(func, args, kwargs)
        sinks.check_whole(name, args)
        if name in _PRODUCTS:
            return self._finished(name, args, kwargs)
        if name in CASTS:
            return changed(args[0], dtype=cast_of(func, args, kwargs))
        if (more := sinks.RULES.get(name)) is not None:
            return more(args, kwargs)
        rule = _RULES.get(name)
        if rule is None:
            raise UnreadError(f"does {name} to its scores")
        return rule(self, args, kwargs)

    def _same(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        return changed(args[0])

    def _view(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        """Samples and heads in one dim, or in two."""
        scores: Scores = args[0]
        state = scores.state
        sizes = args[1:] or (kwargs.get("shape") or kwargs.get("size"),)
        sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        if not isinstance(sizes, list | tuple) or not all(isinstance(size, int) for size in sizes):
            raise UnreadError("lays its scores out otherwise")
        shape = list(sizes)
        if shape.count(-1) == 1:
            shape[shape.index(-1)] = math.prod(shape_of(scores)) // max(1, -math.prod(shape))
        lead, tokens = tuple(shape[:-2]), tuple(shape[-2:])
        if tokens != (self._tokens,) * 2 or math.prod(lead) != math.prod(state.lead) or len(lead) not in (1, 2):
            raise UnreadError("lays its scores out otherwise")
        heads = (lead[0], lead[1]) if len(lead) == 2 else state.heads
        if state.heads not in (None, heads):
            raise UnreadError("takes other heads together")
        return changed(scores, lead=lead, heads=heads)

    def _multiplied(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        scores, other = operands_of(args)
        number = number_of(other)
        if number is not None:
            return self._scaled(scores, number)
        if scores.state.is_probability or scores.state.gate is not None or not isinstance(other, Tensor):
            raise UnreadError("multiplies its scores by a tensor")
        return changed(scores, gate=other)

    def _divided(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        number = number_of(args[1]) if len(args) == 2 and not kwargs else None
        if not number or not isinstance(args[0], Scores):
            raise UnreadError("divides its scores by a tensor")
        return self._scaled(args[0], 1.0 / number)

    def _scaled(self, scores: Scores, number: float) -> Scores:
        state = scores.state
        if state.is_probability or state.gate is not None or not 0.0 < number < math.inf:
            raise UnreadError(f"multiplies {'its probabilities' if state.is_probability else 'scores'} by {number}")
        added = tuple(replace(each, factor=each.factor * number) for each in state.added)
        scores = changed(scores, hidden=state.hidden * number, added=added)
        if state.softcap is not None:
            return changed(scores, softcap=state.softcap * number)
        return changed(scores, scale=state.scale * number)

    def _added(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        scores, other = operands_of(args)
        if kwargs or scores.state.is_probability or not isinstance(other, Tensor):
            raise UnreadError("adds something to its scores")
        if scores.state.gate is not None:
            return self._gated(scores, scores.state.gate, other)
        sight = self._sight(other, added=True)
        hides = sight is not None and sight.hidden <= _HIDDEN
        if hides or self._biases is None or not self._biases.takes(other):
            return self._hiding(scores, sight, "adds to its scores")
        state = scores.state
        dtype = torch.promote_types(state.dtype, other.dtype)
        return changed(scores, dtype=dtype, added=(*state.added, Added(other, 1.0, len(state.lead))))

    def _gated(self, scores: Scores, gate: Tensor, other: Tensor) -> Scores:
        """scores · gate + other: a gate of ones lets scores be, one of zeros leaves `other` alone."""
        kept, added = self._sight(gate, added=False), self._sight(other, added=True)
        if kept is None or added is None or (kept.causal, kept.window) != (added.causal, added.window):
            raise UnreadError("multiplies its scores by a tensor and adds another, which is no mask that can be read")
        return self._hiding(changed(scores, gate=None), added, "")

    def _filled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        """masked_fill(scores, mask, value)."""
        if len(args) + len(kwargs) != 3:
            raise UnreadError("fills its scores")
        mask, value = args[1] if len(args) > 1 else kwargs["mask"], args[2] if len(args) > 2 else kwargs["value"]
        return self._chosen(args[0], mask, value, hides=True)

    def _where(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        """where(mask, scores, value); as a method scores.where(mask, value)."""
        if kwargs or len(args) != 3:
            raise UnreadError("picks from its scores")
        if isinstance(args[0], Scores):
            return self._chosen(args[0], args[1], args[2], hides=False)
        if isinstance(args[1], Scores):
            return self._chosen(args[1], args[0], args[2], hides=False)
        return self._chosen(args[2], args[0], args[1], hides=True)

    def _chosen(self, scores: Any, mask: Any, value: Any, *, hides: bool) -> Scores:
        """Scores with `value` where a mask of bool hides them, or does not show them."""
        number = number_of(value)
        if not isinstance(scores, Scores) or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise UnreadError("picks from its scores")
        if number is None or scores.state.is_probability or scores.state.gate is not None:
            raise UnreadError("puts something else in the place of some of its scores")
        sight = self._sight(mask, added=False, inverted=hides)
        return self._hiding(
            scores, None if sight is None else replace(sight, hidden=number), "picks from its scores by"
        )

    def _hiding(self, scores: Scores, sight: Sight | None, what: str) -> Scores:
        """Scores some of which are hidden."""
        if sight is None:
            raise UnreadError(f"{what} something that is no mask which can be read (positions or padding, it may be)")
        state = scores.state
        windows = [each for each in (state.window, sight.window) if each is not None]
        left_out = [each for each in (state.left_out, sight.window if sight.is_left_out else None) if each is not None]
        return changed(
            scores,
            causal=state.causal or sight.causal,
            window=min(windows, default=None),
            left_out=min(left_out, default=None),
            hidden=max(state.hidden, sight.hidden),
        )

    def _softmax(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        given = dict(zip(("input", "dim", "_stacklevel", "dtype"), args, strict=False)) | dict(kwargs)
        if len(args) > 2 and not isinstance(args[2], int):  # as a method: dim, then dtype
            given["dtype"] = args[2]
        scores: Any = given.get("input")
        if not isinstance(scores, Scores) or scores.state.is_probability or scores.state.gate is not None:
            raise UnreadError("takes a softmax of something else than scores")
        if given.get("dim") not in (-1, len(scores.state.lead) + 1):
            raise UnreadError("takes a softmax that is not over the keys")
        if scores.state.hidden > _HIDDEN:
            raise UnreadError(f"hides scores by {scores.state.hidden}, which leaves something of them")
        return changed(scores, is_probability=True, dtype=given.get("dtype") or scores.state.dtype)

    def _dropped(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
        scores: Any = given["input"]
        training = bool(given.get("training", given.get("train", True)))
        if not training or given.get("p", 0.5) == 0.0:
            return changed(scores)
        place, module = self._place
        if given.get("inplace") or not isinstance(scores, Scores):
            raise UnreadError("drops attention in place")
        if isinstance(module, nn.Dropout):
            return scores.dropped_by(module)
        rate = plain_number(given.get("p", 0.5))
        if place != scores.state.place or rate is None or not 0.0 < rate < 1.0:
            raise UnreadError("drops attention by a function of another module, or by no rate between 0 and 1")
        if not scores.state.is_probability or scores.state.dropout is not None:
            raise UnreadError("drops scores that are no probabilities, or drops them twice")
        return scores.dropped_by(self._drawn(rate))

    # ── the product with the values ───────────────────────────────────────────────────────────────────────────────────

    def _finished(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        if kwargs or len(args) != 2 or name == "baddbmm" or not isinstance(args[0], Scores):
            raise UnreadError("multiplies something by its scores")
        state, value = args[0].state, args[1]
        if not isinstance(value, Tensor) or isinstance(value, Scores) or not state.is_probability:
            raise UnreadError("multiplies by scores of which there was no softmax")
        if tuple(value.shape[:-1]) != (*state.lead, self._tokens) or value.dtype != state.dtype:
            raise UnreadError("multiplies its probabilities by something else than one value for each key")
        if state.place != self._place[0]:
            raise UnreadError(f"attends by scores that {state.place or 'the forward'} made")
        if torch.is_grad_enabled() != state.with_gradients:
            raise UnreadError("makes its scores partly without gradients")
        if state.versions != versions_of(state.query, state.key):
            raise UnreadError("changes queries or keys after their product")
        if state.heads is None:
            raise UnreadError("has samples and heads in one dim, and nothing shows which is which")
        at = (state.place, self._counts[-1] if self._counts else 0)
        if self._counts:
            self._counts[-1] += 1
        bias = self._bias_of(state, at, *state.heads)
        key, value = self._of_fewer_heads(state.key, value)
        parts = [each.unflatten(0, state.heads) if each.dim() == 3 else each for each in (state.query, key, value)]
        query, key, value = (each if each.dtype == value.dtype else each.to(value.dtype) for each in parts)
        mixed = self._attended(self._seen_by(state, at), query, key, value, bias)
        return mixed.flatten(0, 1) if len(state.lead) == 1 else mixed

    def _of_fewer_heads(self, turned: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, which come with the last two dims in each other's place, and values; as they were before heads were
        repeated, where both were."""
        few = unrepeated(turned, turned=True), unrepeated(value)
        if few[0] is None or few[1] is None or few[0].shape[:2] != few[1].shape[:2]:
            return turned.transpose(-1, -2), value
        return few[0], few[1]

    def _seen_by(self, state: State, at: Place) -> State:
        """The same with what masks say that were left out."""
        if self.seen.setdefault(at, state.left_out) != state.left_out:
            raise UnreadError("sees through another window where it is called again")
        if not self._causal:
            return state
        windows = [each for each in (state.window, self._windows.get(at)) if each is not None]
        return replace(state, causal=True, window=min(windows, default=None))

    def _bias_of(self, state: State, at: Place, samples: int, heads: int) -> Tensor | None:
        """What was added to the scores and is no mask."""
        if self._biases is None:
            return None
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            bias = joined(state.added, samples, heads, self._tokens)
            if bias is None and state.added:
                raise UnreadError("adds to its scores something that differs between samples")
            try:
                bias = self._biases.placed(at, bias)
            except ValueError as problem:
                raise UnreadError(str(problem)) from problem
            if bias is None:
                return None
            with _disable_current_modes():
                spread = float(bias.max() - bias.min()) if has_values(bias) else 0.0
        if state.hidden > _HIDDEN - spread:
            raise UnreadError(f"hides scores by {state.hidden}, and adds up to {spread} more to some of them")
        return bias

    def _attended(self, state: State, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        causal, window, beside = state.causal, state.window, state.sinks
        if bias is not None or state.softcap is not None or beside is not None:
            if beside is not None:
                beside = beside[:, 0] if beside.shape[1] == 1 else beside.logsumexp(1)
            scale = state.scale if state.softcap is None else state.scale * state.softcap
            return attend_scored(
                query, key, value, bias, state.dropout, causal=causal, window=window, scale=scale,
                softcap=state.softcap, sinks=beside,
            )  # fmt: skip
        if state.window is not None:
            return attend_in_window(
                query, key, value, None, state.dropout, window=state.window, scale=state.scale
            )  # fmt: skip
        if state.dropout is not None:
            return attend_dropping(query, key, value, None, state.dropout, causal=causal, scale=state.scale)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=state.scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    # ── who sees whom ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _sight(self, mask: Tensor, *, added: bool, inverted: bool = False) -> Sight | None:
        """What a mask says: of bool or of 0 and 1, what is seen (`inverted`: what is not); `added`: what is added to
        scores.  None: it says something else, or nothing is known of it."""
        if (number := number_of(mask)) is not None:
            return Sight() if number == (0.0 if added or inverted else 1.0) else None
        if added:
            from weft.model.hf import mask_says  # models of one's own may need nothing of transformers

            if (said := mask_says(mask)) is not None:
                hidden = torch.finfo(mask.dtype).min
                window = said if isinstance(said, int) else None
                return Sight() if said == "full" else Sight(causal=True, window=window, hidden=hidden, is_left_out=True)
        if mask.is_meta or mask.requires_grad or tuple(mask.shape[-2:]) != (self._tokens,) * 2:
            return None
        if math.prod(mask.shape[:-2]) != 1:
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return self._remembered(mask, added=added, inverted=inverted)

    def _remembered(self, mask: Tensor, *, added: bool, inverted: bool) -> Sight | None:
        """The same of values, which are looked at once where they lie in a tensor that stays, a buffer."""
        base = mask._base  # pyright: ignore[reportPrivateUsage]
        if base is None:
            return seen_in(mask, added=added, inverted=inverted)
        at = (id(base), base._version, mask.storage_offset(), mask.stride(), mask.dtype, mask.shape, added, inverted)
        if at not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            # Of a corner of a larger mask the whole is looked at: a window may be wider than the corner.
            whole = base if is_corner(mask, base) else mask
            self._known[at] = base, seen_in(whole, added=added, inverted=inverted)  # held: no other has its id
        return self._known[at][1]


_RULES: Mapping[str, Callable[[AttentionReader, Sequence[Any], Mapping[str, Any]], Scores]] = {
    **dict.fromkeys(("contiguous",), AttentionReader._same),  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(("view", "reshape"), AttentionReader._view),  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), AttentionReader._multiplied),  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(("div", "__truediv__", "divide", "true_divide"), AttentionReader._divided),  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(("add", "__add__", "__radd__"), AttentionReader._added),  # pyright: ignore[reportPrivateUsage]
    "masked_fill": AttentionReader._filled,  # pyright: ignore[reportPrivateUsage]
    "where": AttentionReader._where,  # pyright: ignore[reportPrivateUsage]
    "softmax": AttentionReader._softmax,  # pyright: ignore[reportPrivateUsage]
    "dropout": AttentionReader._dropped,  # pyright: ignore[reportPrivateUsage]
}
"""What may be done to scores, by the name of the function."""
