"""The dashboard of a run that this process is about to begin, served beside it: `weft train --watch`."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from weft.errors import LaunchError
from weft.events import RunFolder
from weft.watch.run_record import RunRecord
from weft.watch.server import WatchServer

_LOOK_SECONDS = 0.2


@contextmanager
def page_beside(folder: Path | None) -> Generator[None]:
    """Serve the dashboard of the run that this process begins meanwhile, until the block is left.

    It is a thread of this process: it prints its link once the run has begun, and opens it where there is a desktop.
    Nothing of the run waits for it, and a run that is refused has none.

    Args:
        folder: of the run; None: the one in `runs/` that this process will own.
    """
    page = _Page(folder)
    thread = threading.Thread(target=page.serve, name="weft-watch-beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        page.stop()
        thread.join()


class _Page:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._server: WatchServer | None = None

    def serve(self) -> None:
        """Wait for the run, and show it until `stop`."""
        while not self._is_over.wait(_LOOK_SECONDS):
            for folder in self._folders():
                try:
                    record = RunRecord(folder)
                except LaunchError:  # the folder is there a moment before anything is in it
                    continue
                with closing(record):
                    self._show(record)
                return

    def stop(self) -> None:
        with self._lock:
            self._is_over.set()
            if self._server is not None:
                self._server.stop()

    def _show(self, record: RunRecord) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            try:
                self._server = WatchServer([record])
            except LaunchError as error:  # the run is worth more than its page
                print(f"watch     no page: {error}", flush=True)
                return
        print(f"watch     {self._server.url}", flush=True)
        if _has_desktop():
            webbrowser.open(self._server.url)
        self._server.serve()

    def _folders(self) -> Iterator[Path]:
        """Yield the run's folder once this process owns it."""
        folders = [self._folder] if self._folder is not None else Path("runs").glob("*")
        for folder in folders:
            owner = RunFolder(folder).owner
            if owner is not None and owner.is_here and owner.pid == os.getpid() and not owner.ended:
                yield folder


def _has_desktop() -> bool:
    """Whether a browser would open in a window of its own, and not in this terminal."""
    if sys.platform == "darwin":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
