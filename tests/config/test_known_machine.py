"""What a probe measured is kept for this machine, and used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.config.cluster import Cluster, keep_machine, known_machine
from weft.errors import ClusterError


def test_a_machine_is_known_once_it_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "machines"
    detected = Cluster.detect()
    before = known_machine(folder)
    assert before.cluster == detected
    assert "weft probe" in before.note
    node = detected.nodes[0]
    measured = replace(detected, nodes=(replace(node, devices=replace(node.devices, measured_flops={"fp32": 1e10})),))
    path = keep_machine(measured, folder)
    assert path.name == f"{detected.digest}-shared-memory.toml"
    assert [*folder.iterdir()] == [path]
    after = known_machine(folder)
    assert after.cluster == measured
    assert after.note == ""
    path.write_text("nodes = 3")
    again = known_machine(folder)
    assert again.cluster == detected
    assert f"{path} cannot be read" in again.note


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ClusterError, match="cannot be written: .* Give weft probe an --output"):
        keep_machine(Cluster.detect(), blocked / "machines")
