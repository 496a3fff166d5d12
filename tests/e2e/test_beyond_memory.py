"""A model whose state is more than its ranks may have in memory, trained to the same losses."""

from __future__ import annotations

from pathlib import Path

from benchmarks.beyond_memory import parameters, run

LAYERS, LIMIT_BYTES = 32, 560_000_000
"""134 million parameters: a rank's half of weights and states alone is larger than its limit."""


def test_under_a_limit_that_the_state_does_not_fit(tmp_path: Path) -> None:
    assert 16 * parameters(LAYERS) // 2 > 1.5 * LIMIT_BYTES
    refused = run(LAYERS, limit_bytes=LIMIT_BYTES, folder=None)
    assert "allocate" in refused["error"] or "memory" in refused["error"].lower(), refused
    away = run(LAYERS, limit_bytes=LIMIT_BYTES, folder=tmp_path)
    wanted = run(LAYERS, limit_bytes=None, folder=None)
    assert away.get("losses") == wanted["losses"], away
    assert away["peak_bytes"] < LIMIT_BYTES
    assert list(tmp_path.iterdir()) == []
