"""An imitation of Kubernetes' API server: it keeps Jobs, and refuses what the published schemas do not have.

kubectl talks to it as to a real one.  Nothing runs: a test says how the pods of a Job stand.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

RELEASES = ("1.31", "1.37")
"""The oldest release that Weft asks for, and the newest whose schemas are published."""
VERBS = ["create", "delete", "get", "list", "patch"]
JOBS = "/apis/batch/v1/namespaces/train/jobs"


def problem_of(found: dict[str, Any]) -> str:
    """What the schemas say against an object; empty: nothing."""
    for release in RELEASES:
        try:
            kubernetes_validate.validate(found, release, strict=True)
        except kubernetes_validate.ValidationError as error:
            return f"{release}: {error.message}"
    return ""


@dataclass
class KubeApi:
    """What the server keeps."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """As they were created, by name."""
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    pods: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    nodes: list[dict[str, Any]] | None = field(default_factory=list[dict[str, Any]])
    """None: nobody may list them."""
    refusal: str = ""
    """What an admission check says against every object."""
    deleted: list[str] = field(default_factory=list[str])

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/api/v1/nodes":
            return (200, _items("NodeList", self.nodes)) if self.nodes is not None else _status(403, "Forbidden", path)
        if path == "/api/v1/namespaces/train/pods":
            return 200, _items("PodList", self.pods)
        if path.startswith(f"{JOBS}/"):
            name = path.rpartition("/")[2]
            if name not in self.jobs:
                return _status(404, "NotFound", f'jobs.batch "{name}" not found')
            return 200, {**self.jobs[name], "status": self.statuses.get(name, {})}
        return _DISCOVERY[path] if path in _DISCOVERY else _status(404, "NotFound", path)

    def create(self, path: str, query: dict[str, list[str]], found: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert path == JOBS, path
        assert query["fieldValidation"] == ["Strict"], query
        if problem := problem_of(found) or self.refusal:
            return _status(422, "Invalid", problem)
        made = {
            **found,
            "metadata": {**found["metadata"], "name": f"{found['metadata']['generateName']}x{len(self.jobs)}"},
        }
        if "dryRun" not in query:
            self.jobs[made["metadata"]["name"]] = made
        return 201, made

    def delete(self, path: str) -> tuple[int, dict[str, Any]]:
        name = path.rpartition("/")[2]
        self.jobs.pop(name)
        self.deleted.append(name)
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}


def _items(kind: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": kind, "apiVersion": "v1", "metadata": {}, "items": items}


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }


def _resources(group: str, *names: str) -> tuple[int, dict[str, Any]]:
    resources = [
        {
            "name": name,
            "singularName": name[:-1],
            "namespaced": name != "nodes",
            "kind": name[:-1].title(),
            "verbs": VERBS,
        }
        for name in names
    ]
    return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}


_BATCH = {"groupVersion": "batch/v1", "version": "v1"}
_OPEN_API = {
    "openapi": "3.0.0",
    "info": {"title": "Kubernetes", "version": "v1.37.0"},
    "paths": {
        "/apis/batch/v1/namespaces/{namespace}/jobs/{name}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": {"group": "batch", "version": "v1", "kind": "Job"},
            }
        }
    },
}
_DISCOVERY: dict[str, tuple[int, dict[str, Any]]] = {
    "/api": (200, {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
    "/apis": (
        200,
        {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": "batch", "versions": [_BATCH], "preferredVersion": _BATCH}],
        },
    ),
    "/api/v1": _resources("v1", "nodes", "pods"),
    "/apis/batch/v1": _resources("batch/v1", "jobs"),
    "/version": (200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}),
    "/openapi/v3": (200, {"paths": {"apis/batch/v1": {"serverRelativeURL": "/openapi/v3/apis/batch/v1"}}}),
    "/openapi/v3/apis/batch/v1": (200, _OPEN_API),
}


class _Handler(BaseHTTPRequestHandler):
    api: KubeApi

    def _answer(self, answered: tuple[int, dict[str, Any]]) -> None:
        code, body = answered
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self._answer(self.api.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.api.create(address.path, parse_qs(address.query), found))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._answer(self.api.delete(urlsplit(self.path).path))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def kube_api(folder: Path) -> Generator[tuple[KubeApi, Path]]:
    """Start the server on loopback; give what it keeps, and a configuration of kubectl for it."""
    api = KubeApi()
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    path = folder / "kubeconfig"
    cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
    context = {"cluster": "imitated", "user": "nobody", "namespace": "train"}
    configuration = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "imitated", "cluster": cluster}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "imitated", "context": context}],
        "current-context": "imitated",
    }
    path.write_text(json.dumps(configuration))  # JSON is YAML
    try:
        yield api, path
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
