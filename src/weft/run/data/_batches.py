"""Batches as tensors: the microbatches of this data rank for training, and the validation set exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weft.config.plan import MicrobatchPlan
from weft.config.recipe import Recipe
from weft.errors import DataError
from weft.run.data._fields import Fields
from weft.run.data._prefetch import Prefetcher
from weft.run.data._prepared import PreparedData
from weft.run.data._reader import TrainReader, ValidationReader
from weft.run.data._sampler import check_batch, rank_range
from weft.run.data._shape import DataShape

if TYPE_CHECKING:
    from torch import Tensor


class BatchSource:
    """The batches of one data rank.

    Fields are CPU tensors with samples along dim 0, of the same shape in every microbatch: `sample_ids` (int64) and

    - tokens: `tokens`, `labels` (int64, (samples, sequence)), and `positions`, `document_ids` for isolated documents;
    - images: `images` (float32), `labels` (int64, (samples,));
    - regression: `images`, `labels` (float32), `weights` (float32, (samples,); 0: the sample does not count).

    No method is collective.  Close it when done: it may own threads.

    Args:
        prepared: What to train and to evaluate on.
        microbatch, data_ranks, data_index: This rank's share of every global batch.
        prefetch_workers: Threads that read coming steps; 0: the batch is read when it is asked for.

    Raises:
        PlanError: The plan's microbatches do not add up to the global batch.
        DataError: A set cannot be opened or has no samples.
    """

    def __init__(
        self,
        prepared: PreparedData,
        *,
        microbatch: MicrobatchPlan,
        data_ranks: int,
        data_index: int,
        prefetch_workers: int = 0,
    ) -> None:
        self._start, self._stop = rank_range(microbatch, data_ranks, data_index)
        check_batch(microbatch, data_ranks, prepared.train.global_batch_size)
        self.fingerprint = prepared.fingerprint
        self._microbatch_size = microbatch.size
        self._reader = TrainReader(prepared.train, self._start, self._stop)
        self._validation = ValidationReader(prepared.validation) if prepared.validation else None
        self._prefetcher = Prefetcher(self._reader, prefetch_workers) if prefetch_workers else None

    @property
    def part(self) -> tuple[int, int]:
        """This rank's part [start, stop) of every global batch."""
        return self._start, self._stop

    @property
    def sizes(self) -> tuple[int, ...]:
        """Training samples of each corpus."""
        return self._reader.sampler.sizes

    @property
    def validation_size(self) -> int:
        """Validation samples; 0: there is no validation set."""
        return self._validation.size if self._validation is not None else 0

    def microbatches(self, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's microbatches of a step (from 0): a pure function of the recipe, the data and `step`.

        Raises:
            DataError: A sample is broken (NaN, a token outside the vocabulary); names it.
        """
        # With and without threads the same samples: a step decides them, and not the order of reads.
        source = self._reader if self._prefetcher is None else self._prefetcher
        return self._as_microbatches(source.read(step))

    def num_evaluation_steps(self, global_batches: int | None = None) -> int:
        """Return how many lists `evaluation` yields, the same on every rank."""
        size = self._reader.sampler.global_batch_size
        whole = -(-self.validation_size // size)
        return whole if global_batches is None else min(whole, global_batches)

    def evaluation(self, global_batches: int | None = None) -> Iterator[list[dict[str, Tensor]]]:
        """Yield this rank's microbatches of each global batch of validation samples.

        All data ranks together see each sample exactly once.  Every rank gets the same number of lists, with as many
        microbatches of the same shape as in training; places past the end hold samples whose labels are all −100
        (`weights` 0), which add nothing to a loss's sum or count.

        Args:
            global_batches: At most this many global batches; None: the whole set.

        Raises:
            DataError: There is no validation set.
        """
        if self._validation is None:
            raise DataError(
                "There are no validation data to evaluate on. Name a data.validation source, set "
                "data.validation_fraction above 0, or leave run.evaluate_every out."
            )
        size = self._reader.sampler.global_batch_size
        for number in range(self.num_evaluation_steps(global_batches)):
            first = number * size
            yield self._as_microbatches(self._validation.read(first + self._start, first + self._stop))

    def state(self, step: int) -> dict[str, int | str]:
        """Return what a checkpoint before `step` keeps: the global cursor, the seed and the fingerprint."""
        return self._reader.sampler.state(step, self.fingerprint)

    def step_of(self, state: Mapping[str, object]) -> int:
        """Return the step to continue with.

        Raises:
            DataError: The state belongs to other data, another seed, or stands within a batch.
        """
        return self._reader.sampler.step_of(state, self.fingerprint)

    def close(self) -> None:
        """End what reads ahead.  Harmless when repeated."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _as_microbatches(self, batch: Fields) -> list[dict[str, Tensor]]:
        # Imported here so that preparing data starts without torch.
        import torch

        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        size = self._microbatch_size
        return [
            {name: tensor[at : at + size] for name, tensor in tensors.items()}
            for at in range(0, self._stop - self._start, size)
        ]


def open_data(
    recipe: Recipe,
    shape: DataShape,
    *,
    microbatch: MicrobatchPlan,
    data_ranks: int = 1,
    data_index: int = 0,
    prepared: PreparedData | None = None,
) -> BatchSource:
    """Open the data of a recipe for one data rank.  Not collective.

    Args:
        microbatch, data_ranks, data_index: This rank's share of every global batch.
        prepared: From `prepare_data`; None: prepare here.

    Raises:
        DataError: The data cannot be prepared or opened.
        PlanError: The microbatches do not add up to the global batch.
    """
    if prepared is None:
        from weft.run.data._recipe import prepare_data  # which the ranks of a run do without

        prepared = prepare_data(recipe, shape)
    return BatchSource(
        prepared,
        microbatch=microbatch,
        data_ranks=data_ranks,
        data_index=data_index,
        prefetch_workers=recipe.data.prefetch_workers,
    )
