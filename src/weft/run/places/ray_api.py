"""What a Ray cluster's dashboard is asked over HTTP: jobs, nodes, and what of them is free.  It needs no package ray.

Addresses and fields: Ray's manual, "Ray Jobs REST API", and the dashboard's own answers, 2.49 to 2.60.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weft.config.pool import RaySettings
from weft.errors import LaunchError
from weft.run.places.contract import ANSWER_SECONDS
from weft.run.places.ray_nodes import RayNode

JOBS = "/api/jobs/"
_NODES = "/api/v0/nodes?detail=1&limit=10000"
_USE = "/api/cluster_status"
_OLDEST = (2, 49)
"""The first version whose placement groups take labels for each bundle."""
_MOST_SHOWN = 300


class RayRefusalError(LaunchError):
    """Ray has answered that it will not do this."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
        """Status of HTTP."""


def call(settings: RaySettings, method: str, path: str, body: str | None = None) -> Any:
    """Ask a cluster's dashboard, and return its answer, read from JSON.

    Raises:
        RayRefusalError: it refuses.
        LaunchError: nobody answers at the address, or what answers is no Ray.
    """
    parts = urlsplit(settings.address)
    assert parts.hostname is not None, "settings are checked where they are read"
    headers = {"Content-Type": "application/json", **_authorization(settings)}
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=ANSWER_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path, body=None if body is None else body.encode(), headers=headers)
        response = connection.getresponse()
        status, said = response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise LaunchError(
            f"Ray does not answer at {settings.address}: {why}. Start its head"
            " (ray start --head), or correct address in the pool's table [ray]."
        ) from None
    finally:
        connection.close()
    if status in (401, 403):
        hint = "give it as token_file in [ray]" if settings.token_file is None else f"{settings.token_file} has another"
        raise RayRefusalError(f"Ray at {settings.address} asks for a token: {hint}.", status)
    if status >= http.client.MULTIPLE_CHOICES:  # a redirection would take the token elsewhere
        raise RayRefusalError(f"Ray says: {_shown(said)}", status)
    try:
        return json.loads(said)
    except ValueError:
        raise LaunchError(f"what answers at {settings.address} is not Ray: {_shown(said)!r}.") from None


def check_version(settings: RaySettings) -> str:
    """Return the version of a cluster.

    Raises:
        LaunchError: it is too old, or there is none.
    """
    try:
        version = str(call(settings, "GET", "/api/version")["ray_version"])
    except (KeyError, TypeError):
        raise LaunchError(f"what answers at {settings.address} is not Ray: it says no version.") from None
    except RayRefusalError as error:
        if error.code != http.client.NOT_FOUND:
            raise
        raise LaunchError(f"what answers at {settings.address} is not Ray: it has no /api/version.") from None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST:
        raise LaunchError(
            f"Ray at {settings.address} is {version}, and its placement groups take no labels. Use 2.49 or newer."
        )
    return version


def nodes_of(settings: RaySettings) -> list[RayNode]:
    """Return the living nodes of a cluster.

    Raises:
        LaunchError: it does not answer.
    """
    answer = call(settings, "GET", _NODES)["data"]["result"]["result"]
    report = call(settings, "GET", _USE)["data"]["clusterStatus"] or {}
    # Empty until Ray's monitor has first reported: then nothing runs yet, either.
    used = (report.get("loadMetricsReport") or {}).get("usageByNode") or {}
    return [_node(each, used.get(each["node_id"], {})) for each in answer if each["state"] == "ALIVE"]


def _node(told: dict[str, Any], used: dict[str, list[float]]) -> RayNode:
    total: dict[str, float] = told["resources_total"]
    return RayNode(
        number=told["node_id"],
        address=told["node_ip"],
        total=total,
        free={name: number - used.get(name, [0.0])[0] for name, number in total.items()},
        labels=told["labels"] or {},
    )


def _authorization(settings: RaySettings) -> dict[str, str]:
    if settings.token_file is None:
        return {}
    path = Path(settings.token_file).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LaunchError(f"{path} has Ray's token, and others can read it. chmod 600 {path}")
        return {"Authorization": f"Bearer {path.read_text().strip()}"}
    except OSError as error:
        raise LaunchError(f"Ray's token cannot be read from {path}: {error.strerror}.") from None


def _shown(said: str) -> str:
    last = said.strip().splitlines()[-1:] or ["nothing"]
    return last[0][:_MOST_SHOWN]
