"""Every way to split the devices over the axes and the batch over the data ranks, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from weft.planning.search._space import Space

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CandidateTable:
    """Columns with a row per candidate, tables of as many, and what all rows share."""

    def take(self, rows: Ints | Bools) -> Self:
        """Return some of the rows."""
        return replace(self, **{field.name: _rows_of(getattr(self, field.name), rows) for field in fields(self)})


def _rows_of(value: Any, rows: Ints | Bools) -> Any:
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, CandidateTable):
        return value.take(rows)
    if isinstance(value, dict):  # of tuples of columns
        parts: dict[Any, Any] = value
        return {key: type(part)(*(column[rows] for column in part)) for key, part in parts.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits(CandidateTable):
    """Rows of a table: sizes of the axes, and how the batch falls into microbatches."""

    pipeline: Ints
    tensor: Ints
    context: Ints
    expert: Ints
    data: Ints
    size: Ints
    """Samples per microbatch."""
    microbatches: Ints
    """Microbatches per step, of the data rank that has most."""
    uneven: Bools
    """Whether some data ranks have one less."""

    def __len__(self) -> int:
        return len(self.pipeline)

    @property
    def world(self) -> Ints:
        return self.pipeline * self.tensor * self.context * self.data


_NAMES = tuple(field.name for field in fields(Splits))


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedCounts:
    """How many combinations of axis sizes were left out while they were made, and why."""

    devices: int = 0
    """More ranks than devices."""
    batch: int = 0
    """More data ranks or larger microbatches than the batch has samples for."""
    experts: int = 0
    """The expert axis does not divide the ranks that it borrows, or these take unequal shares."""


def enumerate_splits(space: Space, *, devices: int, global_batch_size: int) -> tuple[Splits, DroppedCounts]:
    """Return all splits of at most `devices` devices that keep the global batch exactly."""
    tensor, context, pipeline = _product(space.tensors, space.contexts, space.pipelines)
    most = devices // (tensor * context * pipeline)
    fits = most >= 1
    tensor, context, pipeline, most = (column[fits] for column in (tensor, context, pipeline, most))
    sizes = np.array([size for size in space.microbatch_sizes if global_batch_size % size == 0], dtype=np.int64)
    # Microbatch sizes divide the global batch, so that no sample is left over or padded.
    rows, size = (column.ravel() for column in np.meshgrid(np.arange(len(most)), sizes, indexing="ij"))
    tensor, context, pipeline, most = (column[rows] for column in (tensor, context, pipeline, most))
    total = global_batch_size // size
    row, data = _data_ranks(space, np.minimum(most, total), total, most)
    kept = (data >= 1) & (data <= total[row])
    if space.single_microbatch:
        kept &= data == total[row]
    if space.gathers_samples:
        kept &= (data == 1) | (pipeline[row] == 1)
    if not space.shares_within_stages:
        kept &= (context[row] == 1) | (pipeline[row] == 1)
    kept &= _is_permitted(space, total[row], data, data * (tensor * context * pipeline)[row])
    row, data = row[kept], data[kept]
    splits = Splits(
        pipeline=pipeline[row],
        tensor=tensor[row],
        context=context[row],
        expert=np.ones(len(row), dtype=np.int64),
        data=data,
        size=size[row],
        microbatches=-(-total[row] // data),
        uneven=total[row] % data > 0,
    )
    splits, unborrowed = _with_experts(space, splits)
    return splits, DroppedCounts(devices=int((~fits).sum()), batch=int((~kept).sum()), experts=unborrowed)


def _with_smaller_parts(space: Space, splits: Splits) -> tuple[Splits, Bools]:
    """Add, to rows that share sequences out, those that share samples out instead: more data ranks take as many
    smaller microbatches.  These compute, keep and reduce as much with as many devices, and nothing travels between
    parts of a sequence: also return which rows they dominate.

    Not where the ranks that shard are given: there they would be fewer.
    """
    # Ranks that share a sequence may share out samples instead, as far as the microbatch has any: by the common divisor
    # of both.
    common = np.gcd(splits.context, splits.size)
    context, size, data = splits.context // common, splits.size // common, splits.data * common
    dominated = (common > 1) & np.isin(context, space.contexts) & np.isin(size, space.microbatch_sizes)
    if space.shards is not None:
        dominated[:] = False
    if space.datas is not None:
        dominated &= np.isin(data, space.datas)
    moved = replace(splits, context=context, size=size, data=data).take(dominated)
    columns = [np.concatenate([getattr(splits, name), getattr(moved, name)]) for name in _NAMES]
    # `unique` sorts its columns; the positions of the first occurrences restore the order, which decides ties.
    _, first = np.unique(np.stack(columns), axis=1, return_index=True)
    first = np.sort(first)
    both = Splits(**{name: column[first] for name, column in zip(_NAMES, columns, strict=True)})
    return both, np.append(dominated, np.zeros(len(moved), dtype=np.bool_))[first]


def _borrows_more(space: Space, splits: Splits, expert: Ints) -> Bools:
    """Return which rows have enough ranks to lend to experts, of the context alone under ZeRO-0, where the row that
    dominates them has not."""
    less = splits.context // np.gcd(splits.context, splits.size)
    return (splits.context % expert == 0) & (less % expert != 0) & (0 in space.zeros)


def _is_permitted(space: Space, total: Ints, data: Ints, world: Ints) -> Bools:
    """Return which rows keep the limits on shares and nodes."""
    permitted = np.ones(len(data), dtype=np.bool_)
    if space.even_shares:
        permitted &= total % np.maximum(data, 1) == 0
    if space.node_size is not None:
        permitted &= (world <= space.node_size) | (world % space.node_size == 0)
    return permitted


def _product(*values: tuple[int, ...]) -> list[Ints]:
    grids = np.meshgrid(*(np.array(value, dtype=np.int64) for value in values), indexing="ij")
    return [grid.ravel() for grid in grids]


def _data_ranks(space: Space, most: Ints, total: Ints, room: Ints) -> tuple[Ints, Ints]:
    """Return (row, data ranks) for all choices of data ranks of all rows; invalid ones are left for the caller."""
    rows = np.arange(len(most))
    if space.datas is not None:
        row, data = (column.ravel() for column in np.meshgrid(rows, np.array(space.datas), indexing="ij"))
        return row, np.where(data <= room[row], data, 0)
    choices = [most]
    reduced = most
    while True:
        # Between two numbers of data ranks with the same busiest rank the smaller one takes as long with fewer devices;
        # and equal shares may be needed by other settings. Only these two are candidates below the most.
        busiest = -(-total // np.maximum(reduced, 1))
        choices += [-(-total // busiest), _largest_divisor_up_to(total, reduced)]
        if not space.fewer_devices or int(reduced.max(initial=0)) <= 1:
            break
        reduced = reduced // 2
        choices.append(reduced)
    # A pair (row, data) as one integer, so that `unique` compares numbers instead of rows.
    wide = int(room.max(initial=0)) + 1
    pairs = np.unique(np.tile(rows, len(choices)) * wide + np.concatenate(choices))
    row, data = pairs // wide, pairs % wide
    return row[data >= 1], data[data >= 1]


def _largest_divisor_up_to(total: Ints, limit: Ints) -> Ints:
    """The most data ranks, up to a limit, that get equal shares of the microbatches."""
    divisors = np.ones_like(total)
    for number in np.unique(total):
        # Divisors come in pairs around the square root.
        candidates = np.arange(1, int(number**0.5) + 1)
        small = candidates[number % candidates == 0]
        all_divisors = np.unique(np.concatenate([small, number // small]))
        rows = total == number
        divisors[rows] = all_divisors[np.searchsorted(all_divisors, np.maximum(limit[rows], 1), side="right") - 1]
    return divisors


def _with_experts(space: Space, splits: Splits) -> tuple[Splits, int]:
    """Add the expert axis, which borrows its ranks from data × context; leave out what is dominated."""
    splits, dominated = _with_smaller_parts(space, splits)
    if space.experts == (1,):
        return splits.take(~dominated), 0
    experts = np.array(space.experts, dtype=np.int64)
    row, expert = (column.ravel() for column in np.meshgrid(np.arange(len(splits)), experts, indexing="ij"))
    options = replace(splits.take(row), expert=expert)
    fits = (options.data * options.context % expert == 0) & ~(options.uneven & (expert > 1))
    kept = fits & (~dominated[row] | _borrows_more(space, options, expert))
    return options.take(kept), int((~fits).sum())
