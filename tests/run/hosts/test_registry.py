"""The two registries, each against the real service: who is there, who was first, what was written."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.errors import LaunchError
from weft.run.hosts.etcd import EtcdRegistry
from weft.run.hosts.registry import BEAT_SECONDS, LEASE_SECONDS, Registry, RegistryLostError
from weft.run.hosts.torch_store import TorchStoreRegistry, serve_store


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _answers(registry: EtcdRegistry) -> bool:
    try:
        return registry.get(["any"]) == {}
    except RegistryLostError:
        return False


@pytest.fixture(scope="module", autouse=True)
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a member of etcd, which runs before the first test looks at what it may leave behind."""
    if shutil.which("etcd") is None:
        yield ""
        return
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    words = ["etcd", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--logger", "zap", "--log-level", "error"]
    words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
    words += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    process = subprocess.Popen([*words, "--heartbeat-interval", "100", "--election-timeout", "500"])
    deadline = time.monotonic() + 10
    registry = EtcdRegistry(client.replace("http://", "etcd://"), "ready")
    while not _answers(registry) and time.monotonic() < deadline:
        time.sleep(0.05)
    registry.close()
    yield client.replace("http://", "etcd://")
    process.kill()
    process.wait()


@pytest.fixture(params=[pytest.param("etcd", marks=pytest.mark.needs_etcd), "store"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Registry]]:
    """Connects another host to one job's registry."""
    opened: list[Registry] = []
    if request.param == "etcd":
        address = request.getfixturevalue("etcd")
        make: Callable[[], Registry] = lambda: EtcdRegistry(address, tmp_path.name)  # noqa: E731
    else:
        store, port = serve_store("127.0.0.1")
        opened.append(TorchStoreRegistry(store))
        make = lambda: TorchStoreRegistry.connect("127.0.0.1", port)  # noqa: E731

    def connected() -> Registry:
        opened.append(make())
        return opened[-1]

    yield connected
    for registry in opened:
        registry.close()


def test_hosts_join_in_order_and_leave(connect: Callable[[], Registry]) -> None:
    first, second, third = connect(), connect(), connect()
    names = [
        registry.join(lambda _, number=number: f"host {number}")
        for number, registry in enumerate((first, second, third))
    ]
    assert third.members() == list(zip(names, ("host 0", "host 1", "host 2"), strict=True))
    second.leave()
    assert [value for _, value in first.members()] == ["host 0", "host 2"]


def test_a_silent_host_is_off_the_list(connect: Callable[[], Registry]) -> None:
    silent, living = connect(), connect()
    silent.join(lambda _: "silent")
    name = living.join(lambda _: "living")
    began = time.monotonic()
    while len(living.members()) == 2:
        assert living.beat()
        assert time.monotonic() - began < LEASE_SECONDS + 3
        time.sleep(BEAT_SECONDS / 4)
    assert living.members() == [(name, "living")]
    assert time.monotonic() - began > 0.9 * LEASE_SECONDS  # not before its time


def test_values(connect: Callable[[], Registry]) -> None:
    first, second = connect(), connect()
    assert first.get(["a", "b"]) == {}
    assert first.create("a", "one")
    assert not second.create("a", "two")
    second.put("b", "ä\n" * 1000)
    assert first.get(["a", "b", "c"]) == {"a": "one", "b": "ä\n" * 1000}


def test_a_store_that_is_gone() -> None:
    store, port = serve_store("127.0.0.1")
    registry = TorchStoreRegistry.connect("127.0.0.1", port)
    registry.join(lambda name: name)
    del store
    with pytest.raises(RegistryLostError, match="the store of the job's first host cannot be reached"):
        registry.members()
    with pytest.raises(RegistryLostError):
        TorchStoreRegistry.connect("127.0.0.1", port)
    registry.close()


def test_etcd_that_is_not_there() -> None:
    registry = EtcdRegistry(f"etcd://127.0.0.1:{_free_port()}", "job")
    with pytest.raises(RegistryLostError, match="does not answer: .*refused.* mend --rendezvous"):
        registry.join(lambda name: name)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("http://a:1", "is no address of etcd"),
        ("etcd://", "is no address of etcd"),
        ("etcd://user:word@a:1", "is no address of etcd"),
        ("etcd://a:b", "'a:b' is no host:port"),
        ("etcds://a:1?cert=/none", "cannot be read"),
        ("etcds://a:1?password=x", "password is not known"),
    ],
)
def test_addresses_that_are_none(address: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        EtcdRegistry(address, "job")
