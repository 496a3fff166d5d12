"""Small things that scripts import."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.accelerate._job import job_of
from weft.accelerate.unsupported import name_of
from weft.errors import RecipeError

_UNITS: Mapping[str, int] = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model, which was never wrapped."""
    return model


def wait_for_everyone() -> None:
    """Wait until all ranks have come here."""
    if not (job := job_of()).session.is_closed:
        job.session.wait()


def write_tensors(obj: Any, file: Any) -> None:
    """Write tensors by name as safetensors.

    Raises:
        RecipeError: it is no dictionary of tensors.
    """
    from safetensors.torch import save_file

    tensors = dict(obj) if isinstance(obj, Mapping) else {}
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise RecipeError(
            f"accelerator.save() was given a {type(obj).__name__} that is no dictionary of tensors, and writes no"
            " pickles. Write it as JSON on accelerator.is_main_process, or all of it by accelerator.save_state(folder)."
        )
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():  # safetensors takes no two names of one storage
        is_shared = any(
            tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in own.values()
        )
        own[str(name)] = tensor.detach().cpu().contiguous().clone() if is_shared else tensor.detach().cpu().contiguous()
    save_file(own, str(file), metadata={"format": "pt"})


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write tensors by name, on rank 0, as safetensors."""
    session = job_of().session
    if session.rank == 0 or (save_on_each_node and session.local_rank == 0):
        write_tensors(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> dict[str, Tensor]:
    """Read what `save` has written."""
    from safetensors.torch import load_file

    return load_file(str(f), device="cpu" if map_location is None else str(map_location))


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size such as `10GB` in bytes."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", size.upper())
    if match is None:
        raise ValueError(f"{size!r} is no size. Write a number of bytes, or one such as 10GB or 512MiB.")
    return int(float(match[1]) * _UNITS[match[2]])


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Generator[None]:
    """Set variables of the environment, in capitals, for a while."""
    before = {name.upper(): os.environ.get(name.upper()) for name in kwargs}
    os.environ.update({name.upper(): str(value) for name, value in kwargs.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has made it."""
    return isinstance(module, torch._dynamo.OptimizedModule)  # pyright: ignore[reportPrivateUsage]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar, on rank 0 alone if not said otherwise."""
    from tqdm.auto import tqdm as bar

    hides = main_process_only and job_of().session.rank != 0
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or hides})


def check_version(library: str, operation: str, version: str) -> bool:
    """Whether a library's version is what is asked for."""
    import importlib.metadata
    import operator

    own = _numbers_of(importlib.metadata.version(library))
    compare = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt}
    return {**compare, ">=": operator.ge}[operation](own, _numbers_of(version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version is what is asked for."""
    return check_version("torch", operation, version)


def _numbers_of(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*numbers, *[0] * (3 - len(numbers)))


def __getattr__(name: str) -> Any:
    return name_of(__name__, name)
