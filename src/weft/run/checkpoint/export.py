"""Exports a checkpoint as a folder that `transformers` loads, on one process, without the job that wrote it."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from weft.config.recipe.hf_folder import TOKENIZER_CONFIG
from weft.errors import CheckpointError
from weft.model.blueprint import Blueprint
from weft.run.checkpoint._exported_weights import ExportedWeights as ExportedWeights
from weft.run.checkpoint._exported_weights import LazyWeights as LazyWeights
from weft.run.checkpoint._files import TensorEntry, grouped, sync_folder, write_tensors, write_text
from weft.run.checkpoint._folder import find_checkpoint
from weft.run.checkpoint._read import StoredCheckpoint


def read_tensors(path: Path, prefix: str = "model/") -> Iterator[tuple[str, Tensor]]:
    """Yield (name without prefix, whole tensor) of a verified checkpoint, one tensor at a time.

    Args:
        path: of a checkpoint, or of a run: then its newest checkpoint.
        prefix: `model/`, `average/`, `buffer/` or `optimizer/<state>/`.

    Raises:
        CheckpointError: there is none, or it is damaged; before the first tensor.
    """
    yield from open_checkpoint(path).tensors(prefix)


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Open and verify the checkpoint that `path` means, on one process.  Raises `CheckpointError`."""
    stored = StoredCheckpoint(find_checkpoint(path))
    stored.verify()
    return stored


class StoredWeights(Mapping[str, Tensor]):
    """A checkpoint's parameters and buffers under their plain names, each read when it is asked for."""

    def __init__(self, stored: StoredCheckpoint, *, use_average: bool | None = False) -> None:
        """Look names up only.

        Args:
            use_average: take the moving average of each parameter that has one; None: if the run kept any.

        Raises:
            CheckpointError: an average is asked for and the run kept none.
        """
        if use_average is None:
            use_average = any(name.startswith("average/") for name in stored.runs)
        prefixes = ["buffer/", "model/", "average/"] if use_average else ["buffer/", "model/"]
        self._stored = stored
        self._sources = {
            name.removeprefix(prefix): name for prefix in prefixes for name in stored.runs if name.startswith(prefix)
        }
        if use_average and not any(name.startswith("average/") for name in stored.runs):
            raise CheckpointError(
                f"{stored.folder} has no moving average: the recipe that saved it sets no optimizer.average_decay. "
                "Export the weights themselves."
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.whole(self._sources[name])

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._sources))

    def __len__(self) -> int:
        return len(self._sources)

    def shape(self, name: str) -> torch.Size:
        return self._stored.shape(self._sources[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(self._sources[name])


def export_checkpoint(
    checkpoint: Path,
    blueprint: Blueprint | None,
    folder: Path,
    *,
    use_average: bool | None = False,
    tokenizer: Path | None = None,
    processors: Sequence[Path] = (),
    dtype: torch.dtype | None = None,
    file_bytes: int = 4 << 30,
) -> Path:
    """Write weights, `config.json` and the tokenizer into a new folder; `transformers` loads it.  Call on one process.

    Weights are read one at a time, renamed and joined as the blueprint says; one whose `export` looks into its tensors,
    or writes to them, takes the whole model in memory.

    Args:
        checkpoint: of a checkpoint, or of a run: then its newest one.
        blueprint: of the model; None: nothing is known but the names and shapes that were saved.
        folder: must not exist, or be empty; it appears complete or not at all.
        use_average: export the moving average of the weights; None: where there is one.
        tokenizer: a `tokenizer.json`.
        processors: other files that prepare the model's inputs, copied as they are.
        dtype: of floating-point weights; by default the one they were trained in.
        file_bytes: above it, weights are written to several files with an index.

    Raises:
        CheckpointError: the checkpoint is damaged or not this model's, or the folder is not writable or not empty.
    """
    weights = StoredWeights(open_checkpoint(checkpoint), use_average=use_average)
    if blueprint is not None:
        _check_names(weights, blueprint, checkpoint)
    with new_export(folder) as partial:
        mapped = (
            weights if blueprint is None or blueprint.export is None else ExportedWeights(weights, blueprint.export)
        )
        file = "model.safetensors" if blueprint is None else blueprint.export_files[1]
        write_weights(partial, file, mapped, dtype, file_bytes)
        _write_companions(partial, blueprint, tokenizer, processors, dtype)
    return folder


@contextmanager
def new_export(folder: Path) -> Generator[Path]:
    """Give a folder to write into, which takes the name of the one that is asked for when all is written; else nothing
    is left of it.  Call on one process.

    Raises:
        CheckpointError: the folder is not writable or not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty. Export into a new folder.")
    # Beside the folder, on the same disk, so that it can be renamed: an export that is interrupted leaves no half of
    # one.
    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(8)}")
    try:
        partial.mkdir(parents=True)
        try:
            yield partial
            sync_folder(partial)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error} ({error.filename}).") from None


def _check_names(weights: StoredWeights, blueprint: Blueprint, checkpoint: Path) -> None:
    names = {name for name, _ in blueprint.module.named_parameters()}
    missing = sorted(names - set(weights))
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} of the model's {len(names)} parameters ({', '.join(missing[:3])}). "
            "Export it with the recipe of its run."
        )


def write_weights(
    folder: Path, file: str, weights: LazyWeights, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30
) -> None:
    """Write weights one at a time into a folder, in several files with an index where they are large.  `dtype` is that
    of floating-point weights; by default they keep theirs."""
    entries = [_entry(weights, name, dtype) for name in weights]
    groups = list(grouped(entries, lambda entry: entry.size_bytes, file_bytes)) or [[]]
    names = [file] if len(groups) == 1 else [_shard_name(file, at, len(groups)) for at in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        write_tensors(folder / name, group, {"format": "pt"})
    if len(groups) > 1:
        where = {entry.key: name for name, group in zip(names, groups, strict=True) for entry in group}
        total = sum(entry.size_bytes for group in groups for entry in group)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_text(folder / f"{file}.index.json", json.dumps(index, indent=2))


def _entry(weights: LazyWeights, name: str, float_dtype: torch.dtype | None) -> TensorEntry:
    shape, dtype = weights.shape(name), weights.dtype(name)
    dtype = float_dtype if float_dtype is not None and dtype.is_floating_point else dtype

    def fetch() -> Tensor:
        return weights[name].detach().to(dtype)

    return TensorEntry(name, shape, dtype, fetch)


def _shard_name(file: str, number: int, count: int) -> str:
    return f"{file.removesuffix('.safetensors')}-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_companions(
    folder: Path,
    blueprint: Blueprint | None,
    tokenizer: Path | None,
    processors: Sequence[Path],
    dtype: torch.dtype | None,
) -> None:
    if blueprint is not None and blueprint.export_config is not None:
        config = dict(blueprint.export_config)
        if dtype is not None and "architectures" in config:
            config["dtype"] = str(dtype).removeprefix("torch.")
        write_text(folder / blueprint.export_files[0], json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in processors:
        shutil.copyfile(file, folder / file.name)
    if tokenizer is not None:
        write_text(folder / "tokenizer.json", tokenizer.read_text(encoding="utf-8"))
        if not (folder / TOKENIZER_CONFIG).exists():
            # Without it `AutoTokenizer` goes by the model's type and expects that family's own files.
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
            write_text(folder / TOKENIZER_CONFIG, json.dumps(settings, indent=2) + "\n")
