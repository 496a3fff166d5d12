"""A prepared corpus: token shards on disk, memory-mapped, verified, and read as one stream per split.

Layout of its folder: `manifest.json`, `tokenizer.json`, and per shard `shard-00000.tokens` (little-endian uint16 or
uint32, each document followed by the separator) and `shard-00000.documents` (uint64 pairs: tokens with separator, hash
of the text: xxh3).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from weft.config.document import JsonObject, read_plain_file
from weft.errors import DataError
from weft.files import digest_of_file
from weft.run.data._fields import Split
from weft.run.data._keyed import mix
from weft.run.data._tokenizer import digest_tokenizer, load_tokenizer, mask_of, separator_of, span_of

FORMAT = "weft-tokens-1"
MANIFEST = "manifest.json"
_DIGEST = "[0-9a-f]{32}"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The entry of one shard in the manifest."""

    num_tokens: int
    num_documents: int
    largest_token: int
    tokens_digest: str
    documents_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusManifest:
    format: str
    fingerprint: str
    """Digest of the sources' content, the tokenizer and the settings."""
    tokenizer_digest: str
    dtype: Literal["<u2", "<u4"]
    vocabulary_size: int
    separator: int
    mask: int | None
    num_files: int
    text_bytes: int
    notes: tuple[str, ...]
    shards: tuple[ShardRecord, ...]

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=1).encode()


def shard_path(folder: Path, index: int, part: Literal["tokens", "documents", "json"]) -> Path:
    return folder / f"shard-{index:05d}.{part}"


def read_manifest(folder: Path) -> CorpusManifest:
    """Read a folder's manifest.

    Raises:
        DataError: There is none, or it is not one.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder} holds no prepared data (no {MANIFEST}). Run: weft data prepare.")
    advice = f"It is damaged. Delete {folder} and prepare the data again."
    fields = JsonObject.parse(path, read_plain_file(path, DataError, advice), DataError, advice)
    if (version := fields.text("format")) != FORMAT:
        raise DataError(f"{path} has format {version!r:.80}; this Weft reads {FORMAT!r}. Prepare the data again.")
    fields.only([field.name for field in dataclasses.fields(CorpusManifest)])
    vocabulary = fields.count("vocabulary_size", least=1, most=1 << 32)
    dtype = fields.text("dtype", "<u2|<u4", '"<u2" or "<u4"')
    if (dtype == "<u2") != (vocabulary <= 1 << 16):
        raise fields.fail("dtype", f"that of {vocabulary:,} tokens")
    return CorpusManifest(
        format=FORMAT,
        fingerprint=fields.text("fingerprint", _DIGEST, "32 hexadecimal digits"),
        tokenizer_digest=fields.text("tokenizer_digest", _DIGEST, "32 hexadecimal digits"),
        dtype="<u2" if dtype == "<u2" else "<u4",
        vocabulary_size=vocabulary,
        separator=fields.count("separator", most=vocabulary - 1),
        mask=None if fields.values["mask"] is None else fields.count("mask", most=vocabulary - 1),
        num_files=fields.count("num_files"),
        text_bytes=fields.count("text_bytes"),
        notes=tuple(fields.texts("notes")),
        shards=tuple(_shard_record(shard, vocabulary) for shard in fields.objects("shards")),
    )


def _shard_record(fields: JsonObject, vocabulary: int) -> ShardRecord:
    fields.only([field.name for field in dataclasses.fields(ShardRecord)])
    return ShardRecord(
        num_tokens=fields.count("num_tokens", most=1 << 48),
        num_documents=fields.count("num_documents", most=1 << 48),
        largest_token=fields.count("largest_token", most=vocabulary - 1),
        tokens_digest=fields.text("tokens_digest", _DIGEST, "32 hexadecimal digits"),
        documents_digest=fields.text("documents_digest", _DIGEST, "32 hexadecimal digits"),
    )


def check_shard(folder: Path, index: int, shard: ShardRecord, dtype: str, *, digest: bool) -> None:
    """Compare a shard's files with its record: sizes always, digests when asked.

    Raises:
        DataError: A file is missing, cut short, or changed.
    """
    sizes = {"tokens": shard.num_tokens * np.dtype(dtype).itemsize, "documents": shard.num_documents * 16}
    digests = {"tokens": shard.tokens_digest, "documents": shard.documents_digest}
    for part in ("tokens", "documents"):
        path = shard_path(folder, index, part)
        size = path.stat().st_size if path.is_file() else None
        if size != sizes[part]:
            has = "is missing" if size is None else f"has {size:,} bytes"
            raise DataError(
                f"{path} {has}, but the manifest says {sizes[part]:,}: the prepared data were cut short. "
                f"Delete {folder} and prepare the data again."
            )
        if digest and (actual := digest_of_file(path)) != digests[part]:
            raise DataError(
                f"{path} is corrupt: its xxh3 is {actual}, the manifest says {digests[part]}. "
                f"Delete {folder} and prepare the data again; if it happens twice, suspect the disk."
            )


class TokenStream:
    """The documents of one split as one run of tokens, with random access."""

    def __init__(self, tokens: Sequence[NDArray[np.unsignedinteger]], runs: NDArray[np.int64]) -> None:
        """`runs`: int64 (number, 3) of (shard, first token, tokens), in order."""
        self._tokens = tokens
        self._runs = runs
        self._starts = np.concatenate([[0], np.cumsum(runs[:, 2])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens [start, stop) of the stream, fewer at its end, as int64."""
        stop = min(stop, len(self))
        result = np.empty(max(stop - start, 0), np.int64)
        # Documents of a split that are neighbours are joined to runs; a window may cross several, also of different
        # shards.
        run = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            shard, first, length = self._runs[run].tolist()
            inside = at - int(self._starts[run])
            count = min(length - inside, stop - at)
            result[at - start : at - start + count] = self._tokens[shard][first + inside : first + inside + count]
            at += count
            run += 1
        return result


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """Prepared token shards.  Make one with `prepare` or `open_corpus`."""

    folder: Path
    manifest: CorpusManifest

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.manifest.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.manifest.shards)

    @property
    def vocabulary_size(self) -> int:
        """The smallest vocabulary that a model of this corpus may have."""
        return self.manifest.vocabulary_size

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def description(self) -> str:
        """Size in words: `31.5 MB, 1,786 files, 9.1 M tokens`."""
        size = self.manifest.text_bytes
        text = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
        tokens = f"{self.num_tokens / 1e6:,.1f} M" if self.num_tokens >= 1e5 else f"{self.num_tokens:,}"
        files = self.manifest.num_files
        parts = [text, f"{files:,} file{'s' if files != 1 else ''}", f"{tokens} tokens", *self.manifest.notes]
        return ", ".join(parts)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_path)

    def verify(self) -> None:
        """Read every shard and compare it with the manifest.

        Raises:
            DataError: A shard is missing, cut short or changed.
        """
        for index, shard in enumerate(self.manifest.shards):
            check_shard(self.folder, index, shard, self.manifest.dtype, digest=True)

    def stream(self, split: Split = "all", validation_fraction: float = 0.0) -> TokenStream:
        """Map the tokens of one split.

        A document belongs to the validation split when the hash of its text says so; copies of it go the same way, and
        so does the document in any other corpus.  If the fraction picks none, the document with the least hash is it.

        Raises:
            DataError: The split has no documents.
        """
        runs: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.unsignedinteger]] = []
        threshold = 0 if split == "all" else self._threshold(validation_fraction)
        for index, shard in enumerate(self.manifest.shards):
            tokens.append(self._map(index, shard))
            lengths, ranks = self._documents(index)
            keep = (ranks <= np.uint64(threshold)) if split == "validation" else (ranks > np.uint64(threshold))
            runs.append(_runs(index, lengths, np.ones_like(keep) if split == "all" else keep))
        joined = np.concatenate(runs)
        if not len(joined):
            raise DataError(
                f"The {split} split of {self.folder} has no documents: data.validation_fraction = "
                f"{validation_fraction} of {self.num_documents} documents. Name a data.validation source, set "
                f"validation_fraction = 0, or give more documents."
            )
        return TokenStream(tokens, joined)

    def _threshold(self, fraction: float) -> int:
        """Documents whose rank is at most this are validation documents."""
        # Hashes are uniform over 64 bits, so a fraction of their range is that fraction of the documents.
        limit = min(int(fraction * 2.0**64), 2**64 - 1)
        ranks = (self._documents(index)[1] for index in range(len(self.manifest.shards)))
        return max(limit, min(int(some.min()) for some in ranks if len(some)))

    def _documents(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        path = shard_path(self.folder, index, "documents")
        table = np.fromfile(path, "<u8").reshape(-1, 2)
        num_tokens = self.manifest.shards[index].num_tokens
        if (table[:, 0] > num_tokens).any() or int(table[:, 0].sum()) != num_tokens:
            raise DataError(
                f"{path}: its documents do not add up to the {num_tokens:,} tokens of the manifest. It is damaged."
                f" Delete {self.folder} and prepare the data again."
            )
        return table[:, 0].astype(np.int64), mix(table[:, 1].astype(np.uint64))

    def _map(self, index: int, shard: ShardRecord) -> NDArray[np.unsignedinteger]:
        if not shard.num_tokens:  # an empty file cannot be mapped
            return np.empty(0, np.dtype(self.manifest.dtype))
        path = shard_path(self.folder, index, "tokens")
        return np.memmap(path, np.dtype(self.manifest.dtype), "r", shape=(shard.num_tokens,))


def _runs(shard: int, lengths: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Join neighbouring documents that are kept: (shard, first token, tokens) of each run."""
    ends = np.cumsum(lengths)
    edges = np.diff(np.concatenate([[0], keep.astype(np.int8), [0]]))
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    starts = ends[first] - lengths[first]
    return np.stack([np.full(len(first), shard, np.int64), starts, ends[last] - starts], axis=1)


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is a folder of prepared shards."""
    return (Path(path).expanduser() / MANIFEST).is_file() and any(Path(path).expanduser().glob("shard-*.tokens"))


def open_corpus(folder: str | Path, *, verify: bool = True) -> PreparedCorpus:
    """Open prepared shards.  Sizes are always checked; `verify` also reads and digests every byte.

    Raises:
        DataError: The folder holds no prepared data, or they are damaged.
    """
    folder = Path(folder).expanduser()
    corpus = PreparedCorpus(folder, read_manifest(folder))
    for index, shard in enumerate(corpus.manifest.shards):
        check_shard(folder, index, shard, corpus.manifest.dtype, digest=verify)
    if verify:
        _check_tokenizer(corpus)
    return corpus


def _check_tokenizer(corpus: PreparedCorpus) -> None:
    """Compare what the manifest says of the tokenizer with the one beside it."""
    tokenizer, manifest = corpus.tokenizer(), corpus.manifest
    own = (digest_tokenizer(tokenizer), span_of(tokenizer), separator_of(tokenizer), mask_of(tokenizer))
    said = (manifest.tokenizer_digest, manifest.vocabulary_size, manifest.separator, manifest.mask)
    if own != said:
        raise DataError(
            f"{corpus.folder / MANIFEST} says tokenizer_digest, vocabulary_size, separator, mask = {said}, but"
            f" {corpus.tokenizer_path} has {own}. Delete {corpus.folder} and prepare the data again."
        )
