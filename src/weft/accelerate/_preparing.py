"""Prepare a loop's models, optimizers, loaders and schedulers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from weft.accelerate._core import AcceleratorCore
from weft.accelerate._number import count_own_steps
from weft.accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, skip_first_batches, with_batches_of
from weft.accelerate.optimizer import AcceleratedOptimizer
from weft.accelerate.scheduler import AcceleratedScheduler
from weft.accelerate.utils.operations import convert_to_fp32
from weft.errors import RecipeError


class Preparing(AcceleratorCore):
    """`prepare`, and what undoes it."""

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Bring models, optimizers, loaders and schedulers under the job, and return them in their order.

        Things of another kind, and those that were prepared before, are returned as they are.
        """
        if device_placement is not None and not all(placement is not False for placement in device_placement):
            raise RecipeError("prepare(device_placement=[False]) is not had: all things of a job are on its device.")
        prepared: list[Any] = [None] * len(args)
        kinds = (nn.Module, DataLoader, torch.optim.Optimizer)
        for kind in kinds:  # schedulers last: they look for their optimizers
            for place, argument in enumerate(args):
                if prepared[place] is None and isinstance(argument, kind):
                    prepared[place] = self._prepared(argument)
        for place, each in enumerate(args):
            if prepared[place] is None:
                prepared[place] = self._prepared(each)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepared(self, thing: Any) -> Any:
        if any(thing is model for model in (*self._models, *self._optimizers, *self._schedulers, *self._dataloaders)):
            return thing
        if type(thing) in (AcceleratedOptimizer, AcceleratedScheduler, DataLoaderShard):
            return thing
        match thing:
            case nn.Module():
                return self.prepare_model(thing)
            case torch.optim.Optimizer():
                return self.prepare_optimizer(thing)
            case DataLoader():
                return self.prepare_data_loader(cast(DataLoader[Any], thing))
            case torch.optim.lr_scheduler.LRScheduler():
                return self.prepare_scheduler(thing)
            case _:
                return thing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See `prepare`.  A model without a prepared optimizer stays plain."""
        self._job.has_begun = True
        if self.native_amp or (self.mixed_precision == "fp16" and self.deepspeed_plugin is None):
            _cast_forward(model, self)
        self._models.append(self._job.session.prepare(model))
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """See `prepare`."""
        own = AcceleratedOptimizer(self._job.session.prepare(optimizer), self._before_step(optimizer))
        self._optimizers.append(own)
        return own

    def _before_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], None] | None:
        """Return a function that runs before each step of an optimizer; None: nothing does."""

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """See `prepare`.  It steps once for each optimizer step."""
        of = [
            optimizer for optimizer in self._optimizers if optimizer.optimizer is getattr(scheduler, "optimizer", None)
        ]
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            self._job.session.prepare(scheduler)
        if self.use_distributed:
            count_own_steps(scheduler)
        own = AcceleratedScheduler(scheduler, of or self._optimizers, self.step_scheduler_with_optimizer)
        self._schedulers.append(own)
        return own

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """See `prepare`.  Its batch is the global one, which is shared out over the processes."""
        if slice_fn_for_dispatch is not None:
            raise RecipeError("slice_fn_for_dispatch is not had: every rank takes its rows of a stream's batches.")
        loader = self._seeded(data_loader) if self.dataloader_config.use_seedable_sampler else data_loader
        ranks = self.num_processes
        if ranks > 1:
            loader = self._widened(loader, ranks)
        own = cast(Any, DataLoaderShard(self._job.session.prepare(loader), self._job.gradients))
        self._dataloaders.append(own)
        return own

    def _seeded(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if not isinstance(loader.sampler, RandomSampler) or type(loader.batch_sampler) is not BatchSampler:
            return loader
        given = loader.sampler
        sampler = SeedableRandomSampler(
            given.data_source,
            replacement=given.replacement,
            num_samples=None if given.num_samples == len(cast(Any, given.data_source)) else given.num_samples,
            generator=given.generator,
            data_seed=self.dataloader_config.data_seed,
        )
        batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
        return with_batches_of(loader, batches)

    def _widened(self, loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
        """Say how a batch is shared out; where `split_batches=False` was asked for, make it larger by the processes."""
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if self.dataloader_config.split_batches:
            if size and size not in self._said:
                self._said.add(size)
                self._say(
                    f"batches   of {size} are the global ones: {_shares(size, ranks)} on {ranks} processes"
                    f" (split_batches=False would make them {size * ranks})"
                )
            return loader
        if size is None or type(loader.batch_sampler) is not BatchSampler:
            raise RecipeError(
                "split_batches=False makes a batch larger by the number of processes, and this loader has a batch"
                " sampler of its own, or none. Leave split_batches out: its batches are the global ones."
            )
        self._say(
            f"batches   of {size} on each of {ranks} processes are global ones of {size * ranks}, by"
            " split_batches=False: losses depend on the number of processes"
        )
        wide = BatchSampler(loader.batch_sampler.sampler, size * ranks, loader.batch_sampler.drop_last)
        return with_batches_of(loader, wide)

    _said: set[int]

    def _say(self, line: str) -> None:
        if self.is_main_process:
            print(line, flush=True)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out its first batches in every pass."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model, which was never wrapped; without the casts of mixed precision, if these are not kept."""
        if not keep_fp32_wrapper:
            vars(model).pop("forward", None)
        return model

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model is spread over the devices of one process."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget what was prepared, so that other things can be; returns as many `None` as it was given objects."""
        from weft.accelerate.utils.memory import release_memory

        loaders = [loader.base_dataloader for loader in self._dataloaders]
        wrapped = [optimizer.optimizer for optimizer in self._optimizers] + [
            scheduler.scheduler for scheduler in self._schedulers
        ]
        self._job.inside.forget(*self._models, *wrapped, *loaders)
        self._forget()
        self.step = 0
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """`free_memory`."""
        return self.free_memory(*objects)


def _shares(size: int, ranks: int) -> str:
    share, rest = divmod(size, ranks)
    return f"{share} samples each" if not rest else f"{share + 1} or {share} samples each"


def _cast_forward(model: nn.Module, accelerator: Any) -> None:
    """Run a model's forward under torch.autocast, where the plan has no precision of its own, and give back fp32."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return convert_to_fp32(plain(*args, **kwargs))

    vars(model)["forward"] = forward
