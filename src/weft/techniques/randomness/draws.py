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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.comm.collectives import shard_bounds
from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint, Loss
from weft.techniques.core._call_numbers import numbered
from weft.techniques.core._context import MicrobatchState, StepContext
from weft.techniques.core._draw_net import is_draw
from weft.techniques.randomness._draw_trace import LOSS, DrawLayout, Draws, find_draws, noise_shape
from weft.techniques.randomness._draw_values import keyed_value
from weft.techniques.randomness._noise import Elements, Numbers
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
    for name, whose in draws.foreign.items():
        raise PlanError(
            f"{shown(name, blueprint)} draws from {whose} generator, which cannot be keyed by sample, so plans would"
            " differ. Draw with torch (torch.rand, F.dropout), or train on one process with the whole batch in one"
            " microbatch."
        )
    for (name, op, _), layouts in draws.layouts.items():
        if any(layout.place == "unknown" for layout in layouts):
            raise PlanError(_unknown(shown(name, blueprint), op, layouts[-1].whole))
    if plan.compute.compile and draws.modules:
        name = draws.modules[0]
        raise PlanError(
            f"plan.compute.compile = true, but {shown(name, blueprint)} draws by {draws.operators(name)}, whose keys"
            f" change with every step. {_MODULE}, or use compile = false."
        )
    if plan.mesh.context > 1 and draws.modules:
        from weft.techniques.randomness.token_draws import with_tokens  # loaded where ranks share what is drawn for

        return with_tokens(draws, blueprint, plan, keys_itself)
    return draws


def shown(name: str, blueprint: Blueprint) -> str:
    return name or f"the forward of {type(blueprint.module).__name__} itself"


def _unknown(where: str, op: str, shape: Sequence[int]) -> str:
    return (
        f"{where} draws by {op} a tensor of {tuple(shape)} in which the samples cannot be told apart, so plans would"
        " draw differently. Draw with samples along a dim of their own (torch.rand(batch, …)), or train on one"
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
    """The loss under keys, where it draws; it is the same on all tensor ranks."""
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
        with sdpa_kernel(SDPBackend.MATH), _Keyed(name, draws, view, context, state):
            return _called(function, args, kwargs)

    return run


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


_RUN = _called.__code__
"""Code of the frame below which a call under keys lies."""


class _Keyed(TorchDispatchMode):
    """One call of a module: its random operators are given keyed numbers."""

    def __init__(self, name: str, draws: Draws, view: GroupView, context: StepContext, state: MicrobatchState) -> None:
        super().__init__()
        self._name, self._draws, self._view, self._context, self._state = name, draws, view, context, state
        self._call = state.calls.take(name)
        self._counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not is_draw(func, args, given):
            return func(*args, **given)
        op = func.overloadpacket.__name__
        if _in_checkpoint():
            raise PlanError(_CHECKPOINTED.format(self._name or "the model's forward", op))
        number = self._counts.get(op, 0)
        self._counts[op] = number + 1
        if (ledger := self._context.ledger) is not None:
            ledger.note(self._key(op, number), self._context)
            from weft.techniques.randomness.quiet import still_value  # loaded within a proof

            value = still_value(func, args, given)
            return func(*args, **given) if value is None else value
        shape = noise_shape(func, args, _shapes_of(func, args, given))
        layout = self._layout(op, number, shape)
        value = None
        if layout is not None:
            operand = next((leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)), None)
            device = torch.device(given.get("device") or "cpu") if operand is None else operand.device
            elements = self._elements(layout, shape, self._key(op, number), device)
            value = keyed_value(func, args, given, elements, lambda made: _arranged(made, layout))
        if value is None and self._context.is_alone:
            return func(*args, **given)
        if value is None:
            raise PlanError(_unknown(self._name or "the model's forward", op, shape))
        return value

    def claim(self, operators: Sequence[str]) -> tuple[str, DrawLayout] | None:
        """Count a draw by one of these operators, which nobody makes; return its key and layout, if it has any."""
        for op in operators:
            number = self._counts.get(op, 0)
            if known := self._draws.layouts.get((self._name, op, number), []):
                self._counts[op] = number + 1
                return (self._key(op, number), known[0]) if len(known) == 1 else None
        return None

    def _key(self, op: str, number: int) -> str:
        return numbered(f"{self._name}\0{op}\0{number}", self._call)

    def _layout(self, op: str, number: int, shape: torch.Size) -> DrawLayout | None:
        """The layout that fits; several calls of one module may differ in shape."""
        known = self._draws.layouts.get((self._name, op, number), [])
        fitting = [layout for layout in known if len(layout.whole) == len(shape) and self._fits(layout, shape)]
        if self._state.tokens is not None:
            return next((layout for layout in fitting if self._shares(layout, shape)), None)
        exact = [layout for layout in fitting if self._part(layout, shape) == layout.whole]
        return next(iter(exact or fitting), None)

    def _fits(self, layout: DrawLayout, shape: torch.Size) -> bool:
        samples = self._state.sample_ids.numel()
        if layout.place == "unknown":
            return False
        return layout.place == "shared" or shape[layout.dim] % max(samples, 1) == 0

    def _part(self, layout: DrawLayout, shape: torch.Size) -> tuple[int, ...]:
        """What this rank holds of one sample."""
        if layout.place == "shared":
            return tuple(shape)
        share = shape[layout.dim] // max(self._state.sample_ids.numel(), 1)
        return (*shape[: layout.dim], share, *shape[layout.dim + 1 :])

    def _elements(self, layout: DrawLayout, shape: torch.Size, key: str, device: torch.device) -> Numbers:
        held, state = self._part(layout, shape), self._state
        ids = state.sample_ids.new_full((1,), -1) if layout.place == "shared" else state.sample_ids
        words = sample_words(key, state.seed, state.step, ids).to(device)
        order = [layout.dim, *(dim for dim in range(len(held)) if dim != layout.dim)] if held else []

        def part(starts: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> Elements:
            starts, sizes, whole = ([each[dim] for dim in order] for each in (starts, sizes, whole))
            return Elements(samples=words, starts=starts, sizes=sizes, whole=whole)

        if state.tokens is None:
            starts, whole = self._placed(held, layout)
            return part(starts, held, whole)
        from weft.techniques.randomness.token_draws import Joined, parts_of  # as above

        parts = parts_of(held, layout, state.tokens, self._view)
        assert parts is not None, "a layout that does not fit was left out"
        dim, joined = layout.tokens, [part(*each) for each in parts]
        return joined[0] if dim is None else Joined(joined, 1 + order.index(dim))

    def _shares(self, layout: DrawLayout, shape: torch.Size) -> bool:
        """Whether it is known which part of the layout a rank has that has some of the tokens."""
        from weft.techniques.randomness.token_draws import parts_of  # as above

        assert self._state.tokens is not None, "asked of ranks that share a sequence"
        return parts_of(self._part(layout, shape), layout, self._state.tokens, self._view) is not None

    def _placed(self, held: tuple[int, ...], layout: DrawLayout) -> tuple[list[int], list[int]]:
        """First index and whole size of each dim; under a tensor axis a dim may hold this rank's share."""
        starts, whole = [0] * len(held), list(held)
        if self._view.group is None or held == layout.whole:
            return starts, whole
        cut = [dim for dim, sizes in enumerate(zip(held, layout.whole, strict=True)) if sizes[0] != sizes[1]]
        if len(cut) == 1:
            (dim,) = cut
            first, last = shard_bounds(layout.whole[dim], self._view)
            if last - first == held[dim]:
                starts[dim], whole[dim] = first, layout.whole[dim]
                return starts, whole
        raise PlanError(
            f"{self._name or 'the forward of the model'} draws a tensor of {held} for one sample where the whole model"
            f" draws {layout.whole}, and plan.mesh.tensor = {self._view.size} does not say which part that is."
            f" {_MODULE} (with the kind heads or features in [model.split] where their input is split), or use"
            " plan.mesh.tensor = 1."
        )


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


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Something of the result's shape, without drawing."""
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if operands:
        return torch.broadcast_tensors(*operands)[0] if func.overloadpacket.__name__ == "normal" else operands[0]
    moved = {name: None if name == "generator" else value for name, value in kwargs.items() if name != "pin_memory"}
    return func(*args, **(moved | {"device": torch.device("meta")}))


def _arranged(made: Tensor, layout: DrawLayout) -> Tensor:
    """From (samples, part of `dim`, the other dims) to the draw's own order."""
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
