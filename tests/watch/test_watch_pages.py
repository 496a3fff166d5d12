"""Pages in a real browser: what they say of runs whose fault is known, and that everybody can use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import chromium, served
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect
from recorded_runs import MadeUpRun

from weft.watch.report import report_of
from weft.watch.run_record import RunRecord
from weft.watch.server import WatchServer
from weft.watch.views import PAGES

pytestmark = pytest.mark.needs_chromium

SAYS = {
    "overview": "Rank 5 on host host-1 holds the step back by 3",
    "ranks": "Highest in the median is rank 5",
    "pipeline": "The plan's schedule stands above",
    "communication": "Every row whose plan is known carries what the plan says",
    "memory": "holds most, 21",
    "mesh": "rank 5 +4",
    "events": "20 steps had to be done twice",
    "hang": "Nothing says that the run goes on",
    "plan": "Farthest from it is gradients and parameters",
    "training": "validation loss",
}
NAME = "<img src=x onerror=alert(1)>'\"&amp;"


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Iterator[Browser]:
    with chromium(pytestconfig) as started:
        yield started


def slow_run(folder: Path) -> MadeUpRun:
    """A run of two generations, in which rank 5 is slow in its forwards."""
    run = MadeUpRun(folder=folder, data=4, pipeline=2, slow={(5, "forward"): 0.03}, began=17.0)
    run.add(50)
    run.event("checkpoint", step=50, path="x", seconds=0.2, copy_seconds=0.0, problem="")
    run.event("evaluation", step=50, validation_loss=4.2, seconds=1.0, metrics={})
    run.add(30)
    failure = {"failure": "killed", "rank": 3, "host": "host-0", "cause": "rank 3 was killed"}
    steps = {"failed_step": 71, "restored_step": 50, "num_restarts": 1, "plan_change": ""}
    run.event("generation", number=2, world_size=8, plan="x", **steps, **failure)
    run.step = 50
    run.begin(2)
    run.add(50)
    return run


class Tab:
    """One page, and what it asked for and complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._request)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))

    def _request(self, request: Request) -> None:
        self.requests.append(request.url)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def show(self, server: WatchServer, address: str) -> None:
        self.page.goto(f"http://127.0.0.1:{server.port}/#/{address}")
        page = address.partition("?")[0]
        self.page.wait_for_selector(f"nav a[aria-current][data-page={page}]")
        self.page.wait_for_selector("#blocks > .block")


@contextmanager
def tab(browser: Browser, server: WatchServer, theme: str = "light") -> Iterator[Tab]:
    """Open a page of a server by its link."""
    with browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 800}) as context:  # type: ignore[arg-type]
        opened = Tab(context.new_page())
        opened.page.goto(server.url)
        opened.page.wait_for_selector("#blocks > .block")
        yield opened
        assert not opened.complaints
        assert [url for url in opened.requests if not url.startswith(f"http://127.0.0.1:{server.port}/")] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_says_what_it_shows_and_is_accessible(browser: Browser, tmp_path: Path, theme: str) -> None:
    run = slow_run(tmp_path / "run")
    run.end()
    # The rules of WCAG 2.2, A and AA; in the dark the colours alone are others.
    rules = (
        {"values": ["color-contrast"]} if theme == "dark" else {"values": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]}
    )
    only = {"type": "rule" if theme == "dark" else "tag", **rules}
    axe = Axe()
    with served([RunRecord(run.folder)]) as server, tab(browser, server, theme) as opened:
        assert "token" not in opened.page.url
        assert opened.page.locator("html").get_attribute("data-theme") == theme
        for page, title in PAGES.items():
            opened.show(server, f"{page}?rank=5" if page == "ranks" else page)
            expect(opened.page.get_by_role("heading", level=1)).to_have_text(title)
            expect(opened.page.locator("#blocks")).to_contain_text(re.compile(re.escape(SAYS[page]), re.IGNORECASE))
            drawings = opened.page.locator(".block:not(.controls)")
            assert drawings.locator(".says").all_inner_texts() != []
            assert all(says.endswith(".") for says in drawings.locator(".says").all_inner_texts())
            found = axe.run(opened.page, options={"runOnly": only, "resultTypes": ["violations"]})
            bad = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
            assert bad == [], (page, [(each["id"], each["nodes"][0]["html"]) for each in bad])


def test_every_drawing_has_a_table_beside_it(browser: Browser, tmp_path: Path) -> None:
    run = slow_run(tmp_path / "run")
    with served([RunRecord(run.folder)]) as server, tab(browser, server) as opened:
        opened.show(server, "ranks?rank=5")
        drawing = opened.page.locator(".block.heat")
        drawing.get_by_text("Table", exact=True).click()
        expect(drawing.get_by_role("row").nth(1)).to_contain_text("host-1, pipeline 1, data 1")
        for drawn in opened.page.locator(".block.heat, .block.bars").all():
            assert drawn.locator("summary").count() == 1


def test_cells_are_reached_by_arrow_keys(browser: Browser, tmp_path: Path) -> None:
    run = slow_run(tmp_path / "run")
    with served([RunRecord(run.folder)]) as server, tab(browser, server) as opened:
        opened.show(server, "ranks")
        heat = opened.page.locator(".heat canvas[tabindex]")
        heat.focus()
        for key in ("Home", *["ArrowDown"] * 5, "ArrowRight"):
            heat.press(key)
        expect(opened.page.locator(".heat .readout")).to_contain_text(
            "rank 5 (host-1, pipeline 1, data 1), step 52: 10"
        )
        heat.press("Enter")
        expect(opened.page.get_by_role("heading", name="Rank 5 by phase")).to_be_visible()
        opened.show(server, "pipeline")
        gantt = opened.page.locator(".gantt canvas")
        gantt.focus()
        for key in ("ArrowRight", "ArrowRight"):
            gantt.press(key)
        expect(opened.page.locator(".gantt .readout")).to_contain_text("plan, stage 0: backward, microbatch 0, 8 ms")


def test_a_fault_is_named_while_the_run_goes_on(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=4, began=10.0)
    run.add(30)
    with served([RunRecord(run.folder)]) as server, tab(browser, server) as opened:
        verdict = opened.page.locator(".verdicts .finding").first
        expect(verdict).to_contain_text("Nothing is known to hold the run back")
        run.slow = {(2, "optimizer"): 0.03}
        run.catch_up()
        run.add(60)
        expect(verdict).to_contain_text("Rank 2 on host host-1 holds the step back by 3")
        opened.page.get_by_role("button", name="Pause").click()
        step = opened.page.locator("#now")
        expect(step).to_contain_text("step 90")
        run.catch_up()
        run.add(1)
        opened.page.wait_for_timeout(1_500)
        expect(step).to_contain_text("step 90")
        opened.page.get_by_role("button", name="Go on").click()
        expect(step).to_contain_text("step 91")
        status = opened.page.get_by_role("status")
        for _ in range(120):  # it speaks every five seconds; a run that stands still as long says that instead
            if "Rank 2 on host host-1" in (status.text_content() or ""):
                break
            run.catch_up()
            run.add(1)
            opened.page.wait_for_timeout(500)
        expect(status).to_contain_text("Rank 2 on host host-1")


def test_a_run_that_stands_still_shows_who_is_missing(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=4, began=30.0)
    run.add(30)
    run.live(stopped={2: "forward"})
    with served([RunRecord(run.folder)]) as server, tab(browser, server) as opened:
        banner = opened.page.locator(".banner")
        expect(banner).to_contain_text("Rank 2 on host host-1 is in no collective; the others wait in all_reduce")
        banner.get_by_role("link", name="Where every rank is").click()
        row = opened.page.get_by_role("region", name="Where ranks are, table").get_by_role("row").nth(1)
        expect(row).to_contain_text("others wait for it")


def test_names_are_text_whatever_they_are(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / NAME, data=4, began=5.0)
    run.add(20)
    run.event("warning", text="<script>alert(2)</script>", source="weft")
    other = MadeUpRun(folder=tmp_path / "<b>other", data=4, began=5.0)
    other.add(20)
    with served([RunRecord(run.folder), RunRecord(other.folder)]) as server, tab(browser, server) as opened:
        for page in ("events", "plan", "training"):
            opened.show(server, page)
            expect(opened.page.locator("#runs option").first).to_have_text(NAME)
            assert opened.page.locator("#blocks img, #blocks script, #blocks b:text('other')").count() == 0
        opened.show(server, "events")
        expect(opened.page.get_by_text("<script>alert(2)</script>").first).to_be_attached()
        opened.show(server, "plan")
        expect(opened.page.get_by_role("heading", name="Runs side by side")).to_be_visible()
        opened.page.get_by_label("run", exact=True).select_option("<b>other")
        expect(opened.page).to_have_title("Plan and measurement · <b>other · weft")


def test_a_report_needs_no_server_and_no_network(browser: Browser, tmp_path: Path) -> None:
    run = slow_run(tmp_path / NAME)
    run.event("warning", text="</script><script>alert(3)</script>", source="weft")
    run.end()
    record = RunRecord(run.folder)
    file = tmp_path / "report.html"
    file.write_text(report_of(record))
    record.close()
    assert file.stat().st_size < 5_000_000
    with browser.new_context(offline=True) as context:
        opened = Tab(context.new_page())
        opened.page.goto(file.as_uri())
        for page, title in PAGES.items():
            opened.page.get_by_role("link", name=title, exact=True).click()
            expect(opened.page.get_by_role("heading", level=1)).to_have_text(title)
            expect(opened.page.locator("#blocks")).to_contain_text(re.compile(re.escape(SAYS[page]), re.IGNORECASE))
        expect(opened.page.locator("#runs")).to_have_text(run.folder.name)
        opened.page.get_by_role("link", name="All pages").click()
        expect(opened.page.locator("#blocks > .heading")).to_have_count(len(PAGES))
        assert opened.complaints == []
        assert {url for url in opened.requests if not url.startswith("data:")} == {file.as_uri()}


def test_a_page_says_that_its_server_has_ended(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2, began=5.0)
    run.add(20)
    with browser.new_context() as context:
        page = context.new_page()
        with served([RunRecord(run.folder)]) as server:
            page.goto(server.url)
            expect(page.locator("#now")).to_contain_text("step 20")
        expect(page.locator("#now")).to_contain_text("weft watch does not answer")


def test_seven_tabs_go_on_at_once(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2, began=5.0)
    run.add(20)
    with (
        served([RunRecord(run.folder)]) as server,
        browser.new_context() as context,
    ):
        tabs = [context.new_page() for _ in range(7)]
        for page in tabs:
            page.goto(server.url)
        for page in tabs:
            expect(page.locator("#now")).to_contain_text("step 20")
        run.add(5)
        for page in tabs:
            expect(page.locator("#now")).to_contain_text("step 25")


def test_4096_ranks_are_drawn_in_a_tenth_of_a_second(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=512, pipeline=8, slow={(3001, "forward"): 0.03}, began=5.0)
    run.step = 10  # spans are made up for every tenth step, and here they would take the longest
    run.add(6)
    with served([RunRecord(run.folder)]) as server, tab(browser, server) as opened:
        opened.show(server, "ranks")
        expect(opened.page.locator(".heat .says")).to_contain_text(
            "4,096 ranks in steps 11 to 16: a row is the largest of 8"
        )
        expect(opened.page.locator(".heat .says")).to_contain_text("Highest in the median is rank 3000…3007")
        html = opened.page.locator("html")
        times = []
        for _ in range(5):
            run.add(1)
            expect(opened.page.locator(".heat .says")).to_contain_text(f"steps 11 to {run.step}:", timeout=15_000)
            times.append(float(html.get_attribute("data-draw-ms") or "inf"))
        assert min(times) < 100  # what else the machine does can only make it longer
        opened.show(server, "mesh")
        expect(opened.page.locator(".mesh .cell")).to_have_count(2)
