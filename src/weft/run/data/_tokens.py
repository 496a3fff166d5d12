"""Token samples: windows of a stream, made into inputs and labels for causal or masked language models.

Packed: documents follow one another; the last token of a document predicts its separator, and the separator predicts
the next document's first token.  Isolated: the same windows, but positions restart at every document, `document_ids`
says which tokens may attend to each other, and no label crosses a border: a separator predicts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data._fields import IGNORED, Fields
from weft.run.data._keyed import keyed, uniform

if TYPE_CHECKING:
    from weft.run.data._corpus import TokenStream

_SHARE_MASKED = 0.8
_SHARE_RANDOM = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTask:
    """The task for which windows of tokens are made into samples."""

    kind: Literal["causal_lm", "masked_lm"]
    sequence_length: int
    vocabulary_size: int
    """Vocabulary of the model: every token must be less."""
    separator: int
    isolated: bool = False
    mask_token: int | None = None
    mask_fraction: float = 0.15
    random_tokens: int = 0
    """Masked tokens are replaced by random ones below this: the tokenizer's vocabulary."""
    seed: int = 0

    @property
    def window(self) -> int:
        """Tokens read per sample: one more than the sequence when the next token is the label."""
        return self.sequence_length + (self.kind == "causal_lm")


class Windows(Protocol):
    """Fixed windows of tokens."""

    @property
    def size(self) -> int: ...

    def read(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens (samples, window) and how many of each row are real."""
        ...


class StreamWindows:
    """Neighbouring windows of a corpus; those of causal models overlap by the token that is a label, then an input.

    Args:
        keep_tail: Whether the last, shorter window is a sample (padded), as validation needs; training leaves it out.
    """

    def __init__(self, stream: TokenStream, task: TokenTask, *, keep_tail: bool) -> None:
        self._stream = stream
        self._task = task
        # The last token of a causal model's stream is a label only, so it begins no sample.
        usable = len(stream) - (task.window - task.sequence_length)
        self.size = -(-usable // task.sequence_length) if keep_tail else usable // task.sequence_length
        if self.size < 1:
            raise DataError(
                f"The corpus has {len(stream)} tokens, but a sample of sequence_length = {task.sequence_length} "
                f"needs {task.window}. Give more text, or set model.sequence_length to at most {max(usable, 1)}."
            )

    def read(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.full((len(index), self._task.window), self._task.separator, np.int64)
        real = np.zeros(len(index), np.int64)
        for row, start in enumerate((index * self._task.sequence_length).tolist()):
            window = self._stream.read(start, start + self._task.window)
            tokens[row, : len(window)] = window
            real[row] = len(window)
        return tokens, real


class SyntheticWindows:
    """Random tokens, each twice in a row so that a model can learn half of them; a pure function of the index."""

    def __init__(self, num_samples: int, window: int, vocabulary_size: int, key: int) -> None:
        self.size = num_samples
        self._key = key
        self._vocabulary_size = np.uint64(vocabulary_size)
        self._pairs = np.arange(window, dtype=np.int64) // 2

    def read(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = (keyed(self._key, index[:, None], self._pairs) % self._vocabulary_size).astype(np.int64)
        return tokens, np.full(len(index), len(self._pairs), np.int64)


class TokenSamples:
    """Windows made into `tokens` and `labels`, with `positions` and `document_ids` when documents are isolated."""

    def __init__(self, windows: Windows, task: TokenTask, name: str) -> None:
        self._windows = windows
        self._task = task
        self._name = name

    @property
    def size(self) -> int:
        return self._windows.size

    @property
    def fields(self) -> Mapping[str, SampleField]:
        names = ["tokens", "labels", *(("positions", "document_ids") if self._task.isolated else ())]
        return {name: SampleField((self._task.sequence_length,), "int64") for name in names}

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        windows, real = self._windows.read(index)
        self._check(windows, index)
        tokens = windows[:, : self._task.sequence_length]
        batch: Fields = {}
        if self._task.isolated:
            batch["positions"], batch["document_ids"] = document_borders(tokens, self._task.separator)
        if self._task.kind == "causal_lm":
            batch["tokens"], batch["labels"] = tokens, self._next_tokens(windows, real)
        else:
            batch["tokens"], batch["labels"] = mask_tokens(tokens, real, ids, self._task)
        return batch

    def _next_tokens(self, windows: NDArray[np.int64], real: NDArray[np.int64]) -> NDArray[np.int64]:
        place = np.arange(1, windows.shape[1])
        # labels[i] is the token behind tokens[i]; what lies behind the real tokens of a window counts for nothing.
        labels = np.where(place < real[:, None], windows[:, 1:], IGNORED)
        if self._task.isolated:
            labels[windows[:, :-1] == self._task.separator] = IGNORED
        return labels

    def _check(self, windows: NDArray[np.int64], index: NDArray[np.int64]) -> None:
        if len(windows) and int(windows.max()) >= self._task.vocabulary_size:
            row, column = (int(indices[0]) for indices in np.nonzero(windows >= self._task.vocabulary_size))
            largest = int(windows.max())
            raise DataError(
                f"Sample {int(index[row])} of {self._name} has token {int(windows[row, column])} at position {column}, "
                f"but the model's vocabulary_size is {self._task.vocabulary_size}. Set vocabulary_size to at least "
                f"{largest + 1}, or prepare the data again with a smaller tokenizer."
            )


def document_borders(tokens: NDArray[np.int64], separator: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return positions and document ids (samples, length), from 0 in each sample; a separator ends its document."""
    starts = np.zeros(tokens.shape, np.bool_)
    # (samples, length): True where a document begins, which is behind each separator.  The first token of a window
    # begins one, too, whatever came before it.
    starts[:, 1:] = tokens[:, :-1] == separator
    place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    return place - first, np.cumsum(starts, axis=1, dtype=np.int64)


def mask_tokens(
    tokens: NDArray[np.int64], real: NDArray[np.int64], ids: NDArray[np.int64], task: TokenTask
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hide a share of the tokens: 80 % become the mask, 10 % a random token, 10 % stay; all of them are labels.

    What is hidden is a pure function of (seed, sample id, position).  Separators and padding are never hidden.

    Source: Devlin et al., "BERT", 2018, section 3.1.
    """
    assert task.mask_token is not None
    place = np.arange(tokens.shape[1], dtype=np.int64)
    # Three numbers of one key family (1, 2, 3) for each token: whether it is hidden, how, and by which random token.
    chosen = uniform(task.seed, 1, ids[:, None], place) < task.mask_fraction
    chosen &= (place < real[:, None]) & (tokens != task.separator)
    fate = uniform(task.seed, 2, ids[:, None], place)
    random = (keyed(task.seed, 3, ids[:, None], place) % np.uint64(task.random_tokens)).astype(np.int64)
    hidden = np.where(chosen & (fate < _SHARE_MASKED), task.mask_token, tokens)
    swapped = chosen & (fate >= _SHARE_MASKED) & (fate < _SHARE_MASKED + _SHARE_RANDOM)
    return np.where(swapped, random, hidden), np.where(chosen, tokens, IGNORED)
