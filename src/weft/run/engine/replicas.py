"""Replicas whose weights differ: a bit that memory or a device got wrong, found before a save would keep it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from weft.errors import CollectiveError, ReplicaError
from weft.run.checkpoint import Peers
from weft.techniques.core import CheckpointShard

_COMPARED = "model/"
"""Beginning of the names that are compared.  What is wrong in a state of the optimizer is in the weights a step later;
buffers may hold what a rank has counted of its own samples.
"""
_NUMBERS = 2**62


class ReplicaCheck:
    """Compares the weights of ranks that hold the same ones.  Call `check` on every rank alike."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        """`device` is what this rank computes with.  Other kinds round differently, and are not compared with it."""
        self._peers = peers
        self._hardware = _hardware_of(device)
        self._replicas: list[list[int]] | None = None
        """Ranks that hold the same parts of the same tensors, in groups of two or more; None before the first look."""

    def check(self, step: int, shards: Sequence[CheckpointShard]) -> None:
        """Compare the weights after `step` finished steps, by one number of each rank.

        Raises:
            ReplicaError: this rank's differ from those of most replicas, or none of two can be told to be right.
            CollectiveError: another rank's do, so this one cannot go on.
        """
        if self._peers.world == 1 or self._replicas == []:
            return
        compared = [shard for shard in shards if shard.name.startswith(_COMPARED)]
        if self._replicas is None:
            keys = self._peers.gather(_layout_key(compared, self._hardware))
            ranks: dict[int, list[int]] = defaultdict(list)
            for rank, key in enumerate(keys):
                ranks[key].append(rank)
            self._replicas = [group for group in ranks.values() if len(group) > 1]
            if not self._replicas:
                return
        digests = self._peers.gather(_digest(compared))
        for group in self._replicas:
            self._compare(step, {rank: digests[rank] for rank in group})

    def _compare(self, step: int, digests: Mapping[int, int]) -> None:
        counts = Counter(digests.values()).most_common()
        if len(counts) == 1:
            return
        (first, most), (_, next_most) = counts[:2]
        is_tied = most == next_most
        wrong = list(digests) if is_tied else [rank for rank, digest in digests.items() if digest != first]
        named = f"rank{'s' if len(wrong) > 1 else ''} {' and '.join(map(str, wrong))}"
        if self._peers.rank not in wrong:
            # Whoever reads the ends of the ranks takes this for what another rank's failure has made.
            raise CollectiveError(f"the weights of {named} are wrong, so this one could not go on", status=1)
        if is_tied:
            raise ReplicaError(
                f"after step {step} the weights of {named}, which are replicas, differ. Some memory or device is wrong,"
                f" and {len(digests)} replicas cannot tell whose. With one more, most of them would.",
                status=1,
            )
        raise ReplicaError(
            f"after step {step} its weights differ from those of {most} other replicas, which agree: its memory or its"
            " device is wrong.",
            status=1,
        )


def _layout_key(shards: Sequence[CheckpointShard], hardware: str) -> int:
    """A number that is the same on ranks that hold the same elements on the same hardware."""
    digest = xxhash.xxh3_64(hardware.encode())
    for shard in shards:
        words = (shard.stored_name, tuple(shard.shape), shard.split, shard.start, len(shard.tensor))
        digest.update(repr(words).encode())
    return digest.intdigest() % _NUMBERS


def _digest(shards: Sequence[CheckpointShard]) -> int:
    """A number that changes with any bit of the shards."""
    digest = xxhash.xxh3_64()
    for shard in shards:
        digest.update(_bytes_of(shard.tensor.detach()))
        if shard.let_go is not None:
            shard.let_go()
    return digest.intdigest() % _NUMBERS


def _hardware_of(device: torch.device) -> str:
    """What decides how a device rounds: its name, or the instructions of the processor that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    """The tensor's memory; of one on an accelerator the sum of its bits as whole numbers, which a flipped bit changes
    and which needs no copy."""
    raw = tensor.contiguous().view(torch.uint8)
    if tensor.device.type == "cpu":
        return raw.numpy().data
    size = next(size for size in (4, 2, 1) if raw.numel() % size == 0)
    words = raw.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    return int(words.sum(dtype=torch.int64)).to_bytes(8, "little", signed=True)
