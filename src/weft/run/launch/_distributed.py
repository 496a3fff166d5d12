"""Joins and leaves the default process group of a rank."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from weft.errors import CollectiveError, LaunchError
from weft.run.launch._failure_notice import FailureListener, RankFailure, listening_for_failures
from weft.run.launch._rank_info import RankInfo
from weft.run.launch._rendezvous import rendezvous_store
from weft.run.launch._secondary_errors import is_secondary_error

if TYPE_CHECKING:
    import torch

    from weft.comm.device import BackendKind, DeviceKind


_NOTICE_TIMEOUT_SECONDS = 0.5
"""Time to wait for the launcher's notice after the error that it explains."""


@dataclass(frozen=True, slots=True)
class Distributed:
    """A rank of a living process group: its number, its device, and news of other ranks' failures."""

    rank_info: RankInfo
    device: torch.device
    listener: FailureListener | None = field(default=None, repr=False, compare=False)

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    @property
    def rank_failure(self) -> RankFailure | None:
        """The first other rank that failed, as the launcher says; None while all live, or where nobody would say so.
        This rank's groups are of no use then."""
        return None if self.listener is None else self.listener.failure()


@contextmanager
def initialise_distributed(
    device: DeviceKind = "auto",
    rank_info: RankInfo | None = None,
    *,
    backend: BackendKind = "auto",
    timeout_seconds: float | None = None,
) -> Generator[Distributed]:
    """Join the default process group, and leave it at the end.  Call on every rank.

    Without `rank_info` the rank is the one that torchrun or `weft launch` names in the environment, else the only one
    of a world of one.  A default group that exists already (the user's own) is used as it is and left alone.  `backend`
    carries tensors of the CPU; see the plan's `compute.backend`.  `timeout_seconds` is how long ranks wait for one
    another in the group that is made here; by default as under a plan that does not say
    (`compute.collective_timeout_seconds`).  Until all have come they wait at least as long as that default: ranks start
    further apart than they run.

    Under Weft's launcher this rank hears at once when another has failed: its waits end, in all groups, with an error,
    and what leaves this context because of it is a `CollectiveError` that names the rank which failed.

    Raises:
        CollectiveError: another rank failed.
        LaunchError: the environment names a rank only in part, or the user's own group cannot carry what Weft sends.
        ClusterError: `device` asks for an accelerator that is not there, or `backend` does not carry the device's
            tensors.
    """
    import torch.distributed as dist

    from weft.comm.device import device_for_rank
    from weft.comm.release import release_groups
    from weft.config.plan import COLLECTIVE_TIMEOUT_SECONDS

    if dist.is_initialized():
        rank_info = rank_info or RankInfo.from_environment() or _rank_in_group()
        own_device = device_for_rank(device, rank_info.device_index)
        _check_backends(own_device, backend)
        yield Distributed(rank_info, own_device)
        return
    rank_info = rank_info or RankInfo.from_environment() or RankInfo(0, 1, 0, 1)
    own_device = device_for_rank(device, rank_info.device_index)
    seconds = COLLECTIVE_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    released: set[str] = set()  # groups whose waits have been ended: the listener calls again for groups made later
    pipe = rank_info.failure_pipe if rank_info.world_size > 1 else None
    with listening_for_failures(
        pipe, rank_info.rank, lambda failure: release_groups(failure.rank, released)
    ) as listener:
        try:
            _init_process_group(rank_info, own_device, timedelta(seconds=seconds), backend)
            yield Distributed(rank_info, own_device, listener)
            if dist.is_initialized():
                dist.barrier()  # nobody leaves while another still waits for its last message
        except (CollectiveError, RuntimeError) as error:
            # A peer's death reaches this rank as an error of some transport, and as the launcher's notice; either may
            # come first.  The notice names the rank and its reason, so the transport's error gives way to it.
            better = _error_naming_rank(error, listener)
            if better is None:
                raise
            raise better from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # Gloo keeps threads and sockets until the last reference to a group is gone


def _rank_in_group() -> RankInfo:
    """The rank in a group that the user has made by hand, without a launcher that sets the environment."""
    import torch.distributed as dist

    return RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 1)


def _error_naming_rank(error: Exception, listener: FailureListener | None) -> CollectiveError | None:
    """Return the error that names the failed rank, for an error that only says that some peer is gone; else None."""
    text = str(error).strip()
    if listener is None or not is_secondary_error(text):
        return None
    failure = listener.failure(_NOTICE_TIMEOUT_SECONDS)
    if failure is None:
        return None
    return CollectiveError(f"{failure}, so this one could not go on: {text.splitlines()[0]}", status=1)


def _init_process_group(rank_info: RankInfo, device: torch.device, timeout: timedelta, requested: BackendKind) -> None:
    import torch.distributed as dist

    from weft.comm.device import backend_for, ranks_share_device
    from weft.comm.shared_memory import register_shared_memory_backend
    from weft.config.plan import COLLECTIVE_TIMEOUT_SECONDS

    register_shared_memory_backend(warns_of_hosts=requested == "weft")
    if requested == "auto" and rank_info.world_size == 1:
        requested = "gloo"  # nobody to share memory with
    backend = backend_for(device, shared=ranks_share_device(device, rank_info.local_world_size), wanted=requested)
    # Ranks start further apart than they run: one may still import while another waits here.  So the plan's timeout, if
    # it is shorter, holds only after all have joined.
    join_timeout = max(timeout, timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS))
    store = rendezvous_store(rank_info, join_timeout)
    dist.init_process_group(
        backend, store=store, rank=rank_info.rank, world_size=rank_info.world_size, timeout=join_timeout
    )
    if rank_info.world_size > 1:
        dist.barrier()  # a rank that fails at once must not do so while others still connect to it
    if timeout != join_timeout:
        _set_timeout(timeout)


def _set_timeout(timeout: timedelta) -> None:
    """Let the default group wait so long from now on."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]

    from weft.comm.shared_memory import shared_memory_group

    _set_pg_timeout(timeout)
    shared = shared_memory_group(dist.group.WORLD)
    if shared is not None:
        shared.set_timeout(timeout)


def _check_backends(device: torch.device, requested: BackendKind = "auto") -> None:
    """Refuse a default group that does not carry the device's tensors and the CPU's, which checkpoints agree by, or
    that carries the CPU's in another way than the plan wants."""
    import torch.distributed as dist

    from weft.comm.device import backend_for

    carried = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    missing = [kind for kind in dict.fromkeys(("cpu", device.type)) if kind not in carried]
    if missing:
        raise LaunchError(
            f"the default process group carries tensors of {' and '.join(carried)} only, and Weft also sends tensors"
            f" of {' and '.join(missing)}. Make it by init_process_group({backend_for(device)!r}), or leave it to Weft."
        )
    if requested != "auto" and carried["cpu"] != requested:
        raise LaunchError(
            f'plan.compute.backend = "{requested}", but the default process group exists already and carries tensors of'
            f' the CPU by {carried["cpu"]}. Use backend = "auto", or leave the group to Weft.'
        )
