"""Everything that differs between devices, and between the minor versions of torch that Weft supports (2.11 to 2.13).

Nobody else asks which device this is, names CUDA, or looks for a function that one torch has and another lacks.
Accelerators are spoken to through `torch.accelerator`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.shared_memory import BACKEND, shared_memory_group
from weft.comm.watched_group import WatchedGroup
from weft.errors import ClusterError

DeviceKind = Literal["auto", "cpu", "cuda"]
BackendKind = Literal["auto", "gloo", "weft"]


def device_for_rank(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return the device of a rank and make it the current one.  Ranks beyond the last device share them in turn.

    Raises:
        ClusterError: an accelerator is asked for and there is none of that kind.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if kind == "cpu" or (kind == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or (kind != "auto" and accelerator.type != kind):
        there = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise ClusterError(
            f'plan.compute.device = "{kind}", but this machine has {there} that torch {torch.__version__} can use. '
            f'Use device = "auto" or "cpu".'
        )
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def ranks_share_device(device: torch.device, local_world: int) -> bool:
    """Whether several of this host's ranks work on one accelerator."""
    return device.type != "cpu" and local_world > torch.accelerator.device_count()


def backend_for(device: torch.device, *, shared: bool = False, wanted: BackendKind = "auto") -> str:
    """Return the `init_process_group` backend: Weft's shared memory or Gloo on the CPU, NCCL and Gloo on CUDA.

    NCCL refuses two ranks on one GPU, so with `shared` (see `ranks_share_device`) Gloo carries CUDA tensors, too; its
    one name stands for both (in pairs, `cpu:gloo,cuda:gloo`, torch may warn of a group without a default backend).

    `wanted` is the plan's `backend`, which speaks of tensors on the CPU; `auto` is shared memory where ranks compute
    there.  Before a group of `weft` is made, `register_shared_memory_backend` must have been called.

    Raises:
        ClusterError: shared memory is wanted where tensors are on an accelerator.
    """
    if wanted == "weft" and device.type != "cpu":
        raise ClusterError(
            f'plan.compute.backend = "weft", but the ranks compute on {device.type}, whose tensors are not in the'
            f' memory that processes share. Use backend = "auto", or device = "cpu".'
        )
    if device.type == "cpu" and wanted != "gloo":
        return f"cpu:{BACKEND}"
    if device.type == "cpu" or shared:
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def runs_on_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether Gloo is what carries this device's tensors in the group.

    Ask with the device: the name of a group of two backends (`get_backend`) names both.  Gloo also carries a group of
    `weft` whose ranks turned out to share no memory.
    """
    if device.type == "cpu" and isinstance(group, WatchedGroup):
        return shared_memory_group(group) is None
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def sends_messages(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether Gloo can send messages between this device's tensors: it carries the group, or lies beside the shared
    memory that does (`messages_group`)."""
    return device.type == "cpu" and (isinstance(group, WatchedGroup) or runs_on_gloo(device, group))


def backend_of(group: dist.ProcessGroup) -> Literal["gloo", "weft"]:
    """What carries collectives of CPU tensors in a group: `weft`, memory that its ranks share, or `gloo`."""
    return "gloo" if shared_memory_group(group) is None else "weft"


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done (nothing to wait for on the CPU)."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_bytes(device: torch.device) -> int:
    """Memory this rank holds now: of tensors on an accelerator, of the resident process on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc (macOS): the peak stands for it
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def free_memory_bytes(device: torch.device) -> int:
    """Memory that this process may still take: of an accelerator, of the machine on the CPU (without /proc, no end)."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return sys.maxsize


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank ever held (on the CPU of the whole process, so it includes the interpreter and torch)."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return max(peak * 1024, memory_bytes(device))  # the kernel updates the peak late


def forget_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_bytes` count from now on: what was freed goes back to the system first."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library, or a kernel that keeps it to itself
            ctypes.CDLL(None).malloc_trim(0)
            # 5 resets the peak (proc(5), /proc/pid/clear_refs).
            Path("/proc/self/clear_refs").write_text("5")


def all_gather_single(
    output: Tensor, shard: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Concatenate every rank's equally long `shard` into `output`.  Call on every rank of the group.

    torch 2.13 renamed `all_gather_into_tensor`; the old name warns there, the new one is missing in 2.11.
    """
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor,
    whole: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce `whole` over the group and keep this rank's equal part in `output`.  Call on every rank of the group.

    torch 2.13 renamed `reduce_scatter_tensor`; the old name warns there, the new one is missing in 2.11.
    """
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(output, whole, op=op, group=group, async_op=async_op)


def group_store() -> dist.Store:
    """Return the store at which the default group met.  torch reaches it by a private name only (2.11 to 2.13)."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


_MEMORIES_OF_MESHES = (
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
"""What a loop's own arithmetic on weights that ZeRO-3 cuts fills, and how it is emptied."""


def forget_meshes() -> None:
    """Let go of the process groups of past runs.  Call it in the thread that trained, before groups are destroyed.

    DTensor remembers for each operation how its operands lay, and so keeps their mesh, its groups and their sockets
    alive as long as the process (seen with torch 2.13; there is one memory per thread, reached by a private name only).
    torch 2.11 has further memories, in closures that nobody reaches: there the groups of a ZeRO-3 run end with the
    process.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # pyright: ignore[reportPrivateUsage]
    if clear is not None:
        clear()
    for module, path in _MEMORIES_OF_MESHES:
        cache: Any = sys.modules.get(f"torch.distributed.tensor.{module}")  # a memory that nobody loaded is empty
        for name in path.split("."):
            cache = getattr(cache, name, None)
        if cache is not None:
            cache()
