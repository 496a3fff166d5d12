"""A headless Chromium of the distribution, driven by Playwright: one for a module of tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pool
import pytest

from weft.process import children_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from weft.watch.run_record import RunRecord
    from weft.watch.server import WatchServer

_DRIVER = pytest.StashKey[int]()
"""Process id of Playwright's driver, whose children the browser's processes are."""


@contextlib.contextmanager
def chromium(config: pytest.Config) -> Iterator[Browser]:
    """Start Chromium.  Its processes, which come and go as it likes, count as left behind by no test."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # the tests say what is to come, and where it matters, when

    before = set(children_of(os.getpid()))
    with sync_playwright() as playwright:
        (config.stash[_DRIVER],) = set(children_of(os.getpid())) - before
        # Chromium's own sandbox does not work for root.
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()
    del config.stash[_DRIVER]


def pids(config: pytest.Config) -> set[int]:
    """Process ids of the browser and its driver, where there is one."""
    driver = config.stash.get(_DRIVER, None)
    return set() if driver is None else {driver, *pool.descendants(driver)}


@contextlib.contextmanager
def served(records: Sequence[RunRecord]) -> Iterator[WatchServer]:
    """Serve runs from a thread."""
    from weft.watch.server import WatchServer

    server = WatchServer(records)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        for record in records:
            record.close()
