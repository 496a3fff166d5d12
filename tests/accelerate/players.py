"""Scripts in the way of Accelerate's public examples, played with the peer and, by the import alone, with Weft."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

SCRIPTS = Path(__file__).parent / "scripts"
PEER = re.compile(r"^(\s*)(from|import) accelerate\b", re.MULTILINE)


def play(name: str, with_peer: bool, settings: Mapping[str, Any]) -> list[str]:
    """Run a script in a folder of its own, which ranks share, and return what it prints."""
    text = (SCRIPTS / f"{name}.py").read_text()
    if not with_peer:
        text = PEER.sub(r"\1\2 weft.accelerate", text)
    said, before = io.StringIO(), Path.cwd()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with contextlib.ExitStack() as stack:
        folder = settings.get("folder") or stack.enter_context(tempfile.TemporaryDirectory())
        os.chdir(folder)
        stack.callback(os.chdir, before)
        stack.callback(_forget, with_peer)
        stack.enter_context(contextlib.redirect_stdout(said))
        if not with_peer:
            from weft.accelerate import opening

            more = {key: value for key, value in settings.items() if key != "folder"}
            stack.enter_context(opening(**{"record": False, "quiet": True, **more}))
        space = {"__name__": "__main__", "__file__": str(SCRIPTS / f"{name}.py")}
        exec(compile(text, str(SCRIPTS / f"{name}.py"), "exec"), space)
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return said.getvalue().splitlines()


def _forget(with_peer: bool) -> None:
    if with_peer:
        from accelerate.state import AcceleratorState, GradientState

        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    else:
        from weft.accelerate.state import AcceleratorState

        AcceleratorState._reset_state()


def numbers(lines: list[str]) -> list[float]:
    """The numbers of lines that begin with a word."""
    return [float(found) for line in lines for found in re.findall(r"(?<= )-?\d+\.\d+(?:e-?\d+)?|(?<= )nan", line)]
