"""Prepared data as the batches of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.data._batches import BatchSource
from weft.data._prepared import PreparedData
from weft.data._progress import Progress, silent
from weft.data._shape import DataShape
from weft.plan import MicrobatchPlan
from weft.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class DataModule:
    """The data of a run as one rank sees them."""

    batches: BatchSource
    prepared: PreparedData

    @property
    def description(self) -> tuple[str, ...]:
        return self.prepared.description

    @property
    def fingerprint(self) -> str:
        return self.prepared.fingerprint

    def tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; None when there is no text."""
        if self.prepared.tokenizer is None:
            return None
        from weft.data._tokenizer import load_tokenizer

        return load_tokenizer(self.prepared.tokenizer)

    def close(self) -> None:
        self.batches.close()


def open_data(
    recipe: Recipe,
    shape: DataShape,
    *,
    microbatch: MicrobatchPlan,
    data_ranks: int = 1,
    data_index: int = 0,
    prepared: PreparedData | None = None,
    progress: Progress = silent,
) -> DataModule:
    """Open the data of a recipe for one data rank.  Not collective.

    Args:
        microbatch, data_ranks, data_index: This rank's share of every global batch.
        prepared: From `prepare_data`; None: prepare here.

    Raises:
        DataError: The data cannot be prepared or opened.
        PlanError: The microbatches do not add up to the global batch.
    """
    if prepared is None:
        from weft.data._recipe import prepare_data

        prepared = prepare_data(recipe, shape, progress=progress)
    source = BatchSource(
        prepared.train,
        prepared.validation,
        fingerprint=prepared.fingerprint,
        microbatch=microbatch,
        data_ranks=data_ranks,
        data_index=data_index,
        prefetch_workers=recipe.data.prefetch_workers,
    )
    return DataModule(source, prepared)
