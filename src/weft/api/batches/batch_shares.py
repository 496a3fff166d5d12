"""A rank's share of a global batch of any size, and the microbatches that it is cut into.

A loader whose batches differ in size (length buckets, token budgets, a short last one) is shared out in the proportions
of the plan: of n samples the data rank with shares m of M takes n·m/M, rounded so that the first ranks have the larger
ones: 51 over two are 26 and 25.  A full batch is cut as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.api.batches.batch_shape import FILLER, BatchShape, taken_apart
from weft.api.batches.stream import UserBatch, digest_of, fields_of
from weft.config.plan import Plan
from weft.errors import DataError
from weft.model.blueprint import Batch, Blueprint


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Samples [start, stop) of a global batch of `size`, and how they are cut."""

    size: int
    start: int
    stop: int
    cuts: tuple[tuple[int, int], ...]
    """Samples of each microbatch, counted from `start`; one that has none runs a sample that does not count, because
    ranks run equally many microbatches of such a batch."""

    some_empty: bool = False
    """Whether some rank has a microbatch without samples."""

    def refuse_fillers(self, who: str) -> None:
        """Raises `DataError`, on every rank, where some rank has a microbatch without samples."""
        if self.some_empty:
            raise DataError(
                f"{who} was given a batch of {self.size} samples, too few for every data rank to have one. Let batches"
                " have a sample for each, or use state.step(batch)."
            )


@dataclass(frozen=True, slots=True)
class _Taken:
    share: BatchShare
    first: Mapping[str, Tensor]
    """The batch's first sample, for microbatches that have none."""
    shape: BatchShape | None = None
    """Shape of that sample."""
    digest: str = ""
    """Digest of the whole batch; empty: not known."""
    tensors: list[ReferenceType[Tensor]] = field(default_factory=list[ReferenceType[Tensor]])
    """The tensors that the loop was handed."""


class BatchShares:
    """This rank's shares of the batches that a loop takes.

    `blueprint` is the model's with its loss, which may have to see a whole share at once, or the shares of all ranks.
    """

    def __init__(self, plan: Plan, data_index: int, batch_size: int, blueprint: Blueprint) -> None:
        self._plan, self._index, self._batch_size, self._blueprint = plan, data_index, batch_size, blueprint
        self._gathers = gathers_samples(blueprint, plan)
        self._of_field: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._ahead: list[_Taken] = []
        """Batches of several sizes that the loop was given, and no step has trained on."""
        self.usual = self.of(batch_size)

    def of(self, size: int) -> BatchShare:
        """Return this rank's share of a batch of `size` samples, (at least 1).

        Raises:
            DataError: on every rank; what needs its whole share at once cannot have it.
        """
        counts, micro = self._plan.microbatch.shares(self._plan.mesh.data), self._plan.microbatch.size
        bounds = bounds_of(size, counts)
        start, stop = bounds[self._index], bounds[self._index + 1]
        if size == self._batch_size:
            return BatchShare(size, start, stop, tuple((at, at + micro) for at in range(0, stop - start, micro)))
        sizes = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
        if self._gathers and len(set(sizes)) > 1:
            raise DataError(unequal(size, len(sizes)))
        # As many microbatches on every rank, for they run collectives together; a rank with fewer samples has smaller
        # ones.
        number = -(-max(sizes) // micro)
        if self._plan.mesh.pipeline > 1:  # whose schedule may ask for a multiple of the plan's number
            number = max(counts) * -(-number // max(counts))
        if (number > 1 or not min(sizes)) and (whole := full_share_reason(self._blueprint)):
            raise DataError(
                f"{whole}, and a batch of {size} samples cannot be given to {len(sizes)} data ranks in one piece"
                f" of 1 to {micro} samples each. Let the loader's batches have {len(sizes)} to {self._batch_size}"
                " samples, or give prepare the largest by batch_size=."
            )
        length = stop - start
        cuts = tuple((length * i // number, length * (i + 1) // number) for i in range(number))
        return BatchShare(size, start, stop, cuts, some_empty=min(sizes) < number)

    def cut(self, batch: UserBatch, digest: str, hand_out: Callable[[UserBatch], UserBatch]) -> UserBatch:
        """Return this rank's share of a whole batch, as `hand_out` gives it to the loop, and remember what it is."""
        fields, shape = taken_apart(batch)
        share = self.of(next(iter(fields.values())).shape[0])
        part = {name: value[share.start : share.stop] for name, value in fields.items()}
        own = hand_out(shape.restored(part))
        # A copy: a view would keep the whole batch alive as long as its share is remembered.
        first = {name: value[:1].clone() for name, value in fields.items()}
        taken = _Taken(share, first, shape.first(fields), digest)
        self._forget_dropped()
        self._ahead.append(taken)
        for value in fields_of(own).values():
            self._of_field[value] = taken
            taken.tensors.append(ref(value))
        return own

    def _forget_dropped(self) -> None:
        """Batches that the loop has taken and let go of, all but the last, which it may have made anew."""
        living = [one for one in self._ahead[:-1] if any(tensor() is not None for tensor in one.tensors)]
        self._ahead = [*living, *self._ahead[-1:]]

    def forget(self) -> None:
        """Forget all that was handed out: the run goes on from elsewhere."""
        self._ahead.clear()

    def took_step(self, share: BatchShare) -> None:
        """Forget what was handed out before the batch that a step has trained on."""
        places = [place for place, one in enumerate(self._ahead) if one.share is share]
        del self._ahead[: places[0] + 1 if places else 0]

    def with_spare(self, fields: Mapping[str, Tensor], shape: BatchShape) -> BatchShape:
        """Return the shape of a share, with what stands in where it has no sample."""
        return replace(shape, spare=self._find(fields).shape)

    def find(self, fields: Mapping[str, Tensor]) -> BatchShare:
        """Return the share that the fields are, which the loop may have made anew.

        Raises:
            DataError: they have another number of samples, or it cannot be told which of several batches they are.
        """
        return self._find(fields).share

    def digest(self, fields: Mapping[str, Tensor]) -> str:
        """Return the digest of a batch that all ranks must have alike; empty where that is not known."""
        mesh = self._plan.mesh
        if mesh.data == 1 and mesh.world_size > 1:  # no rank has a share of its own
            return digest_of(fields)
        known = self._known(fields)
        return "" if known is None else known.digest

    def microbatches(self, fields: Mapping[str, Tensor], ids: Tensor) -> list[Batch]:
        """Cut a share, whose samples have the numbers `ids`."""
        taken, whole = self._find(fields), {**fields, "sample_ids": ids}
        microbatches: list[Batch] = []
        for begin, end in taken.share.cuts:
            if begin < end:
                microbatches.append({name: value[begin:end] for name, value in whole.items()})
            else:
                flag = torch.ones(1, dtype=torch.bool)
                microbatches.append({**taken.first, "sample_ids": torch.zeros(1, dtype=torch.int64), FILLER: flag})
        return microbatches

    def _known(self, fields: Mapping[str, Tensor]) -> _Taken | None:
        return next((taken for value in fields.values() if (taken := self._of_field.get(value)) is not None), None)

    def _find(self, fields: Mapping[str, Tensor]) -> _Taken:
        known = self._known(fields)
        if known is None:
            of_size = {one.share.size: one for one in self._ahead}
            if len(of_size) > 1:
                raise DataError(
                    f"batches of {', '.join(map(str, of_size))} samples were taken from state.batches() before this"
                    " step, and its batch is a new object, so that nobody knows which of them it is. Take one batch at"
                    " a time, or give the step the tensors as they came."
                )
            known = next(iter(of_size.values()), _Taken(self.usual, {}))
        share, size = known.share, next(iter(fields.values())).shape[0]
        if size != share.stop - share.start:
            raise DataError(
                f"this rank's share of a step is {share.stop - share.start} of {share.size} samples, and the batch has"
                f" {size}. Take batches from state.batches(), which cuts the loader's global batches into shares."
            )
        return known


def bounds_of(size: int, counts: Sequence[int]) -> list[int]:
    """Return the row at which each rank's share of a batch begins, and the batch's end: in the proportions of `counts`,
    the first ranks' larger."""
    total = sum(counts)
    return [-(-size * sum(counts[:rank]) // total) for rank in range(len(counts) + 1)]


def unequal(size: int, ranks: int, norm: str = "") -> str:
    """Why ranks that gather their samples, or share the statistics of a batch norm, cannot be given a batch."""
    if norm:
        return (
            f"{norm} has no running statistics and takes those of the batch, and a batch of {size} samples cannot be"
            f" shared out equally over {ranks} data ranks. Let batches have a multiple of {ranks} samples"
            " (drop_last=True), or let it track running statistics."
        )
    return (
        f"the loss is of the whole batch, and a batch of {size} samples cannot be shared out equally over {ranks} data"
        f" ranks, which gather their samples for it. Let batches have a multiple of {ranks} samples (drop_last=True)."
    )


def gathers_samples(blueprint: Blueprint, plan: Plan) -> bool:
    """Whether data ranks gather their samples for the loss."""
    return not blueprint.per_sample_loss and plan.mesh.data > 1


def full_share_reason(blueprint: Blueprint) -> str:
    """Why a rank must see its whole share of a batch at once, as the beginning of a sentence; empty: it need not."""
    if norm := blueprint.batch_norm:
        return f"{norm} takes the statistics of the whole batch"
    if not blueprint.per_sample_loss:
        return "the loss is of the whole batch (per_sample = False)"
    return "the loss has terms over the whole batch" if getattr(blueprint.loss, "auxiliary", None) else ""
