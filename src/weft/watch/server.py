"""The dashboard of runs: a small web server that only reads, on this machine alone unless it is told otherwise.

Whoever may ask: a browser that holds the token, by a link that names it once and by a cookie from then on.  A page of
another site cannot: Host must be this machine by number or by its own name (against DNS rebinding), Origin must be
this server, and the cookie goes to no other site.  Nothing is changed through it: every method but GET is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import mimetypes
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import final
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import LaunchError
from weft.watch.run_record import RunRecord
from weft.watch.views import PAGES, Page, page_of

MOST_STREAMS = 4
"""Streams that are held open at once.  Browsers open six connections to a server, of all tabs together: a seventh tab
would wait for ever.  What comes beyond is answered once and asks again."""
_PAUSE_SECONDS = 0.5
_MOST_PAUSE_SECONDS = 2.0
_WORK_SHARE = 0.1
"""Share of a processor that each stream may take, with reading its run: the run needs the others."""
_ASK_AGAIN_MS = 1_500
_BEAT_SECONDS = 15.0
_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@final
class WatchServer:
    """Shows runs to browsers until it is stopped."""

    def __init__(
        self, records: Sequence[RunRecord], *, host: str = "127.0.0.1", port: int = 0, has_token: bool = True
    ) -> None:
        """Take a port.  Nothing is answered before `serve`.

        Args:
            records: one for each run; the server refreshes them from now on.
            host: address to listen on.
            port: 0 takes a free one.
            has_token: whether a browser must have been given the link; without, any process of this machine may look.

        Raises:
            LaunchError: the address cannot be taken, or other machines could look without a token.
        """
        if not has_token and not _is_loopback(host):
            raise LaunchError(
                f"--no-token with --host {host} would show the run to whoever reaches this machine. Leave one of them"
                " out."
            )
        self._views = _Views(records)
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24) if has_token else ""
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        self.url = f"http://{name}:{self.port}/" + (f"?token={self.token}" if has_token else "")
        """The link to open."""
        app = Starlette(
            routes=[
                Route("/", self._file),
                Route("/page/{name}", self._file),
                Route("/view", self._view),
                Route("/stream", self._stream),
            ]
        )
        config = uvicorn.Config(
            _Guard(app, self.token, f"weft-watch-{self.port}"), http="h11", ws="none", loop="asyncio", lifespan="off",
            log_config=None, log_level="critical", access_log=False, server_header=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._files = _read_files()
        self._open_streams = 0
        # One thread reads runs and makes pages, so that a record is never in two hands.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-watch")
        self._maker.submit(int).result()

    def serve(self) -> None:
        """Answer until `stop`, Ctrl-C or SIGTERM."""
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._maker.shutdown()

    def stop(self) -> None:
        """Let `serve` return, within about a second.  Any thread may call it."""
        self._server.should_exit = True

    async def _file(self, request: Request) -> Response:
        name = str(request.path_params.get("name", "index.html"))
        if name not in self._files:
            return PlainTextResponse("There is no such page.\n", 404)
        content, kind, tag = self._files[name]
        headers = {"cache-control": "no-cache", "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    async def _view(self, request: Request) -> Response:
        """Answer a page once, as JSON."""
        page = await self._page(request.query_params, "")
        assert page is not None
        return Response(_to_json(page[1]), media_type="application/json", headers={"cache-control": "no-store"})

    async def _stream(self, request: Request) -> Response:
        """Send a page whenever it changes."""
        seen = request.headers.get("last-event-id", "")
        headers = {"cache-control": "no-store"}
        return StreamingResponse(
            self._events(request.query_params, seen), media_type="text/event-stream", headers=headers
        )

    async def _page(self, query: QueryParams, seen: str) -> tuple[str, Page] | None:
        return await asyncio.get_running_loop().run_in_executor(self._maker, self._views.page, query, seen)

    async def _events(self, query: QueryParams, seen: str) -> AsyncIterator[str]:
        is_held = self._open_streams < MOST_STREAMS
        self._open_streams += is_held
        try:
            yield f"retry: {_ASK_AGAIN_MS}\n\n"
            told_at = time.monotonic()
            while not self._server.should_exit:
                page = await self._page(query, seen)
                if page is not None:
                    seen, told_at = page[0], time.monotonic()
                    yield f"id: {seen}\nevent: page\ndata: {_to_json(page[1])}\n\n"
                elif time.monotonic() - told_at > _BEAT_SECONDS:
                    told_at = time.monotonic()
                    yield ": still here\n\n"
                if not is_held:
                    return
                await asyncio.sleep(self._views.pause_seconds)
        finally:
            self._open_streams -= is_held


@final
class _Views:
    """Pages of runs, made in one thread."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        self._records = records
        self._next_refresh = [0.0] * len(records)
        self._nonce = secrets.token_hex(4)
        self.pause_seconds = _PAUSE_SECONDS
        """Time to wait before the next page, by the processor time that the last one took."""

    def page(self, query: QueryParams, seen: str) -> tuple[str, Page] | None:
        """Return the mark of a page and the page; None where a browser has `seen` this mark."""
        began = time.thread_time()
        made = self._made(query, seen)
        self.pause_seconds = _pause(time.thread_time() - began)
        return made

    def _made(self, query: QueryParams, seen: str) -> tuple[str, Page] | None:
        options = {name: value for name, value in query.items() if name not in ("run", "page", "token")}
        name = query.get("page", "overview")
        name = name if name in PAGES else "overview"
        run = _number(query.get("run", "0"), len(self._records))
        compares = name in ("plan", "training")
        wanted = range(len(self._records)) if compares else [run]
        for at in wanted:
            self._refresh(at)
        mark = self._nonce + "-" + "-".join(str(self._records[at].revision) for at in wanted)
        if mark == seen:
            return None
        others = [self._records[at] for at in wanted if at != run]
        page = page_of(self._records[run], name, options, others)
        runs = [{"name": record.name, "path": str(record.folder.path)} for record in self._records]
        return mark, {**page, "runs": runs, "pages": PAGES, "mark": mark, "sent": time.time()}

    def _refresh(self, at: int) -> None:
        now = time.monotonic()
        if now < self._next_refresh[at]:
            return
        began = time.thread_time()
        self._records[at].refresh()
        self._next_refresh[at] = now + 0.8 * _pause(time.thread_time() - began)


@final
class _Guard:
    """Refuses what is not a browser of the user's that holds the token, before anything is looked up."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie
        self._names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        refused = self._refuse(scope["method"], headers, query)
        sets_cookie = self._token and secrets.compare_digest(query.get("token", "").encode(), self._token.encode())

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    own[name] = value
                if sets_cookie and refused is None:
                    own["set-cookie"] = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await send(message)

        await (self._app if refused is None else refused)(scope, receive, send_with_headers)

    def _refuse(self, method: str, headers: Headers, query: QueryParams) -> Response | None:
        if method != "GET":
            return PlainTextResponse("Nothing can be changed here: only GET is answered.\n", 405, {"allow": "GET"})
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return PlainTextResponse("This server is not the host that was asked for.\n", 421)
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return PlainTextResponse("Pages of other sites are not answered.\n", 403)
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Pages of other sites are not answered.\n", 403)
        if self._token and not self._may_look(headers, query):
            return PlainTextResponse("Open the link that weft watch has printed: it has the token.\n", 403)
        return None

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this machine.  A name that a foreign server resolves never does, and an
        address cannot be rebound."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return name in self._names

    def _may_look(self, headers: Headers, query: QueryParams) -> bool:
        given = [query.get("token", "")]
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self._cookie:
                given.append(value)
        # In bytes: of text with other letters than ASCII compare_digest knows nothing.
        return any(secrets.compare_digest(each.encode(), self._token.encode()) for each in given)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)  # so that what asks before `serve` waits for it
    except (OSError, OverflowError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LaunchError(
            f"{host}:{port} cannot be listened on: {why}. Leave --port out to get a free one, and --host for this"
            " machine alone."
        ) from None
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_files() -> dict[str, tuple[bytes, str, str]]:
    """Return the files of the page: name → content, media type, tag."""
    found: dict[str, tuple[bytes, str, str]] = {}
    for entry in resources.files("weft.watch").joinpath("page").iterdir():
        if entry.is_file():
            content = entry.read_bytes()
            kind = "text/javascript" if entry.name.endswith(".js") else mimetypes.guess_type(entry.name)[0]
            found[entry.name] = (content, kind or "text/plain", f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def _to_json(page: Page) -> str:
    return json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _pause(work_seconds: float) -> float:
    """Return how long to wait after so much work."""
    return min(max(_PAUSE_SECONDS, work_seconds / _WORK_SHARE), _MOST_PAUSE_SECONDS)


def _number(text: str, limit: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 and int(text) < limit else 0
