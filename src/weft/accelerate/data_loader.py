"""Loaders that say where a loop is in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast, final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from weft.accelerate._job import GradientState, job_of
from weft.accelerate.unsupported import name_of

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""Settings of torch's loader that say nothing of which samples make up a batch."""


@final
class DataLoaderShard:
    """A loader that the session shares out, to look at like torch's own."""

    def __init__(self, loader: Any, gradients: GradientState, skips: int = 0) -> None:
        """`loader`: what `session.prepare` returned; `skips`: batches that every pass leaves out."""
        self.base_dataloader, self._gradients, self._skips = loader, gradients, skips
        self.end_of_dataloader = False
        self.remainder = -1
        self.iteration = 0

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.base_dataloader.__class__

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a loader is what it was made as")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self._skips, 0)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        try:
            for batch in self.base_dataloader:
                self.end_of_dataloader = self.base_dataloader.is_at_end
                yield batch
        finally:
            self._gradients.dataloader_references.remove(self)
            self.end_of_dataloader = False
        self.iteration += 1

    def _begin(self) -> None:
        self.end_of_dataloader, self.remainder = False, -1
        if not getattr(self.base_dataloader, "drop_last", False) and self.total_batch_size:
            try:
                self.remainder = len(self.base_dataloader.dataset) % self.total_batch_size
            except (AttributeError, TypeError):  # a stream does not say how many samples it has
                self.remainder = -1
        if self._skips:
            self.base_dataloader.skip(self._skips)
        self._gradients.dataloader_references.append(self)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a global batch, where the loader says it."""
        sampler = getattr(self.base_dataloader, "batch_sampler", None)
        return getattr(sampler, "batch_size", None) or self.base_dataloader.batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set."""
        return len(self.base_dataloader.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and data set which pass comes next."""
        self.iteration = epoch
        of = self.base_dataloader
        samplers = [getattr(of, "sampler", None), batches := getattr(of, "batch_sampler", None)]
        for sampler in (*samplers, getattr(batches, "sampler", None), getattr(of, "dataset", None)):
            if callable(tell := getattr(sampler, "set_epoch", None)):
                tell(epoch)

    def skipping(self, batches: int) -> DataLoaderShard:
        """Return the same loader without its first batches."""
        return DataLoaderShard(self.base_dataloader, self._gradients, self._skips + batches)


DataLoaderDispatcher = DataLoaderShard
"""Rank 0 dispatches nothing: a stream is read on every rank, whose rows are compared."""


class SeedableRandomSampler(RandomSampler):
    """A random order that follows from a seed and the number of the pass."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the state that later orders follow from, for a save."""
        return {"epoch": self.epoch, "seed": self.initial_seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on with the order of a save."""
        self.epoch, self.initial_seed = state["epoch"], state["seed"]


class SkipBatchSampler(BatchSampler):
    """The batches of another sampler, without the first."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # pyright: ignore[reportIncompatibleUnannotatedOverride]
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


@final
class SkipDataLoader(DataLoader[Any]):
    """A loader over a stream, without its first batches."""

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches

    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), self.skip_batches, None)


def with_batches_of(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return a loader of the same settings, whose batches another sampler makes up."""
    kept = {name: getattr(loader, name) for name in _KEPT if getattr(loader, name, None) is not None}
    if not loader.num_workers:
        kept.pop("prefetch_factor", None)
    if not kept.get("pin_memory_device"):
        kept.pop("pin_memory_device", None)
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, **kept)


def prepare_data_loader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    """Share a loader out over the job's processes; further arguments are what the job says."""
    job = job_of()
    return DataLoaderShard(job.session.prepare(dataloader), job.gradients)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that goes on behind so many batches in every pass; prepared or not, as what it was given."""
    if type(dataloader) is DataLoaderShard:
        return dataloader.skipping(num_batches)
    loader = cast(DataLoader[Any], dataloader)
    if isinstance(loader.dataset, IterableDataset):
        kept = {name: getattr(loader, name) for name in (*_KEPT[:-3], "batch_size", "drop_last")}
        return SkipDataLoader(loader.dataset, num_batches, **kept)
    return with_batches_of(loader, SkipBatchSampler(loader.batch_sampler, num_batches))


def __getattr__(name: str) -> Any:
    return name_of(__name__, name)
