"""The engine's sources and their digest, for the build and for the check of what was built.

Imports nothing of Weft: the build loads this file alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "weft_shared_memory.so"
SOURCES = ("api.cpp", "collectives.cpp", "engine.cpp", "kernels.cpp", "mail.cpp", "waiting.cpp")
HEADERS = (
    *("collectives.hpp", "engine.hpp", "kernels.hpp", "kernels_inner.hpp", "mail.hpp", "segment.hpp", "signals.hpp"),
    "waiting.hpp",
)
COMPILE_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=default", "-Wall", "-Wextra", "-pthread")
"""No -march=native (the library may run on another processor than it was built on; the loops choose when they run) and
no -ffast-math (sums must be those of every other backend)."""


def digest() -> str:
    """Sixteen hexadecimal digits that name the sources and the flags."""
    hashed = hashlib.sha256(" ".join(COMPILE_FLAGS).encode())
    for name in (*SOURCES, *HEADERS):
        hashed.update(name.encode() + b"\0" + (FOLDER / name).read_bytes())
    return hashed.hexdigest()[:16]
