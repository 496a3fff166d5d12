"""Weft by the names of Hugging Face's Accelerate: `from weft.accelerate import Accelerator` is the one changed line."""

from __future__ import annotations

from typing import Any

from weft.accelerate._job import opening as opening
from weft.accelerate.accelerator import Accelerator as Accelerator
from weft.accelerate.data_loader import skip_first_batches as skip_first_batches
from weft.accelerate.launchers import debug_launcher as debug_launcher
from weft.accelerate.launchers import notebook_launcher as notebook_launcher
from weft.accelerate.local_sgd import LocalSGD as LocalSGD
from weft.accelerate.state import PartialState as PartialState
from weft.accelerate.unsupported import name_of
from weft.accelerate.utils.dataclasses import AutocastKwargs as AutocastKwargs
from weft.accelerate.utils.dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
from weft.accelerate.utils.dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
from weft.accelerate.utils.dataclasses import DeepSpeedPlugin as DeepSpeedPlugin
from weft.accelerate.utils.dataclasses import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from weft.accelerate.utils.dataclasses import DistributedType as DistributedType
from weft.accelerate.utils.dataclasses import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from weft.accelerate.utils.dataclasses import GradScalerKwargs as GradScalerKwargs
from weft.accelerate.utils.dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
from weft.accelerate.utils.dataclasses import ParallelismConfig as ParallelismConfig
from weft.accelerate.utils.dataclasses import ProfileKwargs as ProfileKwargs
from weft.accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
from weft.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states

__version__ = "1.15.0"
"""The peer's version whose names these are: libraries ask for it."""


def __getattr__(name: str) -> Any:
    return name_of(__name__, name)
