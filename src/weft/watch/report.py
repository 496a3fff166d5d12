"""A run as one HTML file: the pages of `weft watch`, with their figures, styles and scripts inside of it.

It opens without a server and without a network, in ten years, too.  Its scripts are those that the server serves: each
module is a `data:` address in an import map, under the name by which the others import it.
"""

from __future__ import annotations

import base64
import html
import json
import re
from importlib import resources

from weft.watch.run_record import RunRecord
from weft.watch.views import PAGES, Page, page_of

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'"
)
_IMPORT = re.compile(r'^(import .* from )"\./(\w+\.js)";$', re.MULTILINE)


def report_of(record: RunRecord) -> str:
    """Return the HTML of a run's report: every page as it is now."""
    folder = resources.files("weft.watch").joinpath("page")
    files = {entry.name: entry.read_text() for entry in folder.iterdir() if entry.is_file()}
    pages = {name: _kept(page_of(record, name)) for name in PAGES}
    modules = {
        f"weft/{name}": _address(_IMPORT.sub(r'\1"weft/\2";', text))
        for name, text in files.items()
        if name.endswith(".js")
    }
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">\n'
        f"<style>\n{files['uPlot.css']}\n{files['style.css']}</style>\n"
        f'<script type="importmap">{_in_html({"imports": modules})}</script>\n'
        f'<script type="application/json" id="kept">{_in_html(pages)}</script>\n'
    )
    body = re.sub(r"^<(?:link|script) .*\n", "", files["index.html"], flags=re.MULTILINE)
    body = body.replace("<title>weft watch</title>", f"<title>{html.escape(record.name)}</title>")
    return body.replace("</head>", f"{head}</head>").replace(
        "</body>", '<script type="module">import "weft/app.js";</script>\n</body>'
    )


def _kept(page: Page) -> Page:
    """Leave out what a page without a server cannot do."""
    return {**page, "blocks": [block for block in page["blocks"] if block["kind"] not in ("controls", "banner")]}


def _address(text: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()


def _in_html(value: object) -> str:
    """Return JSON that ends no element, whatever names a run has."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
