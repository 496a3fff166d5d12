"""Names that scripts import beside the Accelerator."""

from __future__ import annotations

from typing import Any

from weft.accelerate.unsupported import name_of
from weft.accelerate.utils.constants import *  # noqa: F403
from weft.accelerate.utils.dataclasses import *  # noqa: F403
from weft.accelerate.utils.fsdp_utils import *  # noqa: F403
from weft.accelerate.utils.memory import *  # noqa: F403
from weft.accelerate.utils.operations import *  # noqa: F403
from weft.accelerate.utils.other import *  # noqa: F403
from weft.accelerate.utils.random import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return name_of(__name__, name)
