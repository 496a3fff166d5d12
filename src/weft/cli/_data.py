"""`weft data prepare` and `weft data ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.errors import DataError


def prepare(
    sources: tuple[str, ...] = ("stdlib",),
    /,
    *,
    vocabulary_size: int = 8192,
    tokenizer: Path | None = None,
    folder: Path | None = None,
    cache: Path | None = None,
    text_field: str = "text",
    workers: Annotated[int | None, Parameter(show_default=False)] = None,
) -> None:
    """Turn text into memory-mapped token shards. Stopped halfway, it goes on where it was.

    Parameters
    ----------
    sources
        `stdlib` (the running Python's own source), text, .jsonl and .parquet files and folders of them, or what
        `datasets` saved to disk.
    vocabulary_size
        Tokens of the byte-level BPE to train; with --tokenizer, the most it may have.
    tokenizer
        A tokenizer.json to use instead of training one.
    folder
        Where to write; by default a folder of its own in the cache.
    cache
        By default ~/.cache/weft.
    text_field
        Field or column that holds the text, where there are fields.
    workers
        Processes that tokenize; by default one per core.
    """
    from weft.run.data.preparation import ConsoleProgress
    from weft.run.data.preparation import prepare as run

    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers} is too few. Use 1 or more, or leave it out.")
    corpus = run(
        sources,
        vocabulary_size=vocabulary_size,
        tokenizer=tokenizer,
        folder=folder,
        cache=cache,
        text_field=text_field,
        workers=workers,
        progress=ConsoleProgress(),
    )
    print(f"{corpus.manifest.num_files:,} files, {corpus.num_tokens:,} tokens in {corpus.folder}")


def ledger(run: Path, /) -> None:
    """Prove that a run has used each sample of an epoch once, in its order, whatever failed and was done again.

    Parameters
    ----------
    run
        Folder of a run whose recipe has `ledger = true` in `[run]`, or of a `weft.session(ledger=True)`. The first gap
        or duplicate is named, with status 1.
    """
    from weft.config.recipe import load_recipe
    from weft.events import RunFolder
    from weft.run.data.check_ledger import check_ledger

    folder = RunFolder.open(run)
    of_recipe = {}
    if folder.recipe.is_file():  # a session has none
        recipe = load_recipe(folder.recipe)
        of_recipe = {"seed": recipe.run.seed, "global_batch_size": recipe.batch.global_batch_size}
    report = check_ledger(folder.path, **of_recipe)
    print("\n".join(report.lines()))
