"""Folders of images or of sounds with a folder per class: `cats/1.png`, `dogs/2.jpg`; `yes/1.wav`, `no/2.wav`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from weft.errors import DataError
from weft.run.data._rows import Row

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
SOUND_SUFFIX = ".wav"
_END_BYTES = 4096


class ImageFolder:
    """Images or sounds by class; a class is a folder, and so may be a part of it.  Files are listed, none is opened.

    Rows have `image` or `audio`, a path, and `label`, the name of the class.  Classes and files come in the order of
    their names, whatever the file system says.  Hidden files are left out, and counted; any other file is an error.

    Raises:
        DataError: there are no folders with images, or there is something else; names it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names, self._hidden = _classes(folder)
        self._files: list[str] = []
        starts = [0]
        for name in self._names:
            files = [file for file in _walk(folder / name, name) if not self._is_hidden(file)]
            if not files:
                raise DataError(f"{folder / name}, a folder of a class, has no images or sounds. Fill or remove it.")
            self._files.extend(files)
            starts.append(len(self._files))
        self._starts = np.array(starts)

    @property
    def size(self) -> int:
        return len(self._files)

    @property
    def files(self) -> Sequence[str]:
        """Paths in the folder, class by class."""
        return self._files

    def classes_of(self, column: str, *, declared: bool = False) -> Sequence[str]:
        return self._names if column == "label" else ()

    @property
    def notes(self) -> Sequence[str]:
        return [f"{self._hidden} hidden files left out"] if self._hidden else []

    def row(self, at: int) -> Row:
        name = self._names[int(np.searchsorted(self._starts, at, side="right")) - 1]
        file = self._files[at]
        kind = "audio" if file.lower().endswith(SOUND_SUFFIX) else "image"
        return Row({kind: file, "label": name}, self._folder, str(self._folder / file))

    def _is_hidden(self, file: str) -> bool:
        hidden = os.path.basename(file).startswith(".")
        self._hidden += hidden
        return hidden


def digest_of_images(folder: Path) -> str:
    """Hash of every file's name, size, first and last 4 KiB: whole sets of images are too large to be read for it.

    The end of a compressed image changes with what stands before it.
    """
    digest = xxhash.xxh3_128()
    for file in ImageFolder(folder).files:
        with (folder / file).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file}\0{size}\0".encode(errors="surrogateescape"))
            digest.update(stream.read(_END_BYTES))
            if size > _END_BYTES:
                stream.seek(max(_END_BYTES, size - _END_BYTES))
                digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()


def _classes(folder: Path) -> tuple[list[str], int]:
    """Names of the folders within, and how many hidden files stand beside them."""
    hidden = 0
    names: list[str] = []
    for entry in sorted(_listed(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            hidden += 1
        elif entry.is_dir():
            names.append(entry.name)
        else:
            raise DataError(
                f"{entry.path} stands beside the folders of classes, and belongs to none. Images lie in a folder per"
                f" class, such as {folder}/cats/1.png: move or remove the file."
            )
    if not names:
        raise DataError(
            f"The folder {folder} is empty: there is no folder of images in it. Images lie in a folder per class, such"
            f" as {folder}/cats/1.png; rows of text or numbers in .jsonl or .parquet."
        )
    return names, hidden


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as problem:
        raise DataError(
            f"The folder {folder} cannot be read: {problem.strerror}. Give yourself the right to read it (chmod u+rx)."
        ) from None


def _walk(folder: Path, name: str) -> Iterator[str]:
    """Files within by their names, relative to the folder of all classes.

    Raises:
        DataError: one of them is neither hidden nor an image, or links to a folder, which could go round in circles.
    """
    for entry in sorted(_listed(folder), key=lambda entry: entry.name):
        inner = f"{name}/{entry.name}"
        if entry.name.startswith("."):
            yield inner
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), inner)
        elif entry.is_dir():
            raise DataError(f"{entry.path} links to a folder. Within a class, put the folder itself there.")
        elif entry.name.lower().endswith((*IMAGE_SUFFIXES, SOUND_SUFFIX)):
            yield inner
        else:
            raise DataError(
                f"{entry.path} is no image and no sound, by its name; {', '.join((*IMAGE_SUFFIXES, SOUND_SUFFIX))} are."
                " Convert, move or remove it."
            )
