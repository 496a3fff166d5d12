"""The number of threads that the environment gives to a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

_THREADS = "OMP_NUM_THREADS"
_OWN = "WEFT_OWN_THREADS"
"""The number that a launcher of Weft's has put into `OMP_NUM_THREADS`, where the user's environment had none."""


def threads_of_user(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the threads that the user's `OMP_NUM_THREADS` asks for; None where nobody set it but a launcher.

    torchrun sets it to 1 where it is not set, and does not say so: its 1 is taken for nobody's wish.
    """
    number = environment.get(_THREADS, "").partition(",")[0].strip()
    from_launcher = environment.get(_OWN) == number or (number == "1" and "TORCHELASTIC_RUN_ID" in environment)
    return int(number) if number.isdecimal() and int(number) > 0 and not from_launcher else None


def set_threads_of_job(threads: int) -> None:
    """Put a job's number of threads into this process's environment, for data workers and other children."""
    os.environ[_THREADS] = os.environ[_OWN] = str(threads)
