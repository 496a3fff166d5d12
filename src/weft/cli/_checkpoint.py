"""`weft checkpoint`: ls, show, verify, diff, pin, unpin, prune."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from weft.errors import CheckpointError
from weft.formatting import format_bytes

_MOST_LINES = 20


def ls(run: str, /) -> None:
    """List the checkpoints of a run, the newest first.

    Parameters
    ----------
    run
        Folder of the run, or the URL of its saves in an object store.
    """
    from weft.run.checkpoint.inspect import list_checkpoints

    print(f"{'step':>9}  {'size':>9}  {'ranks':>5}  {'plan':12}  saved")
    for entry in list_checkpoints(_place(run)):
        when = datetime.datetime.fromtimestamp(entry.unix_time_seconds).isoformat(" ", "seconds")
        marks = ", ".join(word for word, is_so in (("newest", entry.is_newest), ("pinned", entry.is_pinned)) if is_so)
        size = format_bytes(entry.num_bytes)
        print(f"{entry.step:>9,}  {size:>9}  {entry.num_ranks:>5}  {entry.plan:12}  {when}  {marks}".rstrip())


def show(checkpoint: str, /) -> None:
    """Show what is in a checkpoint, without its tensors' values.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the folder of a run: then its newest. Or the URL of either in an object store.
    """
    from weft.run.checkpoint.inspect import opened, sizes_by_kind

    with opened(_place(checkpoint)) as (place, stored):
        manifest = stored.manifest
        print(f"checkpoint  {_shown(place)}")
        print(f"step        {manifest.step:,}, by {manifest.world} rank{'s' if manifest.world != 1 else ''}")
        for kind, (count, num_bytes) in sizes_by_kind(stored).items():
            print(f"{'tensors' if kind == 'model' else '':10}  {kind:24} {count:>6,}  {format_bytes(num_bytes):>9}")
        for key, value in manifest.provenance.items():
            print(f"{'from':10}  {key:24} {value}")
        for key, value in manifest.state.items():
            print(f"{'state':10}  {key:24} {str(value):.90}")


def _place(text: str) -> str:
    """What a command is to look at: the store, where the folder of a run says that its saves last in one."""
    from weft.config.recipe import load_recipe
    from weft.errors import WeftError
    from weft.events import RunFolder

    if "://" in text or not Path(text).is_dir() or not (run := RunFolder(Path(text))).recipe.is_file():
        return text
    try:
        checkpoints = load_recipe(run.recipe).run.checkpoints
    except WeftError:  # of another version, say: its checkpoints are there all the same
        return text
    return text if checkpoints is None else run.store_url(checkpoints)


def _shown(place: str) -> str:
    return place if "://" in place else os.path.relpath(place)


def verify(checkpoint: str, /) -> None:
    """Read every byte of a checkpoint, or of all of a run, and compare it with its digest.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the folder of a run. Or the URL of either in an object store.
    """
    from weft.run.checkpoint.inspect import verify as verified

    problems: list[str] = []
    for place, problem in verified(_place(checkpoint)):
        print(f"{'damaged' if problem else 'sound':8}  {_shown(place)}", flush=True)
        if problem:
            problems.append(problem)
    if problems:
        raise CheckpointError("\n".join(problems))


def diff(first: str, second: str, /) -> int:
    """Compare two checkpoints tensor by tensor, whatever plans saved them; status 1 where they differ.

    Parameters
    ----------
    first
        A checkpoint, or the folder of a run: then its newest. Or the URL of either in an object store.
    second
        Another.
    """
    from weft.run.checkpoint.inspect import compare

    found = compare(_place(first), _place(second))
    for difference in found.tensors[:_MOST_LINES]:
        if difference.only_in:
            what = f"only in the {difference.only_in}"
        elif difference.shapes is not None:
            what = f"shape {list(difference.shapes[0])} and {list(difference.shapes[1])}"
        else:
            what = f"relative {difference.relative:.2e}, largest element {difference.largest:.2e}"
        print(f"{difference.name:48} {what}")
    if len(found.tensors) > _MOST_LINES:
        print(f"… and {len(found.tensors) - _MOST_LINES:,} more")
    for key in found.state[:_MOST_LINES]:
        print(f"state {key:42} differs")
    print(f"{found.num_equal:,} tensors are equal bit for bit, {len(found.tensors):,} differ")
    return 1 if found.tensors or found.state else 0


def pin(checkpoint: str, /) -> None:
    """Keep a checkpoint: no save of the run removes it any more.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the folder of a run: then its newest. Or the URL of either in an object store.
    """
    from weft.run.checkpoint.inspect import pin as keep

    print(f"pinned    {_shown(keep(_place(checkpoint)))}")


def unpin(checkpoint: str, /) -> None:
    """Let a pinned checkpoint go with the old ones again.

    Parameters
    ----------
    checkpoint
        A checkpoint, or the folder of a run: then its newest. Or the URL of either in an object store.
    """
    from weft.run.checkpoint.inspect import pin as keep

    print(f"unpinned  {_shown(keep(_place(checkpoint), is_pinned=False))}")


def prune(run: str, /, *, keep: int = 2) -> None:
    """Remove old checkpoints of a run, after the newest was verified. Pinned ones stay.

    Parameters
    ----------
    run
        Folder of the run, or the URL of its saves in an object store.
    keep
        Newest checkpoints to keep.
    """
    from weft.run.checkpoint.inspect import prune as remove

    removed = remove(_place(run), keep)
    for path in removed:
        print(f"removed   {_shown(path)}")
    print(f"{len(removed)} removed")


def import_(
    source: Path,
    folder: Path,
    /,
    *,
    recipe: Path | None = None,
    key: str = "",
    ignore: list[str] | None = None,
    memory_gb: float | None = None,
) -> None:
    """Convert weights that another program saved, in a process that can open no connection and start no program.

    Parameters
    ----------
    source
        A .pt, .pth, .bin or .safetensors file, or a folder of them, or of a distributed checkpoint of torch.
    folder
        New folder. It appears complete or not at all.
    recipe
        Recipe whose model the weights are for: the folder becomes a run to go on with. By default it is a folder of
        safetensors for model.hf.
    key
        Dotted keys below which the weights lie in the source; by default found.
    ignore
        Globs over names of the source that are left out.
    memory_gb
        Memory that reading may take; by default three times the size of the source and 1 GB.
    """
    from weft.api.saving.import_weights import import_weights

    made = import_weights(source, folder, recipe=recipe, key=key, ignore=ignore or (), memory_gb=memory_gb)
    if not made.is_confined:
        print("note      this system could not keep the process that read the file from connections and programs")
    if made.prefix:
        print(f"names     without {made.prefix!r}, which stood before each")
    if made.left_out:
        more = f" and {len(made.left_out) - _MOST_LINES:,} more" if len(made.left_out) > _MOST_LINES else ""
        print(f"left out  {', '.join(made.left_out[:_MOST_LINES])}{more}")
    print(f"imported  {made.num_tensors:,} tensors, {format_bytes(made.num_bytes)}   {made.folder}/")
    if recipe is not None:
        print(f"train     weft train {recipe} --resume {made.folder}")
