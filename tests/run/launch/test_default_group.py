"""A default process group of the user's own."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from weft.comm.device import BackendKind
from weft.errors import LaunchError
from weft.run.launch import initialise_distributed
from weft.run.launch._distributed import _check_backends


def _joined() -> tuple[int, int]:
    with initialise_distributed("cpu") as distributed:
        return distributed.rank, distributed.world_size


def test_a_group_that_exists_is_used_and_left_alone(ranks: RankPool) -> None:
    assert ranks.run(2, _joined) == [(0, 2), (1, 2)]


def _wanted(backend: BackendKind) -> str:
    with initialise_distributed("cpu", backend=backend):
        return dist.get_backend_config()


def test_a_group_that_exists_must_be_what_the_plan_wants(ranks: RankPool) -> None:
    assert ranks.run(2, _wanted, "weft", backend="cpu:weft") == ["cpu:weft"] * 2
    assert ranks.run(2, _wanted, "auto", backend="cpu:weft") == ["cpu:weft"] * 2
    with pytest.raises(LaunchError, match=r'backend = "weft", but the default process group .* by gloo\. Use'):
        ranks.run(2, _wanted, "weft")


def _refused() -> None:
    with pytest.raises(LaunchError, match=r"carries tensors of cpu.* only, .* sends tensors of xpu\. Make"):
        _check_backends(torch.device("xpu"))


def test_a_group_without_a_backend_for_the_device_is_refused(ranks: RankPool) -> None:
    ranks.run(1, _refused)


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1", "29500 ", "2.5", "99999999"])
def test_a_port_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    with (
        pytest.raises(LaunchError, match=r"MASTER_PORT = .* is no port\. Give a number from 1 to 65535"),
        initialise_distributed("cpu"),
    ):
        pass


def test_a_port_that_is_taken_is_refused_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(LaunchError, match=r"rank 0 is to listen at port \d+ .* such as MASTER_PORT=\d+\."),
            initialise_distributed("cpu"),
        ):
            pass
