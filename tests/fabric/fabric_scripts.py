"""Scripts for Fabric, run under it and, with nothing but the import changed, under Weft's face of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).with_name("scripts")
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
PEER, OURS = "lightning_fabric", "weft.fabric"


def run(name: str, folder: str, *, peer: bool = False, exact: bool = False, **options: Any) -> list[float]:
    """What a script returns, in a folder of its own.  `exact`: all in double precision."""
    text = (SCRIPTS / f"{name}.py").read_text()
    space: dict[str, Any] = {"__name__": name}
    exec(compile(text if peer else text.replace(PEER, OURS), f"{name}.py", "exec"), space)
    if exact:
        options["precision"] = "64-true"
        torch.set_default_dtype(torch.float64)
    made = list[Any]()
    plain = space["Fabric"]

    def fabric(**given: Any) -> Any:
        made.append(plain(**given))
        return made[-1]

    space["Fabric"] = fabric
    Path(folder).mkdir(parents=True, exist_ok=True)
    found = list[float]()
    try:
        with contextlib.chdir(folder):
            for _ in range(space.get("RUNS", 1)):
                found += space["main"](**options)
                while made and not peer:
                    made.pop().close()
    finally:
        torch.set_default_dtype(torch.float32)
        while made and not peer:  # after an error
            made.pop().close()
        space.clear()
    return found


def peers(folder: Path) -> dict[str, dict[str, list[float]]]:
    """What all scripts return under Fabric itself, in a process of their own, as it changes torch."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import fabric_scripts as f\n"
        "kinds = {'single': {}, 'double': {'exact': True}, 'half': {'precision': 'bf16-mixed'}}\n"
        "run = lambda n, k: f.run(n, f'{sys.argv[2]}/{n}-{k}', peer=True, **kinds[k])\n"
        "found = {n: {k: run(n, k) for k in kinds} for n in f.NAMES}\n"
        "open(sys.argv[2] + '/found.json', 'w').write(json.dumps(found))"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-c", program, str(SCRIPTS.parent), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())
