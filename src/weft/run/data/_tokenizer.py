"""The tokenizer of a corpus: a byte-level BPE trained on a sample of it, or a `tokenizer.json` that the user gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.errors import DataError
from weft.files import write_whole
from weft.run.data._keyed import Permutation
from weft.run.data._sources import SourceFile, cut, read_documents

SEPARATOR = "<|endoftext|>"
MASK = "<|mask|>"
TRAINING_BYTES = 8 << 20
"""Text that a vocabulary is trained on; more hardly changes it."""
_SAMPLE_BYTES = 1 << 18
_SMALLEST_VOCABULARY = 256 + 2
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "<sep>")
_MASKS = (MASK, "[MASK]", "<mask>")


def train_tokenizer(files: Sequence[SourceFile], vocabulary_size: int, path: Path, text_field: str = "text") -> None:
    """Train a byte-level BPE on a fixed pseudo-random sample of at most 8 MiB and write it to `path`.

    The result depends on the files' content and order alone.  A small corpus may give fewer than `vocabulary_size`
    tokens.

    Raises:
        DataError: The vocabulary cannot hold all bytes.
    """
    if vocabulary_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"A byte-level vocabulary of {vocabulary_size} cannot hold 256 bytes and 2 special tokens. "
            f"Set vocabulary_size to at least {_SMALLEST_VOCABULARY}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[SEPARATOR, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(files, text_field), trainer)
    write_whole(path, tokenizer.to_str(pretty=False), durable=True)


def _sample(files: Sequence[SourceFile], text_field: str) -> Iterator[str]:
    pieces = cut(files, _SAMPLE_BYTES)
    taken = 0
    for index in Permutation(len(pieces), len(pieces))(np.arange(len(pieces))).tolist():
        of_piece = 0
        for text in read_documents(pieces[index], text_field):
            yield text
            of_piece += len(text)
            if of_piece > _SAMPLE_BYTES:
                break
        taken += of_piece
        if taken >= TRAINING_BYTES:
            return


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a `tokenizer.json`, or the one in a folder.  Special tokens that occur in text are read as plain text.

    Raises:
        DataError: The file is missing or is no tokenizer.
    """
    path = Path(path).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"The tokenizer {path} does not exist. Give a tokenizer.json, or leave data.tokenizer out to train one."
        )
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer that `tokenizers` can load: {error}. Export it again.") from error
    # Otherwise a document that spells out the separator would forge a document border.
    tokenizer.encode_special_tokens = True
    return tokenizer


def separator_of(tokenizer: Tokenizer) -> int:
    """Return the token that ends a document.

    Raises:
        DataError: The tokenizer has none of the usual ones.
    """
    for name in _SEPARATORS:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise DataError(
        f"The tokenizer has no end-of-text token (none of {', '.join(_SEPARATORS)}), so documents could not be kept "
        f'apart. Add one: tokenizer.add_special_tokens(["{SEPARATOR}"]).'
    )


def mask_of(tokenizer: Tokenizer) -> int | None:
    """Return the mask token of masked-language models, if there is one."""
    token_ids = (tokenizer.token_to_id(name) for name in _MASKS)
    return next((token for token in token_ids if token is not None), None)


def span_of(tokenizer: Tokenizer) -> int:
    """Return one more than the largest token: the smallest vocabulary a model may have."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a digest of everything that the tokenizer does."""
    return xxhash.xxh3_128_hexdigest(tokenizer.to_str(pretty=False).encode())
