"""A registry in etcd, through the JSON gateway of its API version 3 (etcd 3.4 or newer): plain HTTP requests.

The list of hosts are keys that are bound to leases.  A host that gives no sign of life loses its lease, and with it the
key.  Reads are linearizable: a member of etcd that is cut off from the others answers none, so that a host which sees
only that member learns that it is on its own.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

from weft.errors import LaunchError
from weft.run.hosts.registry import LEASE_SECONDS, MOST_BYTES, RegistryLostError

_REQUEST_SECONDS = 0.7
"""Time for one member to answer.  A leader that is lost costs etcd about 1.4 s (etcd 3.4, 3 members)."""
_CALL_SECONDS = 3.0
"""Time for a call: all members are tried, and tried again."""
_PORT = 2379
_PLAIN, _TLS = "etcd", "etcds"


@final
class EtcdRegistry:
    """The registry of one job in etcd."""

    def __init__(self, address: str, job: str) -> None:
        """Connect to nothing yet.

        Args:
            address: `etcd://host:port,host:port`, or `etcds://…?ca=FILE&cert=FILE&key=FILE` for TLS.
            job: name of the job, the same on all hosts; keys begin with it.

        Raises:
            LaunchError: the address cannot be read, or a certificate cannot.
        """
        self._members, self._tls = _parse(address)
        self._prefix = f"/weft/{job}/"
        self._lease: str | None = None
        self._name = ""
        self._connection: http.client.HTTPConnection | None = None
        self._asking = threading.Lock()
        """Held by the thread that uses the connection: signs of life and the host's own calls come from two."""

    def join(self, value: Callable[[str], str]) -> str:
        granted = self._call("lease/grant", {"TTL": math.ceil(LEASE_SECONDS)})
        self._lease = _text(granted, "ID")
        self._name = os.urandom(8).hex()
        key = _encode(f"{self._prefix}hosts/{self._name}")
        self._call("kv/put", {"key": key, "value": _encode(value(self._name)), "lease": self._lease})
        return self._name

    def beat(self) -> bool:
        if self._lease is None:
            return False
        answer = self._call("lease/keepalive", {"ID": self._lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def members(self) -> list[tuple[str, str]]:
        prefix = f"{self._prefix}hosts/"
        request = {"key": _encode(prefix), "range_end": _encode(_after(prefix))}
        found = sorted(self._call("kv/range", request).get("kvs", []), key=lambda each: int(each["create_revision"]))
        return [(_decode(each["key"])[len(prefix) :], _decode(each.get("value", ""))) for each in found]

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        keys = list(keys)
        reads = [{"requestRange": {"key": _encode(self._prefix + key)}} for key in keys]
        answers = self._call("kv/txn", {"success": reads}).get("responses", [])
        values: dict[str, str] = {}
        for key, answer in zip(keys, answers, strict=True):
            for each in answer.get("response_range", {}).get("kvs", []):
                values[key] = _decode(each.get("value", ""))
        return values

    def put(self, key: str, value: str) -> None:
        self._call("kv/put", {"key": _encode(self._prefix + key), "value": _encode(value)})

    def create(self, key: str, value: str) -> bool:
        key = _encode(self._prefix + key)
        is_absent = {"key": key, "target": "CREATE", "create_revision": "0"}
        write = {"requestPut": {"key": key, "value": _encode(value)}}
        return bool(self._call("kv/txn", {"compare": [is_absent], "success": [write]}).get("succeeded", False))

    def leave(self) -> None:
        if self._lease is not None:
            self._call("lease/revoke", {"ID": self._lease})
            self._lease = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Ask one member after another until one answers.

        A request may be carried out although its answer is lost.  Every one may be repeated: what `create` has written
        the first time is this host's own value, which the caller reads back.
        """
        body = json.dumps(request).encode()
        deadline = time.monotonic() + _CALL_SECONDS
        problem = "no answer"
        while time.monotonic() < deadline:
            with self._asking:
                try:
                    return self._ask(path, body)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    problem = str(error) or type(error).__name__
                    self.close()
                    self._members.append(self._members.pop(0))
            time.sleep(0.02)
        names = ", ".join(f"{host}:{port}" for host, port in sorted(self._members))
        raise RegistryLostError(f"etcd at {names} does not answer: {problem}. Start it, or mend --rendezvous.")

    def _ask(self, path: str, body: bytes) -> dict[str, Any]:
        if self._connection is None:
            host, port = self._members[0]
            if self._tls is not None:
                self._connection = http.client.HTTPSConnection(host, port, timeout=_REQUEST_SECONDS, context=self._tls)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_SECONDS)
        self._connection.request("POST", f"/v3/{path}", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = response.read(2 * MOST_BYTES)
        if response.status != 200:
            text = content[:200].decode(errors="replace")
            if b"requested lease not found" in content:
                return {}
            raise OSError(f"status {response.status}: {text}")
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return answer  # pyright: ignore[reportUnknownVariableType]


def _parse(address: str) -> tuple[list[tuple[str, int]], ssl.SSLContext | None]:
    parts = urlsplit(address)
    if parts.scheme not in (_PLAIN, _TLS) or not parts.netloc or "@" in parts.netloc:
        raise LaunchError(
            f"--rendezvous {address!r} is no address of etcd. Give folder, etcd://host:port,host:port, or etcds:// with"
            " ?ca=FILE&cert=FILE&key=FILE for TLS."
        )
    members: list[tuple[str, int]] = []
    for word in parts.netloc.split(","):
        host, _, port = word.partition(":")
        if not host or not (not port or port.isdecimal()):
            raise LaunchError(f"--rendezvous: {word!r} is no host:port.")
        members.append((host, int(port or _PORT)))
    if parts.scheme == _PLAIN:
        return members, None
    files = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := set(files) - {"ca", "cert", "key"}:
        raise LaunchError(f"--rendezvous: {min(unknown)} is not known. ca, cert and key name files.")
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except (OSError, ssl.SSLError) as error:
        raise LaunchError(f"--rendezvous: a certificate of {address!r} cannot be read: {error}.") from None
    return members, context


def _text(answer: dict[str, Any], name: str) -> str:
    if not isinstance(answer.get(name), str):
        raise RegistryLostError(f"etcd's answer has no {name}. Weft needs etcd 3.4 or newer.")
    return answer[name]


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


def _after(prefix: str) -> str:
    """The first key behind all that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
