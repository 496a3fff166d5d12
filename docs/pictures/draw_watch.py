"""Take the pictures of `weft watch` in docs/pictures: each page of a run, light and dark, by a headless Chromium.

weft train examples/demo/recipe.toml --plan examples/demo/plan.toml --set recipe.run.steps=120
python docs/pictures/draw_watch.py runs/demo-…
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from weft.watch.run_record import RunRecord
from weft.watch.server import WatchServer
from weft.watch.views import PAGES

FOLDER = Path(__file__).parent
WIDTH, MOST_HEIGHT = 1280, 1500
COLOURS = 256
"""Colours that a picture keeps: a page has few, and so the file is a quarter as large."""


def take(page: Page, name: str, path: Path) -> None:
    page.wait_for_selector(f"nav a[aria-current][data-page={name}]")
    page.wait_for_selector("#blocks > .block")
    page.wait_for_timeout(600)  # canvases are drawn when their size is known
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture = picture.crop((0, 0, WIDTH, min(picture.height, MOST_HEIGHT)))
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def main(run: Path) -> None:
    server = WatchServer([RunRecord(run)])
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for theme in ("light", "dark"):
                page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme=theme)
                page.goto(server.url)
                for name in PAGES:
                    page.goto(f"http://127.0.0.1:{server.port}/#/{name}")
                    take(page, name, FOLDER / f"watch-{name}-{theme}.png")
            browser.close()
    finally:
        server.stop()
        thread.join()


main(Path(sys.argv[1]))
