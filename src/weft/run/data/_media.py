"""Files beside the data: arrays, waves and images."""

from __future__ import annotations

import importlib
import io
import wave
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from weft.model.families import SampleField
from weft.run.data._rows import Row


def load(row: Row, value: str | bytes, field: SampleField) -> NDArray[Any]:
    """Return what a file beside the data, or its bytes, hold, as the model takes it.

    Raises:
        ValueError: it is no such file, or of another form than the model takes.
    """
    suffix = Path(value).suffix.lower() if isinstance(value, str) else ""
    if suffix == ".npy":
        return np.load(row.file(str(value)), allow_pickle=False)
    if suffix == ".wav" or (isinstance(value, bytes) and len(field.shape) == 1):
        return _filled_wave(*read_wave(opened(row, value)), field)
    if len(field.shape) != 3:
        raise ValueError("only .npy, .wav and images are read")
    return _pixels(read_image(opened(row, value), field.shape[0]), field)


def opened(row: Row, value: str | bytes) -> IO[bytes] | Path:
    """A file beside the data, or what its bytes are."""
    return io.BytesIO(value) if isinstance(value, bytes) else row.file(value)


def read_wave(source: IO[bytes] | Path) -> tuple[NDArray[np.float32], int]:
    """Return a wave in [−1, 1), and its values per second.

    Raises:
        ValueError: it is no WAV of one channel and 16 bits.
    """
    try:
        with wave.open(str(source) if isinstance(source, Path) else source) as file:
            if file.getsampwidth() != 2:
                raise ValueError(f"{8 * file.getsampwidth()} bits a sample; 16 are read")
            if file.getnchannels() != 1:
                raise ValueError(f"{file.getnchannels()} channels; one is read. Mix them into one")
            count, rate = file.getnframes(), file.getframerate()
            samples = np.frombuffer(file.readframes(count), "<i2")
    except (wave.Error, EOFError) as problem:
        raise ValueError(f"it is no WAV that can be read: {problem or 'it ends too early'}") from None
    if len(samples) != count:
        raise ValueError(f"it is cut short: {len(samples):,} of {count:,} values are there")
    return samples.astype(np.float32) / np.float32(32768), rate


def _filled_wave(samples: NDArray[np.float32], rate: int, field: SampleField) -> NDArray[np.float32]:
    """Return a sound, filled up with silence to the length that the model takes."""
    if len(field.shape) != 1:
        raise ValueError(
            "the model takes spectrograms, and its folder has no feature extractor (preprocessor_config.json) that"
            " makes them; give them as .npy"
        )
    if len(samples) > field.shape[0]:
        raise ValueError(f"{len(samples):,} values of sound, more than it takes. Cut it into pieces")
    whole = np.zeros(field.shape, np.float32)
    whole[: len(samples)] = samples
    return whole


def read_image(source: IO[bytes] | Path, channels: int) -> Any:
    """Return an image of Pillow in grey (one channel) or red, green, blue, decoded whole.

    Raises:
        ValueError: Pillow is not installed, or this is no image of one frame and 8 bits.
    """
    try:
        images: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError:
        raise ValueError("reading images needs Pillow: pip install 'weft[images]'") from None
    try:
        with images.open(source) as image:
            frames, mode = getattr(image, "n_frames", 1), image.mode
            decoded = image.convert("L" if channels == 1 else "RGB")
    except OSError as problem:
        raise ValueError(f"it is no image that can be read: {problem}") from None
    except (SyntaxError, EOFError, images.DecompressionBombError) as problem:  # what Pillow says of broken files
        raise ValueError(f"it is no image that can be read: {problem}") from None
    if frames != 1:
        raise ValueError(f"it has {frames} frames; one is read")
    if mode.startswith(("I", "F")):
        raise ValueError("its pixels have more than 8 bits, which would be cut off; convert it to 8 bits")
    return decoded


def _pixels(image: Any, field: SampleField) -> NDArray[np.float32]:
    """Pixels in [0, 1] of (channels, height, width)."""
    channels, height, width = field.shape
    pixels = np.asarray(image.resize((width, height)), np.float32) / np.float32(255)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
