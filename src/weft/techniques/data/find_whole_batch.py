"""Losses that see the whole batch, such as contrastive ones, where data ranks share it: what must be gathered.

Such a loss is no sum over samples, so each data rank computes all of it from the samples of all ranks, and counts for
its share of it, 1 / ranks: sums over ranks are then what one process has, and so are gradients, because a gather sums
in its backward what every rank makes of a rank's samples.

A loss reads per-sample outputs (embeddings), which are gathered before it.  A dual encoder multiplies them in its own
forward: there the operands are.  Both are found by looking at shapes: a forward is run without values with two numbers
of samples, and once more with twice the samples after the gathers.  A call whose result grows in two dims, and whose
operands grow in one each, is such a product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft.model.meta_forward import StandInMode, copy_on_meta, on_trial
from weft.model.positions import arguments_for

if TYPE_CHECKING:
    from weft.model.blueprint import Batch, Blueprint

Gather = Callable[[Tensor, int], Tensor]
"""`gather(tensor, dim)`: the tensors of all data ranks behind each other along `dim`."""
Dims = tuple[int | None, ...]
"""Dim along which each tensor is gathered; None: it stays."""
Site = tuple[CodeType, int]
"""A function's code, and the instruction in it that calls an operator."""

_SAMPLES, _MORE = 5, 7
"""Numbers of samples of the two forwards: primes, so that few other sizes of a model equal or divide by them."""
_COUNTS = frozenset({"arange", "linspace", "randperm"})
"""Functions that number samples; each rank would begin at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTensor:
    """One tensor that ranks gather."""

    what: str
    elements_per_sample: int
    element_bytes: int | None
    """Bytes of an element; None: it is an activation, in the precision of the plan."""
    needs_gradient: bool
    """Whether its gradient is summed over the ranks and cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """What ranks gather of a model and its loss; with a `reason`, why they cannot."""

    products: Mapping[Site, Dims]
    """Calls in the forward whose operands are gathered."""
    num_products: int
    """Number of such calls in a forward."""
    outputs: Dims
    """Dims of the tensors that the forward returns."""
    gathers: tuple[GatheredTensor, ...]
    """Tensors that a step gathers, in order."""
    reason: str = ""
    """A sentence without its end."""


class _NotUnderstood(Exception):
    """Why a forward cannot be gathered in."""


def find_whole_batch(blueprint: Blueprint) -> WholeBatch:
    """Return what data ranks gather for a loss that is no sum over samples.  Not collective, takes no memory, and never
    raises for what a forward does."""
    try:
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            return _Look(blueprint).found()
    except _NotUnderstood as problem:
        reason = str(problem)
    except Exception as problem:  # whatever a user's forward raises without values
        first = next(iter(str(problem).splitlines()), "").rstrip(".")[:120]
        reason = f"its forward without values ends in {type(problem).__name__}: {first}"
    return WholeBatch(products={}, num_products=0, outputs=(), gathers=(), reason=reason)


def why_no_gathering(blueprint: Blueprint) -> str:
    """Return why data ranks cannot share the batch of a loss that is no sum over samples; empty: they can, or it is."""
    return "" if blueprint.per_sample_loss else find_whole_batch(blueprint).reason


class Gathering(TorchFunctionMode):
    """Gathers operands of the products of a forward that runs within it."""

    def __init__(self, products: Mapping[Site, Dims], gather: Gather) -> None:
        super().__init__()
        self.num_products = 0
        """Products so far."""
        self._products, self._gather = products, gather

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dims = self._products.get(_site()) if self._products else None
        if dims is None:
            return func(*args, **(kwargs or {}))
        self.num_products += 1
        args, kwargs = gathered((args, kwargs or {}), dims, self._gather)
        return func(*args, **kwargs)


def gathered(tree: Any, dims: Dims, gather: Gather) -> Any:
    """Return what looks like `tree`, with its tensors gathered along their dims."""
    leaves, spec = tree_flatten(tree)
    along = iter(dims)
    return tree_unflatten([_gathered(leaf, next(along), gather) if _is(leaf) else leaf for leaf in leaves], spec)


def num_tensors(tree: Any) -> int:
    """Return how many leaves of `tree` are tensors."""
    return sum(_is(leaf) for leaf in tree_leaves(tree))


class GatheredBatch(Mapping[str, Tensor]):
    """A batch whose fields are gathered when they are read; equally on all ranks, whose losses are one program."""

    def __init__(self, batch: Batch, gather: Gather) -> None:
        self._batch, self._gather = batch, gather
        self._whole: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._whole:
            self._whole[name] = self._gather(self._batch[name], 0)
        return self._whole[name]

    def __contains__(self, name: object) -> bool:
        return name in self._batch

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _gathered(tensor: Tensor, dim: int | None, gather: Gather) -> Tensor:
    return tensor if dim is None else gather(tensor, dim)


def _site() -> Site:
    """Return the innermost place outside of torch and of this file from which an operator is called."""
    # Several operators may share a line, and a loop may come back to one: only the instruction tells them apart, and
    # it is the same in the forward without values and in the one that trains.
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # what `inspect` and `logging` use
    while frame.f_globals.get("__name__", "").partition(".")[0] == "torch" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


# ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Call:
    site: Site
    name: str
    read: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    reads_numbers: bool
    """Whether it reads numbers of samples, which begin at 0 on every rank."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward without values."""

    calls: list[_Call]
    outputs: Any
    fields: Batch
    in_blocks: frozenset[Site]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return _shapes(self.outputs)


class _Noting(Gathering):
    """Notes every call's shapes."""

    def __init__(self, products: Mapping[Site, Dims], gather: Gather, blocks: list[int]) -> None:
        super().__init__(products, gather)
        self.calls: list[_Call] = []
        self.in_blocks: set[Site] = set()
        self._blocks = blocks
        self._numbers: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        site, keywords = _site(), kwargs or {}
        dims = self._products.get(site)
        if dims is not None:
            args, keywords = gathered((args, keywords), dims, self._gather)
        result, name = func(*args, **keywords), getattr(func, "__name__", "").strip("_")
        if name in _COUNTS and _is(result):
            self._numbers.append(result)
        # Views of an `arange` have its storage, and so are recognized; sums and products of it are not.
        numbers = {_storage(tensor) for tensor in self._numbers}
        reads = any(_is(leaf) and _storage(leaf) in numbers for leaf in tree_leaves((args, keywords)) if numbers)
        self.calls.append(_Call(site, name, _shapes((args, keywords)), _shapes(result), reads))
        if self._blocks[0]:
            self.in_blocks.add(site)
        return result


class _Look:
    """Looks at one model and its loss."""

    def __init__(self, blueprint: Blueprint) -> None:
        if blueprint.example is None:
            raise _NotUnderstood(f"{type(blueprint.module).__name__} brings no example batch, which shows its shapes")
        self._blueprint, self._example = blueprint, blueprint.example
        self._gathers: list[GatheredTensor] = []

    def found(self) -> WholeBatch:
        # A dim that grows between 5 and 7 samples holds samples.  A third forward with the gathers in place shows
        # whether anything goes back from all samples to one rank's.
        few, more = self._run(_SAMPLES), self._run(_MORE)
        products = _products(few, more)
        whole = self._run(_SAMPLES, products)
        _check_joined(few, more, whole)
        outputs = tuple(_own_dim(*shapes) for shapes in zip(few.shapes, more.shapes, whole.shapes, strict=True))
        read = self._read_by_loss(whole, outputs)
        return WholeBatch(
            products=products,
            num_products=sum(call.site in products for call in few.calls),
            outputs=tuple(dim if use else None for dim, use in zip(outputs, read, strict=True)),
            gathers=tuple(self._gathers),
        )

    def _run(self, samples: int, products: Mapping[Site, Dims] | None = None) -> _Run:
        """Run one forward of `samples` samples; with products, as on one of two ranks with so many samples each."""
        blueprint = self._blueprint
        module = copy_on_meta(blueprint.module).train(blueprint.module.training)
        fields = {name: self._field(name, like) for name, like in self._example(samples).items()}
        fields.setdefault("sample_ids", torch.arange(samples))
        placed, named = arguments_for(blueprint.module, blueprint.keywords(fields))
        blocks = [0]
        _count_blocks(module, blueprint, blocks)
        with StandInMode(""), _Noting(products or {}, self._operand, blocks) as noting:
            outputs = module(*placed, **named)
        return _Run(noting.calls, outputs, fields, frozenset(noting.in_blocks))

    def _operand(self, tensor: Tensor, dim: int) -> Tensor:
        return self._twice(tensor, dim, "operand of a product over samples")

    def _twice(self, tensor: Tensor, dim: int, what: str, *, is_activation: bool = True) -> Tensor:
        """Return what two ranks with equal samples gather, twice as long along `dim`, and note the gather."""
        # Two ranks suffice: what holds the samples of all ranks differs in size from what holds one rank's.
        is_narrowed = is_activation and tensor.is_floating_point()
        self._gathers.append(
            GatheredTensor(
                what=what,
                elements_per_sample=tensor.numel() // _SAMPLES,
                element_bytes=None if is_narrowed else tensor.element_size(),
                needs_gradient=tensor.requires_grad,
            )
        )
        return torch.cat([tensor, tensor], dim)

    def _of_batch(self, tensor: Tensor, dim: int) -> Tensor:
        return self._twice(tensor, dim, "field of the batch that the loss reads", is_activation=False)

    def _field(self, name: str, like: Tensor) -> Tensor:
        """Return a field of the batch, shaped as `like`.  Integers have values: masks and routes are made of them."""
        if like.is_floating_point():
            return torch.empty(like.shape, dtype=like.dtype, device="meta")
        if like.dtype == torch.bool:
            return torch.ones(like.shape, dtype=like.dtype)
        if name in self._blueprint.samples:
            from weft.model.samples import draw_integers  # loaded for models that neither corpora nor images feed

            return draw_integers(self._blueprint.samples[name], like.shape, 2)
        return torch.zeros(like.shape, dtype=like.dtype)

    def _read_by_loss(self, whole: _Run, outputs: Dims) -> list[bool]:
        """Return which outputs the loss reads, and note what is gathered for it."""
        model = type(self._blueprint.module).__name__
        leaves = tree_leaves(whole.outputs)
        if opaque := [leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)]:
            raise _NotUnderstood(f"{model} returns a {type(opaque[0]).__name__}, whose tensors are not known")
        # The loss runs on outputs of two ranks and notes what it reads: an output that it ignores costs no gather, and
        # may have its samples anywhere.
        watching = _Watching()
        twice = gathered(whole.outputs, tuple(None if dim == _MIXED else dim for dim in outputs), _plainly_twice)
        loss = on_trial(self._blueprint.loss)
        with StandInMode(""), watching:
            loss(twice, GatheredBatch(whole.fields, self._of_batch))
        tensors = [leaf for leaf in leaves if _is(leaf)]
        read = [id(leaf) in watching.read for leaf in tree_leaves(twice) if _is(leaf)]
        for place, (leaf, dim) in enumerate(zip(tensors, outputs, strict=True)):
            if read[place] and dim == _MIXED:
                raise _NotUnderstood(
                    f"output {place} of {model}, which its loss reads, has samples in more than one dim or in a part of"
                    " one"
                )
            if read[place] and dim is not None:
                self._twice(leaf, dim, "output that the loss reads")
        return read


_MIXED = -1
"""Stands for a dim where an output has samples in several dims, or in a part of one, and so cannot be gathered."""


class _Watching(TorchFunctionMode):
    """Notes which tensors are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if _is(leaf)}
        return func(*args, **(kwargs or {}))


def _plainly_twice(tensor: Tensor, dim: int) -> Tensor:
    return torch.cat([tensor, tensor], dim)


def _count_blocks(module: nn.Module, blueprint: Blueprint, blocks: list[int]) -> None:
    """Let `blocks[0]` be how many blocks are open."""

    def add(by: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            blocks[0] += by

        return count

    for name in blueprint.cut.blocks if blueprint.cut is not None else ():
        block = module.get_submodule(name)
        block.register_forward_pre_hook(add(1))
        block.register_forward_hook(add(-1))


def _products(few: _Run, more: _Run) -> dict[Site, Dims]:
    """Return the calls whose result grows in two dims while their operands grow in one each."""
    _check_alike(few, more)
    products: dict[Site, Dims] = {}
    plain: set[Site] = set()
    for one, two in zip(few.calls, more.calls, strict=True):
        read = [_growing(*shapes) for shapes in zip(one.read, two.read, strict=True)]
        made = [_growing(*shapes) for shapes in zip(one.made, two.made, strict=True)]
        # Later calls (a softmax of the table) also grow in two dims, but read what does: the table starts where the
        # operands do not yet.
        starts = any(len(dims) > 1 for dims in made) and all(len(dims) < 2 for dims in read)
        if not starts:
            plain.add(one.site)
            continue
        dims = tuple(next(iter(dims), None) for dims in read)
        if products.setdefault(one.site, dims) != dims:
            plain.add(one.site)
        # In a table made of one operand the second dim may come from a number in the code, which no gather changes; a
        # dim that grows without being as long as the samples mixes them with something else.
        if sum(dim is not None for dim in dims) < 2 or any(
            dim is not None and shape[dim] != _SAMPLES for dim, shape in zip(dims, one.read, strict=True)
        ):
            raise _NotUnderstood(f"{one.name} in {_shown(one.site)} makes a table over samples of one operand")
        # `arange(samples)` gives sample 0 to every rank, so a gathered table would take ranks' samples for each other.
        if one.reads_numbers:
            raise _NotUnderstood(f"{one.name} in {_shown(one.site)} compares numbers of samples")
        if one.site in few.in_blocks:
            raise _NotUnderstood(f"{one.name} in {_shown(one.site)} multiplies samples inside of a block")
    # A training forward knows the site alone, so every call there must gather.
    for site in products.keys() & plain:
        raise _NotUnderstood(f"{_shown(site)} multiplies samples in some of its calls and not in others")
    return products


def _check_alike(one: _Run, two: _Run) -> None:
    if [(call.site, call.name) for call in one.calls] != [(call.site, call.name) for call in two.calls]:
        raise _NotUnderstood("its forward does something else with another number of samples")


def _check_joined(few: _Run, more: _Run, whole: _Run) -> None:
    """Refuse a forward that goes back from the samples of all ranks to its own."""
    _check_alike(few, whole)
    for one, two, all_ in zip(few.calls, more.calls, whole.calls, strict=True):
        # Only a call that reads the samples of all ranks can go back from them; before the gathers every dim is one
        # rank's.
        reads_all = any(_growing(*shapes) for shapes in zip(one.read, all_.read, strict=True))
        for shapes in zip(one.made, two.made, all_.made, strict=True) if reads_all else ():
            if _own_dim(*shapes) is not None:
                where = _shown(one.site)
                raise _NotUnderstood(f"{one.name} in {where} takes one rank's samples out of those of all")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _shown(site: Site) -> str:
    return site[0].co_qualname


def _growing(one: tuple[int, ...], two: tuple[int, ...]) -> list[int]:
    """Return the dims whose sizes differ between two numbers of samples; all dims, if their number differs."""
    if len(one) != len(two):
        return list(range(max(len(one), len(two))))
    return [dim for dim, sizes in enumerate(zip(one, two, strict=True)) if sizes[0] != sizes[1]]


def _own_dim(few: tuple[int, ...], more: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """Return the dim in which an output has this rank's samples alone, or `_MIXED`.

    None: the output has the samples of all ranks, or of none.
    """
    grows, joined = _growing(few, more), _growing(few, whole)
    own = [dim for dim in grows if dim not in joined]
    if not own:
        return None
    # A gather needs one dim that is the samples and nothing else: `samples * heads` would come interleaved by rank.
    return own[0] if not joined and len(own) == 1 and few[own[0]] == _SAMPLES else _MIXED


def _shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(tree) if _is(leaf))
