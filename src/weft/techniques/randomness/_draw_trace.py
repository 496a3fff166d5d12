"""What a model and its loss draw by functions: found before training by forwards on the meta device, without memory.

Batches of two sizes show along which dim of a draw the samples lie: the one that grows with the batch.  Values that the
forward reads back from a draw (`if torch.rand(1) < p`) are given low and high, so that both branches are seen.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.meta_forward import OneDevice, StandIns, copy_on_meta, on_trial, without_fast_path
from weft.model.positions import arguments_for
from weft.model.seeding import others_draw
from weft.techniques.core._draw_net import OwnPython, is_draw, numpy_lock

LOSS = "the loss"
"""Stands for the loss where a module's name is asked."""
_SIZES = (13, 17)
"""Samples of the two batches: primes that are rarely a size of anything else."""
_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")

Place = Literal["sample", "flat", "shared", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLayout:
    """Where the samples lie in a draw."""

    place: Place
    """`sample`: along `dim`; `flat`: `dim` runs over samples first, then something else; `shared`: all have the same;
    `unknown`: the draw cannot be told apart by sample."""
    dim: int
    whole: tuple[int, ...]
    """Shape with the example's lengths and one sample; where samples are flat, `dim` is what one sample has of it."""
    tokens: int | None = None
    """Dim that runs over the tokens of a sample; None: none does, or ranks share no sequence, and nobody has asked."""
    pairs: bool = False
    """Whether the last two dims run over them: queries and keys of attention that a model writes out."""


@dataclass(slots=True)
class Draws:
    """What was found.  `unseen`: why not all of it; empty: the forward and the loss were gone through."""

    layouts: dict[tuple[str, str, int], list[DrawLayout]] = field(
        default_factory=dict[tuple[str, str, int], list[DrawLayout]]
    )
    """(module, operator, number of its draw within a call of the module) → layouts, more than one where calls differ.
    """
    foreign: dict[str, str] = field(default_factory=dict[str, str])
    """Module → whose generator, other than torch's, it draws from."""
    unseen: str = ""

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for module, _, _ in self.layouts))

    def operators(self, module: str) -> str:
        """What a module draws by, for messages."""
        return ", ".join(dict.fromkeys(op for name, op, _ in self.layouts if name == module))


def noise_shape(func: Any, args: Sequence[Any], result: Any) -> torch.Size:
    """Shape of what is drawn."""
    if func.overloadpacket.__name__ == "multinomial":
        return args[0].shape
    first = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), None)
    return first.shape if first is not None else torch.Size()


def find_draws(blueprint: Blueprint, ignored: Callable[[nn.Module], bool]) -> Draws:
    """Return what the model and its loss draw in training, without running either for real.

    Modules that `ignored` says key their draws themselves are passed over.  Generators are left as they are.
    """
    found = Draws()
    example = blueprint.example
    if example is None and blueprint.sequence_length is not None:
        example = token_example(blueprint.sequence_length, blueprint.inputs.values())
    if example is None:
        found.unseen = "nothing says what its samples look like (give its Blueprint an `example`)"
        return found
    with _generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [_traced(blueprint, example, _SIZES[0], 0.02, ignored, found)]
        if runs[0] or found.unseen:
            runs += [
                _traced(blueprint, example, size, value, ignored, found)
                for value, size in ((0.02, _SIZES[1]), (0.98, _SIZES[0]), (0.98, _SIZES[1]))
            ]
    for first, second in zip(runs[::2], runs[1::2], strict=False):
        _compare(first, second, found)
    return found


@contextmanager
def _generators_kept() -> Generator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


_Shapes = dict[tuple[str, str, int], list[tuple[torch.Size, bool]]]
"""Shapes of draws, and whether their samples lie behind something else in one dim."""


def _traced(
    blueprint: Blueprint,
    example: Callable[[int], dict[str, Tensor]],
    samples: int,
    value: float,
    ignored: Callable[[nn.Module], bool],
    found: Draws,
) -> _Shapes:
    recorder = _Recorder(samples, value, found)
    try:
        module = copy_on_meta(blueprint.module).train(blueprint.module.training)
        loss = on_trial(blueprint.loss)
        fields = {name: _field(blueprint, name, like) for name, like in example(samples).items()}
        fields.setdefault("sample_ids", torch.arange(samples))
        placed, named = arguments_for(blueprint.module, blueprint.keywords(fields))
        with ExitStack() as stack:
            recorder.alone(stack)
            recorder.hook(module, ignored, stack)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(without_fast_path())
            stack.enter_context(recorder)
            stack.enter_context(OneDevice())
            outputs = module(*placed, **named)
            recorder.enter(LOSS)
            loss(outputs, fields)
            recorder.leave()
    except Exception as problem:  # whatever a user's forward raises without values: what was seen until then holds
        first = next(iter(str(problem).splitlines()), "")
        found.unseen = f"a forward without values ended in {type(problem).__name__}: {first.rstrip('.')[:120]}"
    return recorder.shapes


def _field(blueprint: Blueprint, name: str, like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    if like.dtype == torch.bool:
        return torch.ones(like.shape, dtype=like.dtype)
    if name in blueprint.samples:
        from weft.model.samples import draw_integers  # loaded for models that neither corpora nor images feed

        return draw_integers(blueprint.samples[name], like.shape, 2)
    return torch.randint(0, blueprint.vocabulary_size or 2, like.shape).to(like.dtype)


class _Recorder(TorchDispatchMode):
    """Writes down draws by module."""

    def __init__(self, samples: int, value: float, found: Draws) -> None:
        super().__init__()
        self.shapes: _Shapes = {}
        self._turned: dict[tuple[int, torch.Size], Tensor] = {}
        """Tensors, by storage and shape, with a dim that runs over something else first and samples second."""
        self._samples, self._value, self._found = samples, value, found
        self._stand_ins = StandIns()
        self._stack: list[tuple[str, dict[str, int], bool]] = [("", {}, False)]
        self._states = _foreign_states()
        self._own: OwnPython | None = None

    def alone(self, stack: ExitStack) -> None:
        """Pass over what other threads draw meanwhile."""
        if others_draw():
            lock = numpy_lock()
            if lock is not None:
                stack.enter_context(lock)
            self._own = OwnPython()
            stack.enter_context(self._own)
            self._states = _foreign_states()

    def hook(self, module: nn.Module, ignored: Callable[[nn.Module], bool], stack: ExitStack) -> None:
        for name, child in module.named_modules():
            if name:
                before = partial(self._entered, name, ignored(child))
                stack.callback(child.register_forward_pre_hook(before, prepend=True).remove)
                stack.callback(child.register_forward_hook(self._left, always_call=True).remove)
        self._stack = [("", {}, ignored(module))]

    def enter(self, name: str, ignored: bool = False) -> None:
        self._notice_foreign()
        self._stack.append((name, {}, ignored))

    def leave(self) -> None:
        self._notice_foreign()
        self._stack.pop()

    def _entered(self, name: str, ignored: bool, module: nn.Module, args: Any) -> None:
        self.enter(name, ignored)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self.leave()

    def _notice_foreign(self) -> None:
        states = _foreign_states()
        for which, before, after in zip(("Python's random", "numpy's"), self._states, states, strict=True):
            others = which == "Python's random" and self._own is not None and not self._own.drew
            if before != after and not others:
                self._found.foreign.setdefault(self._stack[-1][0], which)
        self._states = states
        if self._own is not None:
            self._own.drew = self._own.is_busy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name, counts, ignored = self._stack[-1]
        drawn = is_draw(func, args, given)
        if drawn:
            given = {**given, "generator": None} if "generator" in given else given
        with self._torchs_own_kept(func):
            result = self._stand_ins.run(func, args, given, name)
        turned = isinstance(result, Tensor) and self._look(func.overloadpacket.__name__ in _VIEWS, args, result)
        if drawn and not ignored:
            op = func.overloadpacket.__name__
            key = (name, op, counts.get(op, 0))
            counts[op] = key[2] + 1
            self.shapes.setdefault(key, []).append((noise_shape(func, args, result), turned))
            if isinstance(result, Tensor) and not result.is_meta and result.is_floating_point():
                result.fill_(self._value)
        return result

    @contextmanager
    def _torchs_own_kept(self, func: Any) -> Generator[None]:
        """Put Python's generator back after a collective: without values torch draws a number for each from it."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            yield
            return
        state, drew = random.getstate(), self._own is not None and self._own.drew
        yield
        random.setstate(state)
        if self._own is not None:
            self._own.drew = drew

    def _look(self, is_view: bool, args: Sequence[Any], result: Tensor) -> bool:
        """Whether `result` has a dim of (something × samples): made by a view, or of operands that have one."""
        merged = [k for k, size in enumerate(result.shape) if size > self._samples and size % self._samples == 0]
        if not merged or self._samples in result.shape:
            return False
        operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        turned = any(_identity(operand) in self._turned for operand in operands)
        before = operands[0].shape if operands else torch.Size()
        if is_view and self._samples in before:
            turned = math.prod(before[: before.index(self._samples)]) != math.prod(result.shape[: merged[0]])
        if turned:
            self._turned[_identity(result)] = result
        return turned


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.shape  # pyright: ignore[reportPrivateUsage]  # meta storages have no address


def _foreign_states() -> tuple[Any, Any]:
    kind, words, *rest = np.random.get_state()
    return random.getstate(), (kind, words.tobytes(), *rest)  # pyright: ignore[reportAttributeAccessIssue]


def _compare(first: _Shapes, second: _Shapes, found: Draws) -> None:
    for key, drawn in first.items():
        others = second.get(key, [])
        layouts = found.layouts.setdefault(key, [])
        for (shape, turned), (other, also) in zip(drawn, others, strict=False):
            layout = _layout(shape, other, key[1], turned and also)
            if layout not in layouts:
                layouts.append(layout)
        if len(drawn) != len(others):
            layouts.append(DrawLayout(place="unknown", dim=0, whole=tuple(drawn[0][0])))
    for key in second.keys() - first.keys():
        found.layouts.setdefault(key, []).append(DrawLayout(place="unknown", dim=0, whole=()))


def _layout(shape: torch.Size, other: torch.Size, op: str, turned: bool) -> DrawLayout:
    growing = [dim for dim, sizes in enumerate(zip(shape, other, strict=False)) if sizes[0] != sizes[1]]
    unknown = DrawLayout(place="unknown", dim=0, whole=tuple(shape))
    if len(shape) != len(other) or len(growing) > 1:
        return unknown
    if not growing:
        return DrawLayout(place="shared", dim=0, whole=tuple(shape))
    (dim,) = growing
    if shape[dim] * _SIZES[1] != other[dim] * _SIZES[0] or op == "randperm":
        return unknown
    share = shape[dim] // _SIZES[0]
    whole = (*shape[:dim], share, *shape[dim + 1 :])
    if share == 1:
        return DrawLayout(place="sample", dim=dim, whole=whole)
    return unknown if turned else DrawLayout(place="flat", dim=dim, whole=whole)
