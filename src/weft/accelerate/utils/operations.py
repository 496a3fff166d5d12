"""Gather and reduce tensors, and nested structures of them, over processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.accelerate._job import SharedJob, job_of
from weft.accelerate.unsupported import name_of
from weft.errors import DataError


def honor_type(obj: Any, generator: Any) -> Any:
    """Make a list, tuple or named tuple like `obj` of what a generator gives."""
    return type(obj)(*list(generator)) if hasattr(obj, "_fields") else type(obj)(generator)


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every tensor of a nested structure of lists, tuples and mappings."""

    def within(part: Any) -> Any:
        how: dict[str, Any] = {"test_type": test_type, "error_on_other_type": error_on_other_type}
        return recursively_apply(func, part, *args, **how, **kwargs)

    if isinstance(data, tuple | list):
        return honor_type(data, (within(item) for item in data))
    if isinstance(data, Mapping):
        made = {name: within(item) for name, item in data.items()}
        return type(data)(made)  # pyright: ignore[reportCallIssue]
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(f"a {type(data).__name__} is no tensor, nor a list, tuple or dictionary of tensors.")
    return data


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move every tensor of a structure."""
    if callable(getattr(tensor, "to", None)):
        return tensor.to(device)
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if isinstance(tensor, Mapping):
        moved = {
            name: item if name in skipped else send_to_device(item, device, non_blocking, skip_keys)
            for name, item in tensor.items()
        }
        return type(tensor)(moved)  # pyright: ignore[reportCallIssue]
    if isinstance(tensor, tuple | list):
        return honor_type(tensor, (send_to_device(item, device, non_blocking, skip_keys) for item in tensor))
    return tensor


def find_batch_size(data: Any) -> int | None:
    """Return the rows of the first tensor of a structure."""
    if isinstance(data, tuple | list | Mapping):
        parts = list(data.values()) if isinstance(data, Mapping) else data
        if not parts:
            raise ValueError(f"nothing is in this {type(data).__name__} that has a batch size.")
        return find_batch_size(parts[0])
    if not isinstance(data, Tensor):
        raise TypeError(f"a {type(data).__name__} has no batch size.")
    return data.shape[0]


def listify(data: Any) -> Any:
    """Return tensors as lists of numbers."""

    def numbers(tensor: Tensor) -> Any:
        return tensor.detach().tolist()

    return recursively_apply(numbers, data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate structures of equal form."""
    first = data[0]
    if isinstance(first, tuple | list):
        return honor_type(first, (concatenate([item[place] for item in data], dim) for place in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({name: concatenate([item[name] for item in data], dim) for name in first})  # pyright: ignore[reportCallIssue]
    if not isinstance(first, Tensor):
        raise TypeError(f"a {type(first).__name__} cannot be concatenated.")
    return torch.cat(data, dim=dim)


def convert_to_fp32(tensor: Any) -> Any:
    """Return half precision tensors of a structure as fp32."""

    def is_half(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    return recursively_apply(Tensor.float, tensor, test_type=is_half)


# ── collectives ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors_of(data: Any) -> list[Tensor]:
    tensors = list[Tensor]()
    recursively_apply(tensors.append, data, error_on_other_type=True)
    return tensors


def _put_back(data: Any, tensors: list[Tensor]) -> Any:
    rest = iter(tensors)

    def taken(_: Tensor) -> Tensor:
        return next(rest)

    return recursively_apply(taken, data)


def gather_in(job: SharedJob, tensor: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """Put together what every process has of tensors; `cut` takes what counts of each."""
    tensors = [cut(leaf.detach()) for leaf in tensors_of(tensor)]
    of_all = job.inside.exchange([tensor.reshape(-1) if tensor.ndim == 0 else tensor for tensor in tensors])
    joined = list[Tensor]()
    for parts in zip(*of_all, strict=True):
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise DataError(
                f"gather got rows of the shapes {sorted(shapes)} on different processes. Pad them before, by"
                " accelerator.pad_across_processes(tensor, dim=1)."
            )
        joined.append(torch.cat(parts))
    return _put_back(tensor, joined)


def own_rows(job: SharedJob) -> Callable[[Tensor], Tensor]:
    """Return this process's rows without a sample that stands in for none."""
    none = job.is_filled_in

    def cut(tensor: Tensor) -> Tensor:
        return (tensor if tensor.ndim else tensor.reshape(-1))[:0] if none else tensor

    return cut


def gather(tensor: Any) -> Any:
    """Return what all processes have, in their order, along dim 0; of numbers, one for each process."""
    job = job_of()
    return tensor if job.is_alone else gather_in(job, tensor, own_rows(job))


def gather_values(object: Any) -> Any:
    """Return what all processes have of lists of numbers and text, one behind the other."""
    job = job_of()
    if job.is_single:
        return object
    return [value for part in job.inside.exchange([] if job.is_filled_in else list(object)) for value in part]


gather_object = gather_values
"""The peer's name for it."""


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return what one process has of tensors."""
    job = job_of()
    if job.is_single:
        return tensor
    return _put_back(tensor, job.inside.exchange(tensors_of(tensor))[from_process])


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Put what one process has of numbers and text into a list."""
    job = job_of()
    if not job.is_single:
        object_list[:] = job.inside.exchange(object_list)[from_process]
    return object_list


def reduce_in(job: SharedJob, tensor: Any, reduction: str, scale: float) -> Any:
    """Return the sum, the mean or the largest over processes of tensors."""
    if reduction not in ("sum", "mean", "max", "none"):
        raise ValueError(f"reduction = {reduction!r} is none of sum, mean, max and none.")
    if job.is_single or reduction == "none":

        def scaled(each: Tensor) -> Tensor:
            return each.clone() if scale == 1.0 else each * scale

        return recursively_apply(scaled, tensor)
    of_all = job.inside.exchange(tensors_of(tensor))
    divisor = len(of_all) if reduction == "mean" else 1
    join = torch.maximum if reduction == "max" else torch.add
    sums = [functools.reduce(join, parts) for parts in zip(*of_all, strict=True)]
    sums = [total / divisor if divisor != 1 else total for total in sums]
    return _put_back(tensor, [total * scale if scale != 1.0 else total for total in sums])


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the mean, or the sum, over processes of tensors."""
    return reduce_in(job_of(), tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False) -> Any:
    """Make tensors as long along a dim as those of the process that has the longest."""
    job = job_of()
    if job.is_alone:
        return tensor
    tensors = tensors_of(tensor)
    sizes = job.inside.exchange([tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0 for tensor in tensors])
    longest = [max(axis) for axis in zip(*sizes, strict=True)]
    return _put_back(
        tensor,
        [_padded(tensor, dim, size, pad_index, pad_first) for tensor, size in zip(tensors, longest, strict=True)],
    )


def _padded(tensor: Tensor, dim: int, size: int, value: Any, first: bool) -> Tensor:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_zeros(shape) + value
    start = size - tensor.shape[dim] if first else 0
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return padded


def __getattr__(name: str) -> Any:
    return name_of(__name__, name)
