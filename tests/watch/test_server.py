"""The dashboard's server answers the user's own browser and nobody else, and only reads."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import served
from recorded_runs import MadeUpRun

from weft.errors import LaunchError
from weft.watch.run_record import RunRecord
from weft.watch.server import MOST_STREAMS, WatchServer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeUpRun:
    made = MadeUpRun(folder=tmp_path_factory.mktemp("runs") / "run", began=10.0)
    made.add(30)
    return made


@pytest.fixture(scope="module")
def server(run: MadeUpRun) -> Iterator[WatchServer]:
    with served([RunRecord(run.folder)]) as server:
        yield server


def ask(
    server: WatchServer, path: str = "/view", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request; underscores in names of headers are dashes, and one without a value is left out."""
    given = {"Cookie": f"weft-watch-{server.port}={server.token}"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host="Host" in given)
        for name, value in given.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_only_who_has_the_token_is_answered(server: WatchServer) -> None:
    for path in ("/", "/view", "/stream", "/page/app.js"):
        assert ask(server, path, Cookie="")[0] == 403
        assert ask(server, path, Cookie=f"weft-watch-{server.port}=ä%00")[0] == 403
    assert ask(server, "/?token=wrong", Cookie="")[0] == 403
    status, headers, _ = ask(server, f"/?token={server.token}", Cookie="")
    assert status == 200
    assert headers["set-cookie"] == f"weft-watch-{server.port}={server.token}; Path=/; HttpOnly; SameSite=Strict"
    status, headers, _ = ask(server, "/")
    assert (status, "set-cookie" in headers) == (200, False)


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "NONSENSE"]
)
def test_nothing_but_get_is_answered(server: WatchServer, method: str) -> None:
    status, headers, _ = ask(server, "/view", method)
    assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[", "localhost:1@evil.example", "a b"])
def test_a_foreign_host_is_refused(server: WatchServer, host: str) -> None:
    assert ask(server, Host=host)[0] in (400, 421)


def test_own_hosts_are_answered_at_any_port(server: WatchServer) -> None:
    for host in ("localhost:9000", "127.0.0.1", "[::1]:80", f"{socket.gethostname()}:1"):
        assert ask(server, Host=host)[0] == 200


def test_a_page_of_another_site_is_refused(server: WatchServer) -> None:
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        assert ask(server, Origin=origin)[0] == 403
    assert ask(server, Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    assert ask(server, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert ask(server, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_every_answer_forbids_other_scripts(server: WatchServer) -> None:
    for path in ("/", "/view", "/nothing", "/page/../server.py", "/page/%2e%2e%2fserver.py"):
        _, headers, _ = ask(server, path)
        assert headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def test_files_are_small_and_asked_for_once(server: WatchServer) -> None:
    index = ask(server, "/")[2].decode()
    names = sorted(os.listdir(Path(sys.modules["weft.watch.server"].__file__ or "").parent / "page"))
    sizes = {name: len(ask(server, f"/page/{name}")[2]) for name in names}
    assert sum(sizes.values()) < 300_000
    assert "<script type=" in index
    assert "style=" not in index
    tag = ask(server, "/page/app.js")[1]["etag"]
    assert ask(server, "/page/app.js", If_None_Match=tag)[0] == 304
    assert ask(server, "/page/server.py")[0] == 404


def test_a_page_is_sent_again_only_when_it_has_changed(server: WatchServer, run: MadeUpRun) -> None:
    connections = []
    for _ in range(MOST_STREAMS):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request(
            "GET", "/stream?page=overview", headers={"Cookie": f"weft-watch-{server.port}={server.token}"}
        )
        connections.append((connection, connection.getresponse()))
    assert connections[0][1].getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert connections[0][1].readline() == b"retry: 1500\n"
    # One more than are held open is answered once.
    answer = ask(server, "/stream?page=ranks")[2].decode()
    mark = next(line.removeprefix("id: ") for line in answer.splitlines() if line.startswith("id: "))
    data = next(line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: "))
    assert json.loads(data)["id"] == "ranks"
    run.live()  # seconds later a rank says that it lives, and nothing else has changed for a second
    answer = ask(server, "/stream?page=ranks", Last_Event_ID=mark)[2].decode()
    assert answer.count("event: page") <= 1
    for connection, held in connections:
        held.close()
        connection.close()


def test_bad_options_are_those_that_are_not_given(server: WatchServer) -> None:
    for query in ("run=7", "run=-1", "run=%00", "page=__class__", "metric=%3Cscript%3E&order=1&rank=x&step=1e9&row=9"):
        status, _, content = ask(server, f"/view?page=ranks&{query}" if "page=" not in query else f"/view?{query}")
        assert (status, json.loads(content)["run"]) == (200, "run")


def test_what_would_show_a_run_to_everyone_is_refused(run: MadeUpRun) -> None:
    record = RunRecord(run.folder)
    with pytest.raises(LaunchError, match=r"--no-token with --host 0\.0\.0\.0"):
        WatchServer([record], host="0.0.0.0", has_token=False)
    with served([record]) as server, pytest.raises(LaunchError, match="Address already in use"):
        WatchServer([record], port=server.port)
    with pytest.raises(LaunchError, match="cannot be listened on"):
        WatchServer([record], port=70_000)


def test_the_command_prints_a_link_and_ends_by_ctrl_c(run: MadeUpRun) -> None:
    command = [sys.executable, "-m", "weft.cli", "watch", str(run.folder), "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert "step 30, 4 ranks" in lines[0]
        port = int(lines[1].split(":")[-1].strip("/\n"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/stream")
        answer = connection.getresponse()
        assert answer.status == 200
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=15)
        connection.close()
        answer.close()
        assert (process.returncode, *rest) == (0, "", "")
