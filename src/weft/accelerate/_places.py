"""The rank of this process, and work that only some processes do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from weft.accelerate._job import SharedJob
from weft.accelerate._number import ProcessNumber
from weft.accelerate.utils.dataclasses import DistributedType


class Places:
    """Ranks and counts of processes, for Accelerators and states. `num_processes` counts those that see different
    samples: under a plan that splits the model, the ranks that share it are one.

    `num_processes` counts those that see different samples: under a plan that splits the model, the ranks that share
    it are one.
    """

    _job: SharedJob

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._job.session.device

    @property
    def num_processes(self) -> int:
        """Processes that see different samples."""
        ranks = self._job.session.num_data_ranks
        return ranks if ranks == 1 else ProcessNumber.of(ranks, self._weight)

    def _weight(self) -> float:
        batch = self._job.inside.batch
        return 1.0 / self._job.session.num_data_ranks if batch is None else batch.share or 1.0

    @property
    def process_index(self) -> int:
        """This process's place among those that see different samples."""
        return self._job.inside.data_index

    @property
    def local_process_index(self) -> int:
        """This process's place on its machine."""
        return self._job.session.local_rank

    @property
    def distributed_type(self) -> DistributedType:
        """How the job is shared out, in the words that scripts ask for."""
        if "deepspeed" in self._job.plugins:
            return DistributedType.DEEPSPEED
        if self._job.session.world_size == 1:
            return DistributedType.NO
        if "fsdp" in self._job.plugins:
            return DistributedType.FSDP
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._job.session.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._job.session.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._job.session.rank == self._job.session.world_size - 1

    def print(self, *values: Any, **how: Any) -> None:
        """Print on the first rank of each machine."""
        if self.is_local_main_process:
            print(*values, **how)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have come here."""
        if not self._job.session.is_closed:
            self._job.session.wait()

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Let rank 0 go through the block before the others."""
        with self._job.session.first():
            yield

    @contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """Let the first rank of each machine go through the block before its others."""
        with self._job.session.first(per_host=True):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any]:
        """Give this process its part of a list, a tuple, a tensor, a data set or a dictionary of such, first ones the
        larger; with `apply_padding` all parts are made as long as the first, by the last element."""
        yield inputs if self.num_processes == 1 else self._part_of(inputs, apply_padding)

    def _part_of(self, inputs: Any, pads: bool) -> Any:
        if isinstance(inputs, dict):
            sizes = {len(input_) for input_ in inputs.values()}
            if len(sizes) > 1:
                raise ValueError(f"split_between_processes got values of lengths {sorted(sizes)}. Make them equal.")
            return {name: self._part_of(input_, pads) for name, input_ in inputs.items()}
        share, extra = divmod(len(inputs), self.num_processes)
        start = self.process_index * share + min(self.process_index, extra)
        stop = start + share + (self.process_index < extra)
        missing = (share + bool(extra) - (stop - start)) if pads else 0
        if callable(select := getattr(inputs, "select", None)) and not isinstance(inputs, torch.Tensor):
            return select([*range(start, stop), *[len(inputs) - 1] * missing])
        part = inputs[start:stop]
        if isinstance(part, torch.Tensor):
            part = part.to(self.device) if pads else part
            return torch.cat([part, *[inputs[-1:].to(part.device)] * missing]) if missing else part
        return part + type(inputs)([inputs[-1]] * missing) if missing else part

    # ── decorators ────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Let a function do nothing but on rank 0."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Let a function do nothing but on the first rank of each machine."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Let a function do nothing but on the last rank."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Let a function do nothing but on one process."""
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Let a function do nothing but on one rank of each machine."""
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: Callable[..., Any] | None, is_meant: Callable[[], bool]) -> Any:
        if function is None:
            return functools.partial(self._only, is_meant=is_meant)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_meant() else None

        return called
