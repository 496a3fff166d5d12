"""What the settings of a recipe are called in a session, which has none: errors of a session speak of its own."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from weft.errors import WeftError

_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"by the recipe, whose permit\.precision = ", "by this session, whose permit = "),
        (r"by the recipe, whose permit\.compression = ", "by this session, whose compression = "),
        (r"by the recipe, whose permit\.local_steps = ", "by this session, whose local_steps = "),
        (r"permit\.local_steps = \d+; of a session, ", ""),
        (r"\bdifferent recipes\b", "different settings"),
        (r"\bhas recipe\b", "has settings"),
        (r"(?:recipe\.)?\bpermit\.precision = (\[[^\]]*\])", r"weft.session(permit=\1)"),
        (r"(?:recipe\.)?\bpermit\.compression = (\[[^\]]*\])", r"weft.session(compression=\1)"),
        (r"(?:recipe\.)?\bpermit\.(\w+)", r"\1 of weft.session"),
        (r"the recipe's global_batch_size( is| =|)\b", r"the loader's batch size\1"),
        (r"(?:recipe\.)?\bbatch\.global_batch_size|\bglobal_batch_size", "the loader's batch size"),
        (r"(?:recipe\.)?\boptimizer\.max_grad_norm", "max_grad_norm of session.prepare"),
        (r"(?:recipe\.)?\brun\.seed", "seed of weft.session"),
        (r"\[model\.split\]|(?:recipe\.)?\bmodel\.split\b", "split= of session.prepare"),
        (r"\[model\.cut\]|(?:recipe\.)?\bmodel\.cut\b", "cut= of session.prepare"),
        (r"\[model\.inputs\]|(?:recipe\.)?\bmodel\.inputs\b", "inputs= of session.prepare"),
        (r"the recipe that (saved|trained) it", r"the session that \1 it"),
        (r"train (?:from|by) a recipe with weft train", "train it by `weft train`"),
        (r"\b(the|this) recipe's\b", r"\1 session's"),
        (r"\b(the|this|a) recipe\b", r"\1 session"),
    )
)
_WEFT_TRAIN = re.compile(r"`weft train[^`]*`|\S*recipe\.toml\S*")
"""What speaks of files and commands stays as it is."""


def of_session(text: str) -> str:
    """Return a message with a session's own names for what it speaks of."""
    kept = _WEFT_TRAIN.findall(text)
    text = _WEFT_TRAIN.sub("\0", text)
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    for each in kept:
        text = text.replace("\0", each, 1)
    return text


@contextmanager
def words_of_session() -> Generator[None]:
    """Let the errors of a call speak of the session."""
    try:
        yield
    except WeftError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (of_session(error.args[0]), *error.args[1:])
        raise
