"""Draws that a model or its loss makes by functions (`F.dropout`, `torch.rand`, dropout inside attention), keyed.

A module that draws, as a trace of the whole model shows, runs its forward under a mode that gives every random operator
numbers keyed by (seed, step, sample, module, number of its call, number of the draw in it, element of the whole
activation): the same under every plan, and on one process.  Draws that have no dim of samples have no sample in their
key: all samples of a step share them, as they do where one process takes the whole batch at once.

The mode sees ATen's operators, so what runs under it costs a few microseconds more per operator; modules that draw
nothing run without it.  Attention with dropout is computed in the form of matrix products: it holds all scores, and a
mask of a byte for each, where a fused kernel would hold neither.

What no trace shows is seen by the generators, which no forward and no loss may move; such a plan is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.comm.collectives import shard_bounds
from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint, Loss
from weft.techniques.core._call_numbers import numbered
from weft.techniques.core._context import MicrobatchState, StepContext
from weft.techniques.core._draw_net import DrawMode
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness._draw_trace import LOSS, DrawLayout, Draws, find_draws, line_of_user
from weft.techniques.randomness._draw_values import Elements, Joined, Numbers, keyed_value, shape_of_draw
from weft.techniques.randomness.keyed_dropout import KeyedDropout, sample_words

_DROPOUTS = (KeyedDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MODULE = "Draw by nn.Dropout modules"


def keys_itself(module: nn.Module) -> bool:
    """Whether `apply_keyed_dropout` sees to it."""
    return isinstance(module, _DROPOUTS)


def is_alone(plan: Plan) -> bool:
    """Whether one process takes the whole batch at once: whatever it draws is what the plan means."""
    return plan.mesh.world_size == 1 and not plan.microbatch.is_split


def draws_of(blueprint: Blueprint, plan: Plan) -> Draws:
    """Find what a model draws by functions, and refuse what no plan but that of one process can repeat.

    Raises:
        PlanError: draws that cannot be keyed, with the module's name.
    """
    draws = find_draws(blueprint, keys_itself)
    if is_alone(plan):
        return draws
    if draws.foreign:
        raise PlanError(
            f"{type(blueprint.module).__name__} or its loss draws from {draws.foreign} generator, which cannot be keyed"
            " by sample, so plans would differ. Draw with torch (torch.rand, F.dropout), or train on one process with"
            " the whole batch in one microbatch."
        )
    for (name, op, _), layouts in draws.layouts.items():
        if unknown := [layout for layout in layouts if layout.place == "unknown"]:
            raise PlanError(_unknown(shown(name, blueprint), op, unknown[0].whole, unknown[0].line))
    if plan.compute.compile and draws.modules:
        name = draws.modules[0]
        raise PlanError(
            f"plan.compute.compile = true, but {shown(name, blueprint)} draws by {draws.operators(name)}, whose keys"
            f" change with every step. {_MODULE}, or use compile = false."
        )
    if plan.mesh.context > 1 and LOSS in draws.modules:
        raise PlanError(
            f"plan.mesh.context = {plan.mesh.context} cannot be had for this model: its loss draws random numbers by"
            " functions. Use plan.mesh.context = 1."
        )
    return draws


def shown(name: str, blueprint: Blueprint) -> str:
    return name or f"the forward of {type(blueprint.module).__name__} itself"


def _unknown(where: str, op: str, shape: Sequence[int], line: str) -> str:
    return (
        f"{where} draws by {op} ({line}) a tensor of {tuple(shape)} in which the samples cannot be told apart, so plans"
        " would draw differently. Draw with samples along a dim of their own (torch.rand(batch, …)), or train on one"
        " process with the whole batch in one microbatch."
    )


def apply_keyed_draws(part: nn.Module, draws: Draws, view: GroupView, context: StepContext) -> None:
    """Run the modules of `part` that draw under keys; before `apply_recompute`, which runs them again.  Ranks of `view`
    have other parts of what a module draws, where its shape shows that it is a part."""
    for name in draws.modules:
        if name == LOSS:
            continue
        try:
            module = part.get_submodule(name)
        except AttributeError:
            continue  # another stage's
        context.draws = True
        module.forward = keyed(module.forward, name, draws, view, context)


def keyed_loss(loss: Loss, draws: Draws, mesh: Mesh, context: StepContext) -> Loss:
    """Return the loss with keyed draws, if it draws; it is the same on all tensor ranks."""
    if LOSS not in draws.modules:
        return loss
    return _KeyedLoss(loss, keyed(loss, LOSS, draws, mesh["tensor"], context))


class _KeyedLoss:
    def __init__(self, loss: Loss, call: Callable[..., Any]) -> None:
        self.per_sample: bool = getattr(loss, "per_sample", True)
        self.per_token: bool = getattr(loss, "per_token", False)
        self.auxiliary: Any = getattr(loss, "auxiliary", {})
        self._call = call

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return self._call(outputs, batch)


def keyed(
    function: Callable[..., Any], name: str, draws: Draws, view: GroupView, context: StepContext
) -> Callable[..., Any]:
    """Return a function that draws by keys within a step, and as ever outside of one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        state = context.current
        if state is None:
            return function(*args, **kwargs)
        # Fused attention draws inside of its kernel, where no mode sees it: the products show the draw as an operator.
        with sdpa_kernel(SDPBackend.MATH), _Keyed(name, draws, view, context, state):
            return _called(function, args, kwargs)

    return run


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


_RUN = _called.__code__
"""Code of the frame below which a call under keys lies."""


class _Keyed(DrawMode):
    """One call of a module: its random operators are given keyed numbers."""

    def __init__(self, name: str, draws: Draws, view: GroupView, context: StepContext, state: MicrobatchState) -> None:
        super().__init__(self._draw)
        self._name, self._draws, self._view, self._context, self._state = name, draws, view, context, state
        self._call = state.calls.take(name)
        self._counts: dict[str, int] = {}

    def _draw(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        op = func.overloadpacket.__name__
        if _in_checkpoint():
            raise PlanError(_CHECKPOINTED.format(self._name or "the model's forward", op))
        # Keyed by operator and number of its call within the module, as the look at the model counted them.
        number = self._counts.get(op, 0)
        self._counts[op] = number + 1
        if (ledger := self._context.ledger) is not None:
            ledger.note(self._key(op, number), self._context)
            from weft.techniques.randomness.quiet import still_value  # loaded within a proof

            value = still_value(func, args, keywords)
            return func(*args, **keywords) if value is None else value
        shape, device = shape_of_draw(func, args, keywords)
        placed, value = self._place(op, number, shape), None
        if placed is not None:
            elements = self._elements(placed, self._key(op, number), device)
            value = keyed_value(func, args, keywords, elements, lambda made: _arranged(made, placed.layout))
        if value is None and self._context.is_alone:
            return func(*args, **keywords)
        if value is None:
            raise PlanError(self._unplaced(op, number, shape))
        return value

    def _key(self, op: str, number: int) -> str:
        return numbered(f"{self._name}\0{op}\0{number}", self._call)

    def _place(self, op: str, number: int, shape: torch.Size) -> _Placed | None:
        """Return this rank's part of a draw of this shape; None: no known layout fits."""
        layouts = [
            (self._held(layout, shape), layout) for layout in self._draws.layouts.get((self._name, op, number), [])
        ]
        # Several calls of one module may differ in shape: the very shape of the whole model comes first.
        layouts.sort(key=lambda candidate: candidate[0] != candidate[1].whole)
        placed = (None if dims is None else self._parts(dims, layout) for dims, layout in layouts)
        return next((candidate for candidate in placed if candidate is not None), None)

    def _held(self, layout: DrawLayout, shape: torch.Size) -> tuple[int, ...] | None:
        """Return the shape of one sample's part on this rank; None: the layout does not fit."""
        if layout.place == "unknown" or len(shape) != len(layout.whole):
            return None
        if layout.place == "shared":
            return tuple(shape)
        share, rest = divmod(shape[layout.dim], max(self._state.sample_ids.numel(), 1))
        if rest or (layout.place == "sample" and share != 1):
            return None
        return (*shape[: layout.dim], share, *shape[layout.dim + 1 :])

    def _parts(self, dims: tuple[int, ...], layout: DrawLayout) -> _Placed | None:
        """Return the parts of a sample's full draw that these sizes are, one for each run of the rank's tokens.

        A dim that is as long as a sample in the whole draw, and as long as the rank's tokens here, is that of the
        tokens.  Tensor ranks may have a share of one dim: of the tokens that context ranks have, or of another one.
        """
        tokens, length, view = self._state.tokens, self._draws.length, self._view
        is_free = view.group is None and tokens is None
        if tokens is not None and not self._can_share(layout, tokens):
            return None
        starts, whole, along, num_cut = [0] * len(dims), list(layout.whole), None, 0
        for dim, size in enumerate(dims):
            if size == whole[dim]:
                continue
            is_of_samples = layout.place == "sample" or (layout.place == "flat" and dim != layout.dim)
            if is_free and (is_of_samples or whole[dim] in self._draws.varying):
                whole[dim] = size  # samples of another length
                continue
            full = whole[dim]
            if tokens is not None and full == length and along is None:
                along, full, whole[dim] = dim, tokens.held, tokens.length
            first, last = (0, full) if size == full or view.group is None else shard_bounds(full, view)
            if last - first != size:
                return None
            starts[dim] = first
            num_cut += size != full
        if num_cut > 1:  # two shares at once: sizes alone do not tell which parts they are
            return None
        if tokens is None or along is None:
            return _Placed(layout, [(starts, list(dims), whole)], None)
        runs = tokens.within(starts[along], starts[along] + dims[along])
        parts = [(_with(starts, along, start), _with(dims, along, stop - start), whole) for start, stop in runs]
        return _Placed(layout, parts, along)

    def _can_share(self, layout: DrawLayout, tokens: LocalTokens) -> bool:
        """Whether sizes can tell the dim of the tokens, and rows of one dim are in their order."""
        is_followed = layout.place != "flat" or self._draws.are_tokens_followed
        return is_followed and not (tokens.held == self._draws.length and self._draws.length in layout.whole)

    def _unplaced(self, op: str, number: int, shape: torch.Size) -> str:
        where, line = self._name or "the model's forward", line_of_user()
        layouts = self._draws.layouts.get((self._name, op, number), [])
        if self._state.tokens is not None:
            return (
                f"{where} draws by {op} ({line}) a tensor of {tuple(shape)}, which does not show which numbers are for"
                f" the tokens of this rank. {_MODULE}, or use plan.mesh.context = 1."
            )
        dims = next((dims for layout in layouts if (dims := self._held(layout, shape)) is not None), None)
        if dims is not None and self._view.group is not None:
            return (
                f"{where} draws by {op} ({line}) a tensor of {dims} for one sample where the whole model draws"
                f" {layouts[0].whole}, and plan.mesh.tensor = {self._view.size} does not say which part that is."
                f" {_MODULE} (with the kind heads or features in [model.split] where their input is split), or use"
                " plan.mesh.tensor = 1."
            )
        return _unknown(where, op, shape, line)

    def _elements(self, placed: _Placed, key: str, device: torch.device) -> Numbers:
        layout, state = placed.layout, self._state
        ids = state.sample_ids.new_full((1,), -1) if layout.place == "shared" else state.sample_ids
        words = sample_words(key, state.seed, state.step, ids).to(device)
        rank = len(layout.whole)
        order = [layout.dim, *(dim for dim in range(rank) if dim != layout.dim)] if rank else []
        parts = [Elements(words, *([sizes[dim] for dim in order] for sizes in part)) for part in placed.parts]
        if placed.tokens is None:
            return parts[0]
        return Joined(parts, 1 + order.index(placed.tokens))


@dataclass(frozen=True, slots=True)
class _Placed:
    """This rank's part of a draw."""

    layout: DrawLayout
    parts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    """First index, indices held, and indices of the whole, along each dim of a sample's draw; more than one part where
    ranks share tokens."""
    tokens: int | None
    """Dim along which the parts stand one behind the other."""


_CHECKPOINTED = (
    "{} draws by {} in a function that it gives to torch.utils.checkpoint, whose second run would draw other numbers"
    " than its first. Put the draw into a module of its own (nn.Dropout), or leave the checkpoint out: plan.memory"
    '.recompute = "full" recomputes whole blocks.'
)


def _in_checkpoint() -> bool:
    """Whether the keyed call in hand draws inside a checkpoint that began within it: its second run has no keys."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # what `inspect` and `logging` use
    while frame is not None and frame.f_code is not _RUN:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _with(sizes: Sequence[int], at: int, size: int) -> list[int]:
    return [size if dim == at else own_size for dim, own_size in enumerate(sizes)]


def _arranged(made: Tensor, layout: DrawLayout) -> Tensor:
    """Return (samples, part of `dim`, the other dims) in the draw's own order of dims."""
    if not layout.whole:
        return made.reshape(())
    return made.flatten(0, 1).movedim(0, layout.dim)


def keyed_alone(
    module: nn.Module, blueprint: Blueprint, seed: int
) -> Callable[[Mapping[str, Tensor], Batch, int], tuple[Tensor, Tensor]]:
    """Return `run(inputs, batch, step) -> (loss sum, count)` of a whole module outside any plan, under the same keys.

    `module` is changed in place.
    """
    draws, context, view = find_draws(blueprint, keys_itself), StepContext(is_alone=True), GroupView((0,), 0, None)
    for name in draws.modules:
        if name != LOSS:
            inner = module.get_submodule(name)
            inner.forward = keyed(inner.forward, name, draws, view, context)
    loss = keyed(blueprint.loss, LOSS, draws, view, context) if LOSS in draws.modules else blueprint.loss

    def run(inputs: Mapping[str, Tensor], batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        # Stays for the backward, where a checkpoint of the model's own draws again.
        context.current = MicrobatchState(seed=seed, step=step, sample_ids=batch["sample_ids"], sequence_length=None)
        return loss(module(**inputs), batch)

    return run
