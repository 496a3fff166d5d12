"""Models, optimizers and loaders of a script, given to the session."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from weft.errors import DataError, RecipeError
from weft.fabric._place import FabricPlace
from weft.fabric.wrappers import is_wrapped, mark, module_of, take_closures, wrapped


class SettingUp(FabricPlace):
    """Methods that bring a script's objects under the plan."""

    def setup(
        self,
        module: nn.Module,
        *optimizers: torch.optim.Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Set up a model and its optimizers, and return them in the same order."""
        del move_to_device, _reapply_compile  # a plan says where weights are, and what is compiled
        made = self._set_up(module)
        prepared = [self.setup_optimizers(optimizer) for optimizer in optimizers]
        self.call("on_after_setup", fabric=self, module=made)
        if not prepared:
            return made
        if scheduler is not None:
            prepared.append(self._session.prepare(scheduler))
        return (made, *prepared)

    def setup_module(self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True) -> nn.Module:
        """Set up a model alone: its optimizer may follow, or it stays whole on every rank, as a teacher."""
        del move_to_device, _reapply_compile
        return self._set_up(module)

    def _set_up(self, module: nn.Module) -> nn.Module:
        _refuse_again(module, "A model")
        self._take_seed()
        numbers = self._arguments.numbers
        if numbers.weights is not None:
            module.to(numbers.weights)
        if hasattr(module, "_fabric"):  # a LightningModule, which logs by it and has hooks
            module._fabric = self  # type: ignore[assignment]
            self._callbacks.append(module)
        self._has_set_up = True
        return wrapped(self._session.prepare(module), numbers, self._session.device)

    def setup_optimizers(self, *optimizers: torch.optim.Optimizer) -> Any:
        """Set up optimizers over parameters of models that were set up, and return them."""
        if not optimizers:
            raise RecipeError("fabric.setup_optimizers() was given no optimizer. Give it one.")
        for optimizer in optimizers:
            _refuse_again(optimizer, "An optimizer")
            self._optimizers.append(self._session.prepare(optimizer))
            take_closures(optimizer)
            mark(optimizer)
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Set up loaders, whose batches are the global ones: every rank is handed its share, on its device."""
        del use_distributed_sampler, move_to_device  # the sampler stays the script's own, on every rank
        self._take_seed()
        loaders = list[Any]()
        for dataloader in dataloaders:
            _refuse_again(dataloader, "A loader")
            loaders.append(self._session.prepare(dataloader))
            mark(loaders[-1])
            self._say_batch(dataloader)
        self._loaders += loaders
        if not loaders:
            raise DataError("fabric.setup_dataloaders() was given no loader. Give it one.")
        return loaders[0] if len(loaders) == 1 else loaders

    def _say_batch(self, loader: Any) -> None:
        ranks, size = self._session.num_data_ranks, getattr(loader, "batch_size", None)
        if ranks == 1 or not isinstance(size, int):
            return
        if size not in self._said:
            self._said.add(size)
            share = f"{size // ranks}" if size % ranks == 0 else f"{size // ranks} or {size // ranks + 1}"
            self._session.print(
                f"fabric    batches of {size} are the global ones: {share} samples on each of {ranks} ranks; Fabric's"
                f" own would have {size} on each, which batch_size={size * ranks} says"
            )
        left = len(loader.sampler) % size if hasattr(loader.sampler, "__len__") and not loader.drop_last else 0
        if 0 < left < ranks:
            self._session.print(
                f"fabric    the last batch has {left} samples for {ranks} ranks: the others compute one that gradients"
                " leave out, and sums of the loop's own count it. Use drop_last=True, or another batch size"
            )

    def to_device(self, obj: Any) -> Any:
        """Return what has a `to`, such as a model or tensors, in lists, tuples and dictionaries too, on this rank's
        device."""

        def moved(each: Any) -> Any:
            return each.to(self.device) if hasattr(each, "to") else each

        return tree_map(moved, obj)

    def init_tensor(self) -> AbstractContextManager[None]:
        """A context in which tensors are made on the device, in the precision that was asked for."""
        return self._arguments.numbers.made(self._session.device)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Generator[None]:
        """A context in which models are made on the device, in the precision that was asked for; `empty_init` leaves
        out the drawing of weights that a load will replace."""
        with self._arguments.numbers.made(self._session.device):
            if empty_init:
                with _NoInitialisation():
                    yield
            else:
                yield

    def sharded_model(self) -> AbstractContextManager[None]:
        """`init_module` by its old name."""
        return self.init_module()


class _NoInitialisation(TorchFunctionMode):
    """Initialisers leave tensors as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _refuse_again(thing: Any, what: str) -> None:
    if is_wrapped(thing):
        raise RecipeError(
            f"{what} is set up once, and this {type(module_of(thing)).__name__} was before. Leave it out."
        )
