"""Large searches are small: in memory, in what they import, and in how many layouts they price, which is what takes
their time.  `python -m benchmarks search` measures seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The peak is the kernel's for this address space: what `getrusage` gives includes the parent's before the exec.
SEARCH = """
import json, sys
from pathlib import Path
from weft.config.cluster import parse_cluster_spec
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.search import search
profile, cluster = profile_of_sizes(known_model(sys.argv[1]).sizes), parse_cluster_spec(sys.argv[2])
result = search(profile, cluster, global_batch_size=int(sys.argv[3]))
status = Path("/proc/self/status")
lines = status.read_text().splitlines() if status.exists() else []
peak = [line.split()[1] for line in lines if line.startswith("VmHWM")]
print(json.dumps({
    "bytes": int(peak[0]) * 1024 if peak else 0,
    "torch": "torch" in sys.modules,
    "found": len(result.best),
    "searched": result.counts.searched,
    "priced": result.counts.priced,
}))
"""
LINUX = Path("/proc/self/status").exists()


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "most", "size"),
    [
        ("llama-3.1-70b", "48x8xa100-80gb", 1536, 1_000, 500e6),
        ("llama-3.1-405b", "2048x8xh100", 2048, 1_000, 500e6),
        ("moe-1t", "12500x8xh100", 12288, 10_000, 1.2e9),
    ],
)
def test_large_searches_are_small(model: str, cluster: str, batch: int, most: int, size: float) -> None:
    command = [sys.executable, "-c", SEARCH, model, cluster, str(batch)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert not told["torch"]
    assert told["bytes"] < size
    assert told["bytes"] > 0 or not LINUX
    assert told["found"] == 5
    assert told["searched"] > 1e6
    assert 5 <= told["priced"] < most
