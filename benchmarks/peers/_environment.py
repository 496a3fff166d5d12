"""An environment of the peers' own beside Weft's: their requirements must not meet."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks._results import ROOT, log

FOLDER = ROOT / ".venv-peers"
BUILD = ("setuptools", "wheel", "ninja", "numpy", "psutil", "py-cpuinfo")
PEERS = ("accelerate", "lightning-fabric", "deepspeed")
_DEEPSPEED = "deepspeed==0.19.8"
# What Weft's models and layouts need when they are imported there.
_WEFT_NEEDS = ("safetensors", "xxhash")


def peers_python() -> str | None:
    """The Python of `.venv-peers`, which is made first if it is not there; None, said aloud, when it cannot be made."""
    python = FOLDER / "bin" / "python"
    if (FOLDER / "complete").exists():
        return str(python)
    try:
        _create(python)
    except subprocess.CalledProcessError as problem:
        log(f"The peers' environment cannot be made ({problem}): only hand-written rivals take part.")
        return None
    (FOLDER / "complete").write_text("")
    return str(python)


def _create(python: Path) -> None:
    log(f"making {FOLDER.name} with {', '.join(PEERS)} (once, some minutes)")
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = version("torch")
    # First of all the torch that Weft runs on, so that everybody is measured on the same one.
    if subprocess.run([*pip, f"torch=={torch}"], check=False).returncode:
        index = f"https://download.pytorch.org/whl/{torch.partition('+')[2] or 'cpu'}"
        subprocess.run([*pip, f"torch=={torch}", "--index-url", index], check=True)
    subprocess.run([*pip, *BUILD, *_WEFT_NEEDS, "accelerate", "lightning-fabric", f"torch=={torch}"], check=True)
    # Without its compiled operators DeepSpeed installs on a machine that has no CUDA.
    build = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "--no-build-isolation", _DEEPSPEED, f"torch=={torch}"], check=True, env=build)


def peer_versions(python: str) -> dict[str, str]:
    """Versions of the peers and of their torch, asked without importing them."""
    asked = "from importlib.metadata import version; import sys; print(*(version(name) for name in sys.argv[1:]))"
    names = ("torch", *PEERS)
    answer = subprocess.run([python, "-c", asked, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, answer.stdout.split(), strict=True))
