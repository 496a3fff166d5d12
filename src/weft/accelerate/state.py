"""Facts of a job that a script may ask for without an Accelerator."""

from __future__ import annotations

from typing import Any, final

from weft.accelerate._job import GradientState as GradientState
from weft.accelerate._job import forget_job, job_of, open_job
from weft.accelerate._places import Places
from weft.accelerate.utils.dataclasses import DistributedType as DistributedType


class PartialState(Places):
    """The processes of the job, which is joined where no Accelerator has done so."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        """`kwargs` of a process group (`backend`, `timeout`) are what a plan says: `compute.backend` and the like."""
        self._job = job_of({"device": "cpu"} if cpu and open_job() is None else None)
        self.debug = self.is_fsdp2 = False
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def initialized(self) -> bool:
        """Whether the job is joined."""
        return not self._job.session.is_closed

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the job."""
        self._job.session.close()

    def __reduce__(self) -> Any:
        """A copy, or a pickle, of a state finds the job of its process again."""
        return type(self), ()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        forget_job()


@final
class AcceleratorState(PartialState):
    """The processes of the job, and what its Accelerator was given."""

    def __getattr__(self, name: str) -> Any:
        if name == "mixed_precision":
            return self._job.mixed_precision
        if name.endswith("_plugin"):
            return self._job.plugins.get(name.removesuffix("_plugin"))
        raise AttributeError(f"an AcceleratorState has no {name!r}")
