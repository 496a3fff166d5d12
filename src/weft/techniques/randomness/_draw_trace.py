"""What a model and its loss draw by functions: seen before training in one forward on the meta device, without memory.

The batch of that forward has a prime number of samples, which divides no size of the model or of its samples.  So the
dim of a draw whose size is a multiple of that prime is the dim of the samples.  Where two dims are multiples, a forward
with another prime tells.  The forward shows the shapes of whole draws.  Which part of a whole draw a rank makes is told
by the shape that the rank asks for (`draws.py`).

Values that a forward may read back from a draw (`if torch.rand(1) < p`) are high.  Where there are any, a second
forward of the same batch has low ones, so that both branches are seen.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
from weft.techniques.core._draw_net import is_draw, watched
from weft.techniques.randomness._draw_values import shape_of_draw

LOSS = "the loss"
"""Stands for the loss where a module's name is asked."""
_SAMPLES = (13, 17, 19, 23, 29, 31, 37)
"""Numbers of samples to choose from."""
_HIGH, _LOW = 0.98, 0.02
_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")

Place = Literal["sample", "flat", "shared", "unknown"]
Example = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLayout:
    """Where the samples lie in a draw."""

    place: Place
    """`sample`: along `dim`; `flat`: `dim` runs over samples first, then something else; `shared`: all have the same;
    `unknown`: the draw cannot be told apart by sample."""
    dim: int
    whole: tuple[int, ...]
    """Shape with the example's lengths and one sample; where samples are flat, `dim` is what one sample has of it."""
    line: str = field(default="", compare=False)
    """File and line of the user's code that draws."""


@dataclass(slots=True)
class Draws:
    """What was found.  `unseen`: why not all of it; empty: the forward and the loss were gone through."""

    layouts: dict[tuple[str, str, int], list[DrawLayout]] = field(
        default_factory=dict[tuple[str, str, int], list[DrawLayout]]
    )
    """(module, operator, number of its draw within a call of the module) → layouts, more than one where calls differ.
    """
    foreign: str = ""
    """Name of the library whose generator moved, where it was not torch's; empty: none did."""
    unseen: str = ""
    varying: frozenset[int] = frozenset()
    """Sizes of the example's samples.  Other samples may be longer or shorter."""
    length: int = 0
    """Tokens of a sample of the example; 0: samples are no sequences."""
    are_tokens_followed: bool = False
    """Whether a look at the forward has shown that rows in one dim with samples are tokens in order, and not rows of a
    mixture, sorted by expert."""

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for module, _, _ in self.layouts))

    def operators(self, module: str) -> str:
        """What a module draws by, for messages."""
        return ", ".join(dict.fromkeys(op for name, op, _ in self.layouts if name == module))


def line_of_user() -> str:
    """Return the file and line that called into torch or Weft; empty: none did."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # what `inspect` and `logging` use
    ours = ("weft", "contextlib", "torch", "functools")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# ── the forward ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_draws(blueprint: Blueprint, ignored: Callable[[nn.Module], bool]) -> Draws:
    """Return what the model and its loss draw in training, without running either for real.

    Modules that `ignored` says key their draws themselves are passed over.  Generators are left as they are.
    """
    draws = Draws()
    example = blueprint.example
    if example is None and blueprint.sequence_length is not None:
        example = token_example(blueprint.sequence_length, blueprint.inputs.values())
    if example is None:
        draws.unseen = "nothing says what its samples look like (give its Blueprint an `example`)"
        return draws
    draws.length, draws.are_tokens_followed = blueprint.sequence_length or 0, bool(blueprint.attending)
    draws.varying = frozenset(size for like in example(1).values() for size in like.shape[1:] if size > 1)
    for samples in _numbers_of_samples(blueprint, draws.varying):
        _look(blueprint, example, samples, ignored, draws)
        if all(layout.place != "unknown" for layouts in draws.layouts.values() for layout in layouts):
            break  # else a size that the forward works out may be a multiple of the prime, too
    return draws


def _numbers_of_samples(blueprint: Blueprint, sizes: Iterable[int]) -> list[int]:
    """Two primes that divide neither these sizes nor any of the model's tensors', where there are such."""
    tensors = (*blueprint.module.parameters(), *blueprint.module.buffers())
    every = {size for size in (*sizes, *(size for tensor in tensors for size in tensor.shape)) if size}
    return [prime for prime in _SAMPLES if all(size % prime for size in every)][:2] or [_SAMPLES[0]]


def _look(
    blueprint: Blueprint, example: Example, samples: int, ignored: Callable[[nn.Module], bool], draws: Draws
) -> None:
    """Fill in what is found with so many samples."""
    draws.layouts.clear()
    with _generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (_HIGH, _LOW):
            recorder = _Recorder(samples, value)
            with watched(torch.device("cpu")) as watch:
                draws.unseen = draws.unseen or _trace(blueprint, example, recorder, ignored)
            draws.foreign = draws.foreign or watch.whose.removeprefix("torch's")
            for key, every in recorder.drawn.items():
                known = draws.layouts.get(key, [])
                draws.layouts[key] = list(
                    dict.fromkeys([*known, *(_layout(event, key[1], samples) for event in every)])
                )
            if not recorder.has_values:
                break


@contextmanager
def _generators_kept() -> Generator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _trace(blueprint: Blueprint, example: Example, recorder: _Recorder, ignored: Callable[[nn.Module], bool]) -> str:
    """Run the forward and the loss; return why not all of it was seen, empty where it was."""
    try:
        module = copy_on_meta(blueprint.module).train(blueprint.module.training)
        loss = on_trial(blueprint.loss)
        fields = {name: _field(blueprint, name, like) for name, like in example(recorder.samples).items()}
        fields.setdefault("sample_ids", torch.arange(recorder.samples))
        placed, named = arguments_for(blueprint.module, blueprint.keywords(fields))
        with ExitStack() as stack:
            recorder.hook(module, ignored, stack)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(without_fast_path())
            stack.enter_context(recorder)
            stack.enter_context(OneDevice())
            outputs = module(*placed, **named)
            recorder.enter(LOSS)
            loss(outputs, fields)
    except Exception as problem:  # whatever a user's forward raises without values: what was seen until then holds
        first = next(iter(str(problem).splitlines()), "")
        return f"a forward without values ended in {type(problem).__name__}: {first.rstrip('.')[:120]}"
    return ""


def _field(blueprint: Blueprint, name: str, like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    if like.dtype == torch.bool:
        return torch.ones(like.shape, dtype=like.dtype)
    if name in blueprint.samples:
        from weft.model.samples import draw_integers  # loaded for models that neither corpora nor images feed

        return draw_integers(blueprint.samples[name], like.shape, 2)
    return torch.randint(0, blueprint.vocabulary_size or 2, like.shape).to(like.dtype)


@dataclass(frozen=True, slots=True)
class _Drawn:
    shape: torch.Size
    is_turned: bool
    """Whether its samples lie behind something else in one dim."""
    line: str


class _Recorder(TorchDispatchMode):
    """Writes down draws by module."""

    def __init__(self, samples: int, value: float) -> None:
        super().__init__()
        self.samples = samples
        self.drawn: dict[tuple[str, str, int], list[_Drawn]] = {}
        self.has_values = False
        """Whether any draw gave values that the forward may have read back."""
        self._turned: dict[tuple[int, torch.Size], Tensor] = {}
        """Tensors, by storage and shape, with a dim that runs over something else first and samples second."""
        self._value = value
        self._stand_ins = StandIns()
        self._stack: list[tuple[str, dict[str, int], bool]] = [("", {}, False)]

    def hook(self, module: nn.Module, ignored: Callable[[nn.Module], bool], stack: ExitStack) -> None:
        """Follow which module runs, until the stack ends."""
        for name, child in module.named_modules():
            if name:
                before = partial(self._entered, name, ignored(child))
                stack.callback(child.register_forward_pre_hook(before, prepend=True).remove)
                stack.callback(child.register_forward_hook(self._left, always_call=True).remove)
        self._stack = [("", {}, ignored(module))]

    def enter(self, name: str, ignored: bool = False) -> None:
        """What is drawn from here on is drawn by `name`."""
        self._stack.append((name, {}, ignored))

    def _entered(self, name: str, ignored: bool, module: nn.Module, args: Any) -> None:
        self.enter(name, ignored)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        name, counts, ignored = self._stack[-1]
        is_drawn = is_draw(func, args, keywords)
        if is_drawn:
            keywords = {**keywords, "generator": None} if "generator" in keywords else keywords
        with _python_kept(func):
            result = self._stand_ins.run(func, args, keywords, name)
        is_turned = isinstance(result, Tensor) and self._look(func.overloadpacket.__name__ in _VIEWS, args, result)
        if is_drawn and not ignored:
            op = func.overloadpacket.__name__
            key = (name, op, counts.get(op, 0))
            counts[op] = key[2] + 1
            drawn = _Drawn(shape_of_draw(func, args, keywords)[0], is_turned, line_of_user())
            self.drawn.setdefault(key, []).append(drawn)
            if isinstance(result, Tensor) and not result.is_meta and result.is_floating_point():
                self.has_values = True
                result.fill_(self._value)
        return result

    def _look(self, is_view: bool, args: Sequence[Any], result: Tensor) -> bool:
        """Whether `result` has a dim of (something × samples): made by a view, or of operands that have one."""
        merged = [dim for dim, size in enumerate(result.shape) if size > self.samples and size % self.samples == 0]
        if not merged or self.samples in result.shape:
            return False
        operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        is_turned = any(_identity(operand) in self._turned for operand in operands)
        before = operands[0].shape if operands else torch.Size()
        if is_view and self.samples in before:
            is_turned = math.prod(before[: before.index(self.samples)]) != math.prod(result.shape[: merged[0]])
        if is_turned:
            self._turned[_identity(result)] = result
        return is_turned


@contextmanager
def _python_kept(func: Any) -> Generator[None]:
    """Put Python's generator back after a collective: without values torch draws a number for each from it."""
    state = random.getstate() if func.namespace in ("c10d", "_c10d_functional") else None
    yield
    if state is not None:
        random.setstate(state)


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.shape  # pyright: ignore[reportPrivateUsage]  # meta storages have no address


# ── what its shapes say ───────────────────────────────────────────────────────────────────────────────────────────────


def _layout(drawn: _Drawn, op: str, samples: int) -> DrawLayout:
    shape = tuple(drawn.shape)
    multiples = [dim for dim, size in enumerate(shape) if size and size % samples == 0]
    if not multiples:
        return DrawLayout(place="shared", dim=0, whole=shape, line=drawn.line)
    dim = multiples[0]
    share = shape[dim] // samples
    place: Place = "sample" if share == 1 else "flat"
    if len(multiples) > 1 or op == "randperm" or (place == "flat" and drawn.is_turned):
        return DrawLayout(place="unknown", dim=0, whole=shape, line=drawn.line)
    return DrawLayout(place=place, dim=dim, whole=(*shape[:dim], share, *shape[dim + 1 :]), line=drawn.line)
