"""A user's own batches: drawn so that every rank agrees, cut into shares and microbatches, and handed to a loss as
they came."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from weft.api.batches.batch_shape import ROWS, BatchShape, add_to_digest, taken_apart
from weft.api.batches.generators import seeded
from weft.api.batches.keyed_reads import KeyedReader, SampleRequest
from weft.api.ranks.agreement import UNKNOWN
from weft.errors import DataError, RecipeError
from weft.run.data.loader_order import LoaderOrder

UserBatch = Tensor | Mapping[str, Any] | Sequence[Any]


def fields_of(batch: UserBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name: mappings by key, sequences by position ("0", "1", …), a tensor as "0",
    inner ones as "image.boxes"; what is no tensor as row numbers (`weft.api.batches.batch_shape`).

    Raises:
        DataError: it has no samples, or its entries disagree about their number.
    """
    return taken_apart(batch)[0]


def shape_of(batch: UserBatch) -> BatchShape:
    """Return how a batch is put together, and what it holds beside its tensors."""
    return taken_apart(batch)[1]


def trainable(batch: UserBatch) -> UserBatch:
    """Return a batch whose tensors were made under `torch.inference_mode` as copies that can be kept for a backward."""
    fields, shape = taken_apart(batch)
    if not any(value.is_inference() for value in fields.values()):
        return batch
    return shape.restored({name: value.clone() if value.is_inference() else value for name, value in fields.items()})


def digest_of(fields: Mapping[str, Tensor]) -> str:
    """Return what two batches share only if all their values are equal."""
    digest = xxhash.xxh3_64()
    for name, value in fields.items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def infer_inputs(model: nn.Module, shape: BatchShape) -> dict[str, str]:
    """Return keyword of the model's forward → field of the batch.

    Fields that bear the names of arguments go to these; of a tuple the first entries go to the arguments that have no
    default, at least one.  Labels go to a model that cannot run without them; where they are optional, it would compute
    a loss that nobody reads.

    Raises:
        RecipeError: no field fits the forward.
    """
    parameters = [*inspect.signature(model.forward).parameters.values()]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if shape.has("0") and named:
        needed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        inputs = {name: str(place) for place, name in enumerate(needed)}
        return inputs if len(needed) > 1 and all(map(shape.has, inputs.values())) else {named[0]: "0"}
    wants_labels = needs_labels(model, shape)
    matching = {name: name for name in named if shape.has(name) and (name != "labels" or wants_labels)}
    if not matching:
        raise RecipeError(
            f"none of the batch's fields ({', '.join(shape.names)}) is an argument of"
            f" {type(model).__name__}.forward({', '.join(named)}). Say which goes where:"
            f' session.prepare(…, inputs={{"{named[0] if named else "x"}": "{next(iter(shape.names))}"}}).'
        )
    return matching


def needs_labels(model: nn.Module, example: BatchShape) -> bool:
    """Whether the forward takes labels and cannot do without: it has no default for them, or makes the decoder's inputs
    of them, as encoder-decoder models of Transformers do."""
    labels = inspect.signature(model.forward).parameters.get("labels")
    if labels is None or not example.has("labels"):
        return False
    makes_inputs = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return labels.default is inspect.Parameter.empty or (makes_inputs and not example.has("decoder_input_ids"))


def without_labels(model: nn.Module, example: BatchShape, inputs: Mapping[str, str]) -> str:
    """Return the message for a model that computed no loss because it was given no labels; empty where it was given
    some."""
    takes = "labels" in inspect.signature(model.forward).parameters and example.has("labels")
    if not takes or "labels" in inputs:
        return ""
    listed = ", ".join(f'"{name}": "{field}"' for name, field in {**inputs, "labels": "labels"}.items())
    return (
        f" The model was not given the labels, so its outputs have no loss. Compute it of outputs.logits and"
        f' batch["labels"], or name them: session.prepare(…, inputs={{{listed}}}).'
    )


class BatchStream:
    """The loader's samples as one endless stream of global batches, the same on every rank; each rank reads its share.

    A map-style dataset is read sample by sample: shuffled loaders by a permutation of (seed, epoch), others in order.
    An epoch has as many steps as the loader has batches.  Its last batch runs on into the samples of the next pass, so
    that none is short and no sample is lost or seen twice; under `drop_last` the loader's remainder is left out of each
    pass.  Any other loader is iterated whole on every rank and must yield the same batches everywhere, which `check`
    compares.
    """

    def __init__(
        self,
        loader: Iterable[UserBatch],
        seed: int,
        check: Callable[[str], None],
        batch_size: int | None = None,
    ) -> None:
        self._loader = loader
        self.seed = seed
        self._check = check
        self._dataset = _map_style(loader)
        self.batch_size = _batch_size(loader, batch_size)
        self._order: LoaderOrder | None = None
        self.ids = np.zeros(0, np.int64)
        """Ids, as the order counts them, of the samples that `read` has read last."""
        self._reader = KeyedReader(self._dataset, getattr(loader, "collate_fn", list), seed, alone=False)
        self._has_looked = False
        """Whether the collate function was tried on a part of a batch."""
        self.digest = ""
        """Digest of the last batch that `iterate` took, before it was cut."""
        self._refuse_what_is_not_read()

    @property
    def dataset(self) -> Any | None:
        """The data set of a loader that is read by index; None for a loader that only iterates."""
        return self._dataset

    @property
    def num_samples(self) -> int | None:
        """Samples per pass; None for a loader that only iterates."""
        if self._dataset is None:
            return None
        num_samples = len(_sampler(cast(DataLoader[Any], self._loader)).data_source)
        return num_samples - num_samples % self.batch_size if self._drops_last else num_samples

    @property
    def steps_per_epoch(self) -> int | None:
        """Return `len(loader)`; None for a loader that only iterates."""
        return -(-self.num_samples // self.batch_size) if self.num_samples else None

    @property
    def epoch_length(self) -> int | None:
        """Return `len(loader)` where it is true, of batch samplers, too; None for data that only iterate."""
        sampler = getattr(self._loader, "batch_sampler", None)
        return self.steps_per_epoch if self._dataset is not None or sampler is None else _length(sampler)

    @property
    def _drops_last(self) -> bool:
        return bool(getattr(self._loader, "drop_last", False))

    def epoch_of(self, step: int) -> int | None:
        """The epoch in which a step lies."""
        return step // self.steps_per_epoch if self.steps_per_epoch else None

    def read(self, step: int, start: int, stop: int) -> UserBatch:
        """Samples [start, stop) of a step's global batch, collated by the loader's own function."""
        first, order = step * self.batch_size, self.order
        ids = order.ids_at(np.arange(first, first + self.batch_size, dtype=np.int64))
        self.ids = ids[start:stop]
        asked = SampleRequest((ids % order.sizes[0]).tolist(), first, start, stop)
        is_part = stop - start < self.batch_size
        if is_part and not self._has_looked:
            self._has_looked = True
            self._reader.collates_full_batch = self._collates_differently(asked)
        return self._reader(asked)

    def _collates_differently(self, asked: SampleRequest) -> bool:
        """Try the collate function on a batch and on this rank's share of it; lengths that it pads to may differ."""
        # Padding to the longest sample differs between the two and is harmless: a model masks it.  Only the part that
        # both have is compared.
        whole = fields_of(self._reader(asked._replace(start=0, stop=self.batch_size)))
        share = fields_of(self._reader(asked))
        if self._reader.collates_full_batch or whole.keys() != share.keys():
            return True
        for name, value in share.items():
            other = whole[name][asked.start : asked.stop]
            if name == ROWS:  # rows are counted from the first of each; what stands in them is compared
                value, other = value[:, 1], other[:, 1]
            common = tuple(slice(min(sizes)) for sizes in zip(value.shape, other.shape, strict=False))
            if value.ndim != other.ndim or len(value) != len(other) or not torch.equal(value[common], other[common]):
                return True
        return False

    @property
    def order(self) -> LoaderOrder:
        """The order of a loader that is read by index."""
        size, pass_size = len(_sampler(cast(DataLoader[Any], self._loader)).data_source), self.num_samples
        assert pass_size is not None
        if self._order is None or (self._order.sizes, self._order.pass_sizes) != ((size,), (pass_size,)):
            self._order = LoaderOrder(size, pass_size, seed=self.seed, shuffles=self.shuffles)
        return self._order

    @property
    def shuffles(self) -> bool:
        """Whether a loader that is read by index permutes each pass."""
        return isinstance(_sampler(cast(DataLoader[Any], self._loader)), RandomSampler)

    def _refuse_what_is_not_read(self) -> None:
        """Settings of a loader that would be ignored, or would undo what Weft does."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return
        refuse_shared_out(loader)
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if self._dataset is None:
            return  # it is iterated as it is, with all its settings
        generator = loader.generator if loader.generator is not None else getattr(sampler, "generator", None)
        if generator is not None:
            raise DataError(
                "the loader's generator would not be read: the order of samples is made of the session's seed and the"
                " epoch, so that a resumed run goes on with it. Leave generator= out and write"
                f" weft.session(seed={generator.initial_seed()})."
            )
        if loader.worker_init_fn is not None:
            raise DataError(
                "the loader's worker_init_fn would not be called: every rank reads the samples of its share in its own"
                " process. Do what it does in the dataset's __getitem__, or leave it out; random draws there are seeded"
                " by sample already."
            )
        if self._drops_last and not self.num_samples:
            raise DataError(
                f"drop_last=True leaves none of the loader's {len(cast(Any, loader.dataset))} samples, which are fewer"
                f" than a batch of {self.batch_size}. Use drop_last=False, or a smaller batch size."
            )

    def warn_of_workers(self) -> None:
        """Say once that a loader's workers are not started."""
        workers = getattr(self._loader, "num_workers", 0)
        if self._dataset is not None and workers:
            warnings.warn(
                f"the loader's num_workers = {workers} are not started: every rank reads the samples of its share in"
                " its own process. Write num_workers=0; where reading is slow, prepare the data, or give an"
                " IterableDataset, whose workers are the loader's own.",
                stacklevel=2,
            )

    def iterate(self) -> Iterator[UserBatch]:
        """Every batch of a loader that only iterates, whole; they may differ in size."""
        for number, batch in enumerate(self._loader):
            fields = fields_of(batch)
            self.digest = digest_of(fields)
            if number < 3:  # comparing costs a collective; loaders that differ between ranks do so from the start
                self._check(self.digest)
            if not next(iter(fields.values())).shape[0]:
                raise DataError(f"batch {number} of the loader has no samples, so no step can be made of it.")
            yield batch


def refuse_shared_out(loader: object) -> None:
    """Raises `DataError` for a loader that gives this rank a share already."""
    if isinstance(getattr(getattr(loader, "batch_sampler", None), "sampler", None), DistributedSampler):
        raise DataError(
            "the loader has a DistributedSampler, which gives this rank a share, and the session would share that out"
            " again. Leave it out: DataLoader(dataset, batch_size=…, shuffle=True) with the global batch."
        )


def _sampler(loader: DataLoader[Any]) -> Any:
    sampler = loader.batch_sampler
    return sampler.sampler if type(sampler) is BatchSampler else None


def _map_style(loader: Iterable[Any]) -> Any | None:
    """The dataset of a loader that Weft may read by index; None for anything with an order of its own."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = _sampler(loader)
    if type(sampler) is RandomSampler:
        plain = not sampler.replacement and sampler.num_samples == len(cast(Any, sampler.data_source))
        return loader.dataset if plain else None
    return loader.dataset if type(sampler) is SequentialSampler else None


def _length(sampler: Any) -> int | None:
    """The number of a sampler's batches, where it says it."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _batch_size(loader: Iterable[Any], given: int | None) -> int:
    size = getattr(loader, "batch_size", None)
    if given is not None and type(given) is int and isinstance(size, int) and size not in (0, given):
        raise DataError(
            f"batch_size = {given} is for loaders that do not say it, and this one has batch_size = {size}, its"
            f" global batch. Leave one out, or make the loader with batch_size={given}."
        )
    if given is not None:
        return given
    if isinstance(size, int) and size > 0:
        return size
    sampled = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(sampled, int):
        return sampled
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is not None and _length(sampler) and iter(sampler) is not sampler:
        with seeded(0, 0):  # what it draws is drawn again when it is gone through
            return max(len(indices) for indices in sampler)
    raise DataError(
        f"{type(loader).__name__} does not say its batch_size, which is the global batch that all ranks share."
        " Use a torch DataLoader, or give your loader an attribute batch_size."
    )


_SAMPLES, _READS = 8, 3


# A split by an unseeded permutation gives each rank other data.
def facts_of_data(stream: BatchStream, seed: int) -> Mapping[str, str]:
    """Return what must be equal on all ranks of the data of a map-style loader: its subsets, and a few samples.

    Samples are read under seeded generators, which are put back.  Where a sample is another when it is read again (it
    draws from a generator of its own, or tells the time), nothing is said of any.
    """
    dataset: Any = stream.dataset
    if dataset is None:
        return {}
    facts = {
        f"data: the indices of the loader's Subset{number or ''}": _digest(np.asarray(indices))
        for number, indices in enumerate(_subsets(dataset))
    }
    return {**facts, f"data: {_SAMPLES} of the loader's samples": _samples(dataset, seed)}


def _subsets(dataset: Any) -> Iterator[Any]:
    while isinstance(dataset, Subset):
        yield list(dataset.indices)
        dataset = dataset.dataset


def _samples(dataset: Any, seed: int) -> str:
    """A digest of samples from the whole data set; `UNKNOWN` where they cannot be read again."""
    size = len(dataset)
    places = np.linspace(0, size - 1, min(_SAMPLES, size)).astype(np.int64).tolist() if size else []
    names: list[str] = []
    for place in places:
        try:
            read = {_read(dataset, place, seed) for _ in range(_READS)}
        except Exception:  # whatever a user's data raise: training reads them, and says so
            return UNKNOWN
        if len(read) > 1:
            return UNKNOWN
        names += read
    return _digest("".join(names))


def _read(dataset: Any, place: int, seed: int) -> str:
    with seeded(seed, place):
        return _digest(dataset[place])


def _digest(value: Any) -> str:
    digest = xxhash.xxh3_64()
    add_to_digest(digest, value)
    return digest.hexdigest()
