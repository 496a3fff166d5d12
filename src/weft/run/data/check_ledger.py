"""Replays a ledger of samples and proves that committed history has each sample of an epoch once, in its order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.config.document import typed
from weft.errors import DataError
from weft.run.data._sampler import Sampler
from weft.run.data.ledger import FOLDER, ORDER, SampleOrder, digest_of_ids
from weft.run.data.loader_order import LoaderOrder

_CHUNK_SAMPLES = 1 << 18
"""Samples whose ids are computed at once: 2 MiB of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A data rank's part of one step."""

    data_rank: int
    start: int
    """First position of the order."""
    stop: int
    """Position behind the last."""
    digest: str
    skipped: bool


@dataclass(slots=True)
class LedgerGeneration:
    """The steps of one start of ranks, as their lines say."""

    number: int
    restored_step: int
    """Finished steps from which it went on."""
    num_data_ranks: int
    steps: dict[int, list[StepEntry]] = field(default_factory=dict[int, list[StepEntry]])


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCount:
    """Samples of one epoch of one corpus in committed history."""

    corpus: int
    epoch: int
    num_samples: int
    size: int
    """Samples of the whole epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """A ledger that is whole."""

    order: SampleOrder
    num_steps: int
    """Steps of committed history."""
    num_generations: int
    num_repeated: int
    """Steps that were done again, since a later generation went on from before them."""
    num_skipped: int
    """Steps of committed history whose update was left out."""
    epochs: tuple[EpochCount, ...]

    def lines(self) -> list[str]:
        """The report for a terminal."""
        order, epochs = self.order, self.epochs
        corpora = "1 corpus" if len(order.sizes) == 1 else f"{len(order.sizes)} corpora"
        batch = order.global_batch_size
        lines = [f"order     seed {order.seed}: {sum(order.sizes):,} samples in {corpora}, {batch:,} in a step"]
        again = f"; {self.num_repeated:,} steps were done again and do not count" if self.num_repeated else ""
        skipped = f"; {self.num_skipped:,} were skipped, for they were not finite" if self.num_skipped else ""
        generations = "1 generation" if self.num_generations == 1 else f"{self.num_generations} generations"
        lines.append(f"history   {self.num_steps:,} steps by {generations}{again}{skipped}")
        for corpus in range(len(order.sizes)):
            own = [epoch for epoch in epochs if epoch.corpus == corpus]
            whole = sum(epoch.num_samples == epoch.size for epoch in own)
            of = f" of corpus {corpus}" if len(order.sizes) > 1 else ""
            if whole:
                lines.append(f"epochs    {whole:,} whole{of}: each of {own[0].size:,} samples once")
            for epoch in own:
                if epoch.num_samples != epoch.size:
                    counted = f"{epoch.num_samples:,} of {epoch.size:,} samples, each at most once"
                    lines.append(f"epoch {epoch.epoch:<4}{of.strip() + ': ' if of else ''}{counted}")
        samples = self.num_steps * batch
        lines.append(f"whole     {samples:,} samples in the order of (seed, epoch, index), no gap and no duplicate")
        return lines


def check_ledger(folder: Path, *, seed: int | None = None, global_batch_size: int | None = None) -> LedgerReport:
    """Replay the ledger in a run's folder.  `seed` and `global_batch_size` are those of its recipe; None: a session's.

    A step counts in the generation that did it last, as far as no later one went on from before it.  The last step of
    all may have been cut off by a kill on some data ranks; then it counts for none.

    Raises:
        DataError: there is no ledger, or it is not whole: names the first gap, duplicate or difference, with status 1.
    """
    path = folder / FOLDER / ORDER
    if not path.is_file():
        raise DataError(
            f"{folder} has no ledger. Before the run starts, set ledger = true in [run] of the recipe, or write"
            " weft.session(ledger=True), which needs a data set that is read by index; and give the folder of the run."
        )
    order = typed(SampleOrder, json.loads(path.read_text()))
    if seed is not None and (order.seed, order.global_batch_size) != (seed, global_batch_size):
        raise _broken(
            f"{path} is of seed {order.seed} and batches of {order.global_batch_size}, but the recipe of the run says"
            f" seed {seed} and batches of {global_batch_size}"
        )
    generations = _read_generations(folder / FOLDER)
    history = _committed(generations)
    _check_parts(history, order.global_batch_size)
    epochs = _check_samples(history, order)
    attempts = sum(len(generation.steps) for generation in generations)
    return LedgerReport(
        order=order,
        num_steps=len(history),
        num_generations=len(generations),
        num_repeated=attempts - len(history),
        num_skipped=sum(any(part.skipped for part in parts) for _, parts in history),
        epochs=epochs,
    )


def _broken(text: str) -> DataError:
    return DataError(f"the ledger is not whole: {text}.", status=1)


def _read_generations(folder: Path) -> list[LedgerGeneration]:
    generations: dict[int, LedgerGeneration] = {}
    for path in sorted(folder.glob("data-*.txt")):
        data_rank = int(path.stem.removeprefix("data-"))
        content = path.read_bytes()
        # What follows the last newline is a line that a kill cut off: its step was never part of a save.
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].decode().splitlines(), 1):
            try:
                _take_line(generations, data_rank, line.split())
            except (ValueError, KeyError, IndexError):
                raise _broken(f"{path}, line {number} is damaged: {line[:80]!r}") from None
    return [generations[number] for number in sorted(generations)]


def _take_line(generations: dict[int, LedgerGeneration], data_rank: int, words: Sequence[str]) -> None:
    kind, number = words[0], int(words[1])
    if kind == "begin":
        restored, ranks = int(words[2]), int(words[3])
        generation = generations.setdefault(number, LedgerGeneration(number, restored, ranks))
        if (generation.restored_step, generation.num_data_ranks) != (restored, ranks):
            raise ValueError("data ranks disagree on where the generation began")
        return
    if kind != "step":
        raise ValueError(kind)
    step, start, stop, digest = int(words[2]), int(words[3]), int(words[4]), words[5]
    parts = generations[number].steps.setdefault(step, [])
    entry = StepEntry(data_rank=data_rank, start=start, stop=stop, digest=digest, skipped=words[6:] == ["skipped"])
    parts.append(entry)


def _committed(generations: Sequence[LedgerGeneration]) -> list[tuple[int, list[StepEntry]]]:
    """Return the steps of committed history in their order, with their parts."""
    history: list[tuple[int, list[StepEntry]]] = []
    for generation in generations:
        first = generation.restored_step + 1
        if generation.restored_step > len(history):
            raise _broken(
                f"generation {generation.number} goes on from step {generation.restored_step}, but before it step"
                f" {len(history)} was the last with lines: steps {len(history) + 1} to {first - 1} have none"
            )
        del history[generation.restored_step :]
        for place, step in enumerate(sorted(generation.steps)):
            if step != first + place:
                raise _broken(
                    f"step {first + place} has no line in generation {generation.number}, and step {step} has"
                )
            history.append((step, generation.steps[step]))
        # A step that a kill cut off has lines of some data ranks only.  Where it is the last it is no part of history;
        # a generation that goes on from behind it would find it missing above.
        if history and generation.steps and len(history[-1][1]) < generation.num_data_ranks:
            history.pop()
    return history


def _check_parts(history: Sequence[tuple[int, list[StepEntry]]], batch: int) -> None:
    """Check that the parts of every step are its global batch, each position once."""
    for step, parts in history:
        reached = (step - 1) * batch
        for part in sorted(parts, key=lambda part: (part.start, part.stop)):
            if part.start > reached:
                raise _broken(f"step {step} lacks positions {reached} to {part.start - 1} of the order (a gap)")
            if part.start < reached:
                last = min(part.stop, reached) - 1
                raise _broken(
                    f"step {step} has positions {part.start} to {last} of the order twice (a duplicate); the second"
                    f" time on data rank {part.data_rank}"
                )
            reached = part.stop
        if reached < step * batch:
            raise _broken(f"step {step} lacks positions {reached} to {step * batch - 1} of the order (a gap)")
        if reached > step * batch:
            raise _broken(f"step {step} has position {step * batch} of the order, which is of step {step + 1}")


def _check_samples(history: Sequence[tuple[int, list[StepEntry]]], order: SampleOrder) -> tuple[EpochCount, ...]:
    """Compare the ids of every part with the order, and count every sample of every epoch."""
    sampler, batch = order.sampler(), order.global_batch_size
    counts = _EpochCounter(sampler, order.pass_sizes)
    for steps in _chunks(history, max(1, _CHUNK_SAMPLES // batch)):
        first = (steps[0][0] - 1) * batch
        ids = sampler.ids_at(np.arange(first, first + len(steps) * batch, dtype=np.int64))
        for step, parts in steps:
            for part in parts:
                if digest_of_ids(ids[part.start - first : part.stop - first]) != part.digest:
                    raise _broken(
                        f"step {step} had other samples on data rank {part.data_rank} than positions {part.start} to"
                        f" {part.stop - 1} of the order"
                    )
        counts.add(ids, first)
    return counts.epochs()


def _chunks(
    history: Sequence[tuple[int, list[StepEntry]]], length: int
) -> Iterator[Sequence[tuple[int, list[StepEntry]]]]:
    for at in range(0, len(history), length):
        yield history[at : at + length]


class _EpochCounter:
    """Counts the uses of each sample in the epochs that are not through yet: a byte for each of their samples."""

    def __init__(self, sampler: Sampler | LoaderOrder, pass_sizes: Sequence[int]) -> None:
        self._sampler, self._pass_sizes = sampler, pass_sizes
        self._open: dict[tuple[int, int], NDArray[np.bool_]] = {}
        self._used: dict[tuple[int, int], int] = {}

    def add(self, ids: NDArray[np.int64], first: int) -> None:
        corpora, epochs, index = self._sampler.locate(ids)
        for corpus, epoch in sorted(set(zip(corpora.tolist(), epochs.tolist(), strict=True))):
            here = np.flatnonzero((corpora == corpus) & (epochs == epoch))
            key, size = (corpus, epoch), self._sampler.sizes[corpus]
            if key not in self._used:
                self._used[key], self._open[key] = 0, np.zeros(size, np.bool_)
            used = self._open.get(key)
            mine = index[here]
            again = np.ones(len(mine), np.bool_)
            if used is not None:
                _, firsts = np.unique(mine, return_index=True)
                again[firsts] = used[mine[firsts]]
                used[mine] = True
            if again.any():
                at = int(np.flatnonzero(again)[0])
                raise _broken(
                    f"sample {int(mine[at])} of epoch {epoch} comes twice (a duplicate), the second time at position"
                    f" {first + int(here[at])} of the order"
                )
            self._used[key] += len(mine)
            if self._used[key] == self._pass_sizes[corpus]:
                self._open.pop(key, None)  # each sample once: nothing is left to know

    def epochs(self) -> tuple[EpochCount, ...]:
        return tuple(
            EpochCount(corpus=corpus, epoch=epoch, num_samples=count, size=self._pass_sizes[corpus])
            for (corpus, epoch), count in sorted(self._used.items())
        )
