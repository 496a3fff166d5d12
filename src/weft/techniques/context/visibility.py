"""Who sees whom, of the tokens of one rank and those that another shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.kernels import Scoring
from weft.techniques.context.partial import Kept
from weft.techniques.context.token_runs import Runs, Shown
from weft.techniques.core.local_tokens import LocalTokens

_FEWEST_QUERIES = 256
"""The least queries in one call where each sees a window: fewer would be calls of little work."""
_MOST_MASKED = 1 << 24
"""The most entries of a mask that exist at once: 64 MiB in fp32."""


class Pair(NamedTuple):
    """Some of this rank's queries and some of the keys that a source shows, by place."""

    queries: slice
    keys: slice
    causal: bool = False
    """Whether query i sees keys 0 to i."""
    banded: bool = False
    """Whether positions, one by one, say who sees whom."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Who sees whom, of the tokens of one rank and those of any other."""

    tokens: LocalTokens
    view: GroupView
    form: AttentionForm
    together: int = 1
    """Neighbours whose tokens each member of the group has, with some of the heads."""

    @property
    def shown(self) -> Shown:
        """The tokens that each rank shows to the others."""
        return Shown(self.tokens.length, self.view.size, self.form.pattern.window, self.together)

    def pairs(self, source: int) -> Iterator[Pair]:
        """Yield the pairs of queries and keys to compute once the keys of rank `source` are here.

        Keys that no query sees are in no pair.
        """
        for pair in self._apart(source):
            yield from [pair] if self.tokens.documents is None else self._in_chunks(source, pair, self.tokens.documents)

    def _in_chunks(self, source: int, pair: Pair, documents: Tensor) -> Iterator[Pair]:
        """Cut a pair into runs of queries so short that the masks of all samples take little memory."""
        (first, last, _), (start, stop, _) = (
            part.indices(sum(end - begin for begin, end in self._runs(index)))
            for part, index in ((pair.queries, self.view.index), (pair.keys, source))
        )
        step = max(1, _MOST_MASKED // max(1, len(documents) * (stop - start)))
        if last - first <= step:
            yield pair
            return
        for top in range(first, last, step):
            bottom = min(top + step, last)
            seen = start + bottom - first if pair.causal else stop
            yield Pair(slice(top, bottom), slice(start, seen), banded=pair.causal or pair.banded)

    def _apart(self, source: int) -> Iterator[Pair]:
        """Yield the pairs, without regard to documents."""
        # Rank i has run i and run 2c − 1 − i.  So all queries see the head run of an earlier rank and none its tail
        # run, and the tail queries see all of a later rank: half of each block, whichever the pair of ranks.
        every, own = slice(None), source == self.view.index
        if not self.form.pattern.causal:
            yield Pair(every, every)
        elif self.form.pattern.window is not None:
            yield from self._in_window(source, self.form.pattern.window)
        elif own:
            yield Pair(every, every, causal=True)  # runs stand in the order of their positions
        elif source < self.view.index:  # its head stands before all of mine, its tail behind
            (start, stop), _ = self._runs(source)
            if stop > start:
                yield Pair(every, slice(0, stop - start))
        else:
            (start, stop), (first, last) = self._runs(self.view.index)
            if last > first:
                yield Pair(slice(stop - start, None), every)

    def _in_window(self, source: int, window: int) -> Iterator[Pair]:
        for at, queries in _placed(self._runs(self.view.index)):
            for other, keys in _placed(self._runs(source)):
                for (top, bottom), (first, last) in _bands(queries, keys, window):
                    rows = slice(at + top - queries[0], at + bottom - queries[0])
                    columns = slice(other + first - keys[0], other + last - keys[0])
                    is_causal = (first, last) == (top, bottom) and last - first <= window
                    sees_all = last <= top + 1 and bottom - window <= first
                    yield Pair(rows, columns, causal=is_causal, banded=not (is_causal or sees_all))

    def _mask(self, source: int, pair: Pair) -> Tensor | None:
        """Return which keys each query of a pair sees, bool (samples or 1, 1, queries, keys), which makes up for
        `Pair.causal`; None: as the pair says."""
        documents, window = self.tokens.documents, self.form.pattern.window
        if documents is None and not pair.banded:
            return None
        device = torch.device("cpu") if documents is None else documents.device
        mine = self._positions(self.view.index, device)[pair.queries]
        theirs = self._positions(source, device)[pair.keys]
        mask = None if documents is None else documents[:, mine, None] == documents[:, None, theirs]
        if pair.causal or pair.banded:
            behind = mine[:, None] - theirs
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            mask = seen[None] if mask is None else mask & seen
        # (samples or 1, 1, queries, keys): one mask for all heads.
        return None if mask is None else mask[:, None]

    def scoring(self, source: int, pair: Pair, heads: tuple[int, int]) -> Scoring:
        """Return what becomes of the scores of a pair, for [start, stop) of this rank's heads."""
        mod, bias = self.form.mod, None
        if mod.slopes is not None:
            slopes = mod.slopes[slice(*heads)]
            positions = self._positions(source, slopes.device)[pair.keys].to(slopes.dtype)
            bias = (slopes[:, None, None] * positions)[None]  # (1, heads, 1, keys)
        return Scoring(
            scale=self.form.scale,
            causal=pair.causal,
            mask=self._mask(source, pair),
            softcap=mod.softcap,
            bias=bias,
        )

    def kept(self, source: int, pair: Pair, heads: tuple[int, int], query: Tensor) -> Kept | None:
        """Return the dropout factors of a pair for [start, stop) of this rank's heads; None: nothing is dropped.

        `query` (samples, these heads, queries, size) gives dtype and device.
        """
        if (dropped := self.form.dropped) is None:
            return None
        wide = torch.promote_types(query.dtype, torch.float32)
        rows = self._positions(self.view.index, query.device)[pair.queries]
        theirs = LocalTokens(length=self.tokens.length, runs=self._runs(source))
        start, stop, _ = pair.keys.indices(theirs.held)
        keys = theirs.within(start, stop)

        def factors(chunk: slice) -> Tensor:
            return dropped.kept(heads, rows[chunk], keys).to(wide).mul_(dropped.scale)

        return factors

    def _runs(self, index: int) -> Runs:
        """Return the positions of the keys of rank `index` that are on this rank."""
        return self.shown.every(index) if index == self.view.index else self.shown.of(index)

    def _positions(self, index: int, device: torch.device) -> Tensor:
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self._runs(index)])


def _placed(runs: Runs) -> list[tuple[int, tuple[int, int]]]:
    """Return (place of the first token, run) of both runs, laid end to end."""
    (start, stop), _ = runs
    return [(0, runs[0]), (stop - start, runs[1])]


def _bands(
    queries: tuple[int, int], keys: tuple[int, int], window: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield [start, stop) of queries and of the keys that some of them see, so that each sees one of these at least.

    A run of keys that all of a run's queries see comes as a whole; else so few queries at once that most of the
    scores between them and their keys count.
    """
    (start, stop), (first, last) = queries, keys
    is_one = queries == keys and stop - start <= window
    is_seen = last <= start + 1 and stop - window <= first
    # A quarter of the window per call reads 5/4 of a window of keys, of which each query sees four fifths.
    step = max(1, stop - start) if is_one or is_seen else max(_FEWEST_QUERIES, window // 4)
    for top in range(start, stop, step):
        bottom = min(top + step, stop)
        low, high = max(first, top - window + 1), min(last, bottom)
        rows = max(top, low), min(bottom, high - 1 + window)
        if low < high and rows[0] < rows[1]:
            yield rows, (low, high)
