"""Stages by a cut that was found by looking: the model's own forward, up to the first module of a later stage.

Modules of earlier stages return what has crossed the border to this stage.  Where nobody reads a result any more, a
stand-in of its shape takes its place, full of NaN: should it be read all the same, the loss says so at once and no
gradient is silently wrong.  What a module of an earlier stage would return is found on the meta device, without its
weights.  The first module of a later stage that is called ends the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.errors import PlanError
from weft.model.families import Crossing, FoundCut
from weft.model.meta_forward import StandInMode, copy_on_meta
from weft.techniques.core.views import no_view
from weft.techniques.pipeline.copies import copied
from weft.techniques.pipeline.stages import stage_of


class _Reached(BaseException):
    """A module of a later stage was called.  No `Exception`, so that no model catches it."""


class _Shapes(NamedTuple):
    """What a module returns: the leaves, with meta tensors, and how they hang together."""

    leaves: Sequence[Any]
    tree: TreeSpec


class Border:
    """The tensors that cross into a stage and out of it, for the microbatch in its forward."""

    def __init__(self, arriving: Sequence[Crossing], leaving: Sequence[Crossing]) -> None:
        self._arriving, self._leaving = tuple(arriving), tuple(leaving)
        self._values: dict[tuple[str, int], Tensor] = {}
        self._received: Tensor | None = None
        self._offset = 0
        self._taken = 0

    def begin(self, received: Tensor | None) -> None:
        """Set the tensor received from the stage before; None on the first stage, and to drop everything."""
        self._received, self._offset, self._taken = received, 0, 0
        self._values.clear()

    def take(self, module: str, leaf: int, like: Tensor) -> Tensor | None:
        """Return a result of a module of an earlier stage; None: it has not crossed, for nobody reads it."""
        crossing = next((c for c in self._arriving if (module, leaf) in ((c.module, c.leaf), *c.also)), None)
        if crossing is None:
            return None
        if (known := self._values.get((crossing.module, crossing.leaf))) is not None:
            return known
        assert self._received is not None, "a later stage ran without what should have come to it"
        if self._arriving.index(crossing) != self._taken:
            raise PlanError(
                f"{module} ran in another order than in the forward by which the model was cut into stages. A model"
                " whose order of modules depends on the data cannot be cut: use plan.mesh.pipeline = 1."
            )
        # Several tensors cross as one flat message, in the order in which the cut's forward made them.
        value = self._received
        if len(self._arriving) > 1:
            value = value.narrow(0, self._offset, like.numel()).view(like.shape)
            self._offset += like.numel()
        # No view of a leaf: a forward may write into a result of its modules.
        value = torch.ops.aten._unsafe_view(value, value.shape)
        self._taken += 1
        self._values[crossing.module, crossing.leaf] = value
        return value

    def note(self, module: str, leaves: Sequence[Any]) -> None:
        """Remember the results of a module of this stage that later ones read."""
        for crossing in self._leaving:
            if crossing.module == module:
                self._values[module, crossing.leaf] = leaves[crossing.leaf]

    def give(self) -> Tensor:
        """Return what the next stage needs, as one tensor: several results are laid end to end."""
        missing = next(
            (leaving.module for leaving in self._leaving if (leaving.module, leaving.leaf) not in self._values), None
        )
        if missing is not None:
            raise PlanError(
                f"{missing} did not run in this forward, but what it returns is what the next pipeline stage is given:"
                " by the forward that cut the model into stages it runs each time. Let it run (layer drop may scale its"
                " result by 0), set pipeline_parallel.cuts so that no block that may be left out ends a stage, or use"
                " plan.mesh.pipeline = 1."
            )
        values = [self._values[crossing.module, crossing.leaf] for crossing in self._leaving]
        if len(values) == 1:
            return no_view(values[0])
        return torch.cat([value.reshape(-1) for value in values])


class _Seen:
    """A module inside of one of another stage, of which a forward reads dtypes and sizes.  It is no `nn.Module`:
    nothing that works on the modules of a stage takes it for one of them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _seen(getattr(self._module, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"the forward calls a {type(self._module).__name__} inside of a module that another pipeline stage has,"
            " unlike the forward by which the model was cut into stages. Use plan.mesh.pipeline = 1."
        )


def _seen(value: Any) -> Any:
    return _Seen(value) if isinstance(value, nn.Module) else value


class _Foreign(nn.Module):
    """Stands for a module of another stage.  What a forward reads of it beside its results (dtypes, sizes) it has."""

    def __init__(self, whole: nn.Module, border: Border, dtype: torch.dtype) -> None:
        super().__init__()
        self.border = border
        # Without memory, and in a tuple so that it is no child: this stage has none of its tensors.
        self._whole = (copy_on_meta(whole, dtype),)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_whole" not in self.__dict__:
                raise
            return _seen(getattr(self.__dict__["_whole"][0], name))


class Earlier(_Foreign):
    """Stands for a module of an earlier stage: returns its results as they have crossed, or stand-ins."""

    def __init__(self, name: str, whole: nn.Module, border: Border, dtype: torch.dtype, *, is_written: bool) -> None:
        super().__init__(whole, border, dtype)
        self._is_written = is_written
        self._name = name
        self._shapes: dict[Any, _Shapes] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        like = self._shapes_of(args, kwargs)
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        leaves = [self._leaf(at, leaf, device) for at, leaf in enumerate(like.leaves)]
        return tree_unflatten(leaves, like.tree)

    def _leaf(self, at: int, like: Any, device: torch.device | None) -> Any:
        if not isinstance(like, Tensor):
            return like
        crossed = self.border.take(self._name, at, like)
        if crossed is not None:
            return crossed
        # Results that did not cross are filled with NaN: whoever reads one after all does not go on unnoticed.
        value = torch.nan if like.is_floating_point() else 0
        if self._is_written:
            return torch.full(like.shape, value, dtype=like.dtype, device=device)
        return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)

    def _shapes_of(self, args: Any, kwargs: Any) -> _Shapes:
        leaves = tree_leaves((args, kwargs))
        key = tuple(_key_of(leaf) for leaf in leaves)
        if key not in self._shapes:
            # Neither the fake tensors of a dry run nor the keys of draws are for what is not computed.
            with _disable_current_modes(), torch.no_grad(), StandInMode(self._name):
                outputs = self._whole[0].train(self.training)(*_on_meta(args), **_on_meta(kwargs))
            self._shapes[key] = _Shapes(*tree_flatten(outputs))
        return self._shapes[key]


class Later(_Foreign):
    """Stands for a module of a later stage: whoever calls it has done this stage's work."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached


def cut_found(module: nn.Module, table: FoundCut, stage: int, cuts: Sequence[int], dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model that computes one stage only, by a cut that was found."""
    edges = (0, *cuts, len(table.blocks))
    arriving = table.crossings[edges[stage] - 1] if stage > 0 else ()
    leaving = table.crossings[edges[stage + 1] - 1] if stage < len(cuts) else ()
    border = Border(arriving, leaving)
    memo: dict[int, Any] = {}
    for name in (*table.stem, *table.blocks, *table.between, *table.tail):
        whole, home = module.get_submodule(name), stage_of(name, table, cuts)
        assert home is not None, "it stands in the table"
        if home < stage:
            memo[id(whole)] = Earlier(name, whole, border, dtype, is_written=name in table.written)
        elif home > stage:
            memo[id(whole)] = Later(whole, border, dtype)
    part = copied(module, memo)
    for name in dict.fromkeys(crossing.module for crossing in leaving):
        if stage_of(name, table, cuts) == stage:
            part.get_submodule(name).register_forward_hook(partial(_note, border, name))
    if stage < len(cuts):
        part.forward = partial(_until_reached, border, part.forward)
        for hooks in (value for name, value in vars(part).items() if name.startswith("_forward_hooks")):
            hooks.clear()  # they are for the result, which the last stage has
    return part


def border_of(part: nn.Module) -> Border | None:
    """Return the border of a stage; None where a table by hand has cut it."""
    return next((module.border for module in part.modules() if isinstance(module, Earlier | Later)), None)


def _note(border: Border, name: str, module: nn.Module, args: Any, output: Any) -> None:
    border.note(name, tree_leaves(output))


def _until_reached(border: Border, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    try:
        forward(*args, **kwargs)
    except _Reached:
        return border.give()
    raise PlanError(
        "the forward ended before it reached a module of the next stage, unlike the forward by which the model was cut"
        " into stages. Use plan.mesh.pipeline = 1."
    )


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)


def _on_meta(tree: Mapping[str, Any] | tuple[Any, ...]) -> Any:
    """Arguments without memory; numbers and positions as they are, for they may decide about shapes."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, FakeTensor) else leaf.detach()

    return tree_map(convert, tree)
