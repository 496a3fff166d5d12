"""A real S3 server on loopback, in a process of its own: moto's.  It keeps what it gets in memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from types import TracebackType
from typing import Self

LIMIT_SECONDS = 60.0


class S3Server:
    """Starts on a free port; `kill` and `start` again let it be away for a while, after which it is empty."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def environment(self) -> dict[str, str]:
        """What lets a client find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "never-printed",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self, *buckets: str) -> None:
        command = [sys.executable, __file__, str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        until = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.05)
        for bucket in buckets:
            self.make_bucket(bucket)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def make_bucket(self, name: str) -> None:
        self._ask(name, "PUT")

    def deny_unknown_keys(self, *, denies: bool) -> None:
        """Let the server look at access keys, of which it knows none; or not."""
        self._ask("moto-api/reset-auth", "POST", b"0" if denies else b"inf")

    def _ask(self, path: str, method: str, body: bytes = b"") -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data=body, method=method)
        request.add_header("Content-Type", "text/plain")
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
            answer.read()


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
    server.start()
    sys.stdin.read()  # until whoever started it ends
    server.stop()


if __name__ == "__main__":
    main()
