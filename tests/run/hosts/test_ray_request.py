"""What Ray is asked, and which of its nodes a gang takes: no Ray is needed."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weft.config.pool import Pool, RaySettings, parse_pool
from weft.errors import ClusterError, LaunchError
from weft.run.places import place_of
from weft.run.places.contract import Gang, GangBlock, Job
from weft.run.places.ray_nodes import RayNode, bundle_of, choose_nodes, selectors

DRAWS = 200
JOB = Job(name="weft-run", run=Path("/shared/my run"))
LABELS = ("spine", "rack")


def block_of_nodes(number: int, level: int, *, must: bool = True) -> GangBlock:
    return GangBlock(
        tier=("rack", "spine")[level],
        level=level,
        tier_nodes=8,
        num_nodes=number,
        axes=("tensor",),
        must=must,
        whole_seconds=1.0,
        split_seconds=2.0,
        scattered_seconds=3.0,
    )


def draw_nodes(draw: random.Random) -> list[RayNode]:
    """Nodes in racks under spines, some of which other jobs hold, or have no labels."""
    nodes: list[RayNode] = []
    for rack in range(draw.randint(1, 6)):
        for _ in range(draw.randint(0, 9)):
            labels = {"spine": f"s{rack % 2}", "rack": f"r{rack // 2}", "other": "x"}
            nodes.append(
                RayNode(
                    number=str(len(nodes)),
                    address=f"10.0.0.{len(nodes) + 1}",
                    total={"CPU": 8.0, "GPU": 4.0},
                    free={"CPU": 8.0, "GPU": draw.choice((0.0, 4.0, 4.0, 4.0))},
                    labels=labels if draw.random() < 0.9 else {},
                )
            )
    draw.shuffle(nodes)
    return nodes


def test_blocks_lie_together_wherever_that_can_be() -> None:
    for seed in range(DRAWS):
        check_blocks(random.Random(seed))


def check_blocks(draw: random.Random) -> None:
    nodes, size, bundle = draw_nodes(draw), draw.randint(1, 4), {"CPU": 8.0, "GPU": 4.0}
    count = draw.randint(1, 16)
    chosen = choose_nodes(nodes, bundle, count, [block_of_nodes(size, 0)], LABELS)
    rooms = Counter((each.labels["spine"], each.labels["rack"]) for each in nodes if each.labels and each.free["GPU"])
    whole, rest = divmod(count, size)
    num_blocks = sum(room // size for room in rooms.values())
    possible = num_blocks > whole or (
        num_blocks == whole and max((room % size for room in rooms.values()), default=0) >= rest
    )
    assert (chosen is not None) == possible
    if chosen is None:
        return
    assert len({each.number for each in chosen}) == count
    assert all(each.holds(bundle) for each in chosen)
    for start in range(0, count, size):
        assert len({(each.labels["spine"], each.labels["rack"]) for each in chosen[start : start + size]}) == 1


def test_racks_lie_inside_spines() -> None:
    """Blocks of racks inside blocks of spines: found wherever there is room for whole ones."""
    for seed in range(DRAWS):
        check_nested_blocks(random.Random(seed))


def check_nested_blocks(draw: random.Random) -> None:
    nodes, inner, times = draw_nodes(draw), draw.randint(1, 3), draw.randint(2, 3)
    outer, count = inner * times, inner * times * draw.randint(1, 2)
    blocks = [block_of_nodes(inner, 0), block_of_nodes(outer, 1)]
    chosen = choose_nodes(nodes, {"GPU": 4.0}, count, blocks, LABELS)
    rooms = Counter((each.labels["spine"], each.labels["rack"]) for each in nodes if each.labels and each.free["GPU"])
    spines: Counter[str] = Counter()
    for (spine, _), room in rooms.items():
        spines[spine] += room // inner
    assert (chosen is not None) == (sum(room // times for room in spines.values()) * outer >= count)
    if chosen is None:
        return
    for start in range(0, count, outer):
        assert len({each.labels["spine"] for each in chosen[start : start + outer]}) == 1
    assert all(set(each) == set(LABELS) for each in selectors(chosen, blocks, LABELS))
    assert all(set(each) == {"spine"} for each in selectors(chosen, blocks[1:], LABELS))


def test_a_request_is_json_with_one_key_in_a_line() -> None:
    gang = Gang(
        least=2,
        most=4,
        num_devices=8,
        accelerator="h100",
        num_cores=64,
        blocks=(block_of_nodes(2, 0), block_of_nodes(4, 1, must=False)),
        grace_seconds=90,
    )
    pool = Pool(place="ray", name="lab", command=("/shared/venv/bin/weft",), ray=RaySettings(labels=("rack",)))
    request = place_of("ray").request(gang, JOB, pool)
    assert json.loads(request.text) == {
        "entrypoint": "/shared/venv/bin/weft agent '/shared/my run' --ray",
        "metadata": {
            "name": "weft-run",
            "run": "/shared/my run",
            "machines": "2..4",
            "bundle": "CPU 64, GPU 8",
            "blocks in one rack": "2 machines, a must",
        },
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}},
    }
    assert request.command == ("POST", "http://127.0.0.1:8265/api/jobs/")
    assert [line.text.count('":') > 0 and bool(line.why) for line in request.lines] == [False, True, True, True, False]
    assert bundle_of(gang) == {"CPU": 64.0, "GPU": 8.0}


@contextmanager
def dashboard(answers: dict[str, Any], *, token: str | None = None) -> Generator[str]:
    """Something that speaks HTTP on loopback, and is asked what Ray would be."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = token is None or self.headers["Authorization"] == f"Bearer {token}"
            known = self.path in answers
            self.send_response(401 if not allowed else 200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def free_of(settings: RaySettings) -> None:
    place_of("ray").free(Pool(place="ray", name="lab", ray=settings))


def test_what_is_no_ray_or_too_old_is_said(tmp_path: Path) -> None:
    with dashboard({}) as address, pytest.raises(LaunchError, match="is not Ray: it has no /api/version"):
        free_of(RaySettings(address=address))
    with (
        dashboard({"/api/version": {"version": "1"}}) as address,
        pytest.raises(LaunchError, match="is not Ray: it says no version"),
    ):
        free_of(RaySettings(address=address))
    with (
        dashboard({"/api/version": {"ray_version": "2.40.0"}}) as address,
        pytest.raises(LaunchError, match=r"is 2\.40\.0, .* Use 2\.49 or newer"),
    ):
        free_of(RaySettings(address=address))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(LaunchError, match="does not answer at .*: .*refused.*ray start --head"):
            free_of(RaySettings(address=f"http://127.0.0.1:{taken.getsockname()[1]}"))


def test_a_token_is_read_from_a_file_that_its_user_alone_may_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    with dashboard({"/api/version": {"ray_version": "2.40.0"}}, token="secret") as address:
        with pytest.raises(LaunchError, match=r"asks for a token: give it as token_file in \[ray\]"):
            free_of(RaySettings(address=address))
        settings = RaySettings(address=address, token_file=str(file))
        file.chmod(0o644)
        with pytest.raises(LaunchError, match="others can read it"):
            free_of(settings)
        file.chmod(0o600)
        with pytest.raises(LaunchError, match=r"2\.40\.0"):
            free_of(settings)
        file.write_text("wrong")
        with pytest.raises(LaunchError, match="asks for a token: .* has another"):
            free_of(settings)
        file.unlink()
        with pytest.raises(LaunchError, match="cannot be read"):
            free_of(settings)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://8.8.8.8:8265", "is public"),
        ("10.0.0.1:8265", "is no address of a dashboard"),
        ("http://10.0.0.1:8265/api/jobs", "is no address of a dashboard"),
        ("ray://10.0.0.1:10001", "is no address of a dashboard"),
    ],
)
def test_an_address_that_is_none_or_public_is_refused(address: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_pool(f'place = "ray"\n[ray]\naddress = "{address}"\n')


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "https://8.8.8.8", "http://head:8265/", "http://[::1]:1"])
def test_others_are_taken(address: str) -> None:
    pool = parse_pool(f'place = "ray"\n[ray]\naddress = "{address}"\n')
    assert pool.ray is not None
    assert pool.ray.address == address
