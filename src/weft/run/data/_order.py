"""The training samples of a run as two plain files, for programs that know nothing of Weft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError
from weft.run.data._corpus import TokenStream, open_corpus
from weft.run.data._prepared import PreparedData
from weft.run.data._sampler import Sampler
from weft.run.data._samples import TokenSpec

_CHUNK_TOKENS = 1 << 22
_CHUNK_SAMPLES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSamples:
    """Sizes of the files that `write_samples` wrote."""

    token_dtype: str
    """`<u2` or `<u4`."""
    num_tokens: int
    num_samples: int


def write_samples(prepared: PreparedData, steps: int, tokens: Path, order: Path) -> PlainSamples:
    """Write the tokens that a run trains on, and where each of its samples begins.

    `tokens` gets the training documents of all corpora one after another, little-endian; of a source of random tokens,
    the windows that the run reads.  `order` is a `.npy` of int64, (steps, global batch): the first token of each
    sample, which is the sequence and one token more.

    Raises:
        DataError: a source is no text for a causal language model, or its documents are isolated.
        OSError: a file cannot be written.
    """
    train, specs = prepared.train, [_checked(spec) for spec in prepared.train.sets]
    streams = [_stream(spec) for spec in specs]
    length = specs[0].task.sequence_length
    sizes = [
        spec.num_samples if stream is None else (len(stream) - 1) // length for spec, stream in _pairs(specs, streams)
    ]
    sampler = Sampler(sizes, seed=train.seed, global_batch_size=train.global_batch_size, weights=train.weights)
    placed = np.lib.format.open_memmap(order, "w+", np.int64, (steps, train.global_batch_size))
    corpora, index = _located(sampler, placed.size)
    dtype = _dtype(specs)
    base = 0
    with tokens.open("wb") as out:
        for corpus, (spec, stream) in enumerate(_pairs(specs, streams)):
            mine = np.flatnonzero(corpora == corpus)
            # A sample of packed text is a window of the stream at index × sequence length; the next window begins with
            # the token that is this one's last label.
            if stream is not None:
                for start in range(0, len(stream), _CHUNK_TOKENS):
                    out.write(stream.read(start, start + _CHUNK_TOKENS).astype(dtype).tobytes())
                placed.reshape(-1)[mine] = base + index[mine] * length
                base += len(stream)
            else:
                used, where = np.unique(index[mine], return_inverse=True)
                out.write(_windows(spec, used).astype(dtype).tobytes())
                placed.reshape(-1)[mine] = base + where * (length + 1)
                base += len(used) * (length + 1)
    placed.flush()
    return PlainSamples(token_dtype=dtype, num_tokens=base, num_samples=placed.size)


def _checked(spec: object) -> TokenSpec:
    if not isinstance(spec, TokenSpec) or spec.task.kind != "causal_lm" or spec.task.isolated:
        raise DataError("Only packed text for causal language models can be written as plain samples.")
    return spec


def _pairs(specs: list[TokenSpec], streams: list[TokenStream | None]) -> list[tuple[TokenSpec, TokenStream | None]]:
    return list(zip(specs, streams, strict=True))


def _stream(spec: TokenSpec) -> TokenStream | None:
    """The training documents of a corpus; None: random tokens."""
    if spec.folder is None:
        return None
    return open_corpus(spec.folder, verify=False).stream(spec.split, spec.validation_fraction)


def _dtype(specs: list[TokenSpec]) -> str:
    return "<u2" if max(spec.task.vocabulary_size for spec in specs) <= 1 << 16 else "<u4"


def _located(sampler: Sampler, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Corpus and index of the first `count` samples of the run."""
    corpora, index = np.empty(count, np.int64), np.empty(count, np.int64)
    for start in range(0, count, _CHUNK_SAMPLES):
        positions = np.arange(start, min(start + _CHUNK_SAMPLES, count), dtype=np.int64)
        corpora[positions], _, index[positions] = sampler.locate(sampler.ids_at(positions))
    return corpora, index


def _windows(spec: TokenSpec, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole windows (samples, sequence length + 1)."""
    batch = spec.open().read(index, index)
    return np.concatenate((batch["tokens"], batch["labels"][:, -1:]), axis=1)
