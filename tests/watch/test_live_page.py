"""The page that `weft watch RUN` serves names a slow rank, and a stopped one, of a living run in a real browser."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import chromium
from living_run import WEFT, LivingRun, living_run
from playwright.sync_api import Browser, Page, expect

from weft.watch.accounting import phase_title

pytestmark = pytest.mark.needs_chromium

PHASES = ("data_wait", "forward", "backward", "optimizer")


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Iterator[Browser]:
    with chromium(pytestconfig) as started:
        yield started


@contextmanager
def watched(run: LivingRun, browser: Browser) -> Generator[Page]:
    """Open the link that `weft watch` prints."""
    process = subprocess.Popen([WEFT, "watch", str(run.folder)], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        link = next(line.split()[1] for line in process.stdout if line.startswith("open"))
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(link)
            expect(page.locator("#now")).to_contain_text("running, step")
            yield page
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def seconds_to_name(run: LivingRun, page: Page, rank: int, phase: str) -> float:
    """Seconds from the first slow step until the first rank that a user reads of is this one, in this phase."""
    run.slow(rank, phase, 0.03)
    began = time.monotonic()
    expect(page.locator(".verdicts .finding", has_text="holds the step back").first).to_have_text(
        re.compile(rf"^Rank {rank} on host \S+ holds the step back by .* in its phase “{phase_title(phase)}”\.$"),
        timeout=30_000,
    )
    return time.monotonic() - began


@pytest.mark.parametrize(("number", "most"), [(1, 30.0), (20, 5.0)], ids=["once", "twenty times"])
def test_a_rank_that_becomes_slow_is_named(browser: Browser, tmp_path: Path, number: int, most: float) -> None:
    draw, took, before = random.Random(40 + number), list[float](), None
    with living_run(tmp_path) as run, watched(run, browser) as page:
        while len(took) < number:
            fault = draw.randrange(4), draw.choice(PHASES)
            if fault != before:
                page.wait_for_timeout(draw.uniform(0.0, 2_000.0))
                took.append(seconds_to_name(run, page, *fault))
                before = fault
    print("seconds to the name:", *(f"{seconds:.1f}" for seconds in took))
    assert max(took) < most


def test_a_rank_that_is_stopped_is_named_with_the_collective_of_the_others(browser: Browser, tmp_path: Path) -> None:
    draw, took = random.Random(40), list[float]()
    with living_run(tmp_path) as run, watched(run, browser) as page:
        for _ in range(5):
            rank = draw.randrange(4)
            page.wait_for_timeout(draw.uniform(0.0, 2_000.0))
            banner = page.locator(".banner")
            with run.stopped(rank):
                began = time.monotonic()
                expect(banner).to_contain_text(
                    re.compile(
                        rf"No step for .* s: Rank {rank} on host \S+ is stopped \(SIGSTOP\);"
                        r" the others wait in (all_gather|all_reduce|reduce_scatter|broadcast) of the \w+ axis"
                    ),
                    timeout=30_000,
                )
                took.append(time.monotonic() - began)
            expect(banner).to_have_count(0, timeout=30_000)
    print("seconds to the stopped rank:", *(f"{seconds:.1f}" for seconds in took))
    assert max(took) < 15
