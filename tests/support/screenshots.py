"""Pictures of the console that browser tests take, to be looked at and for the docs.

`pytest -m browser --screenshots FOLDER` keeps all of them there; `make screenshots` (`--doc-screenshots`) renews those
that a page of the docs shows: `![...](screenshots/NAME.png)`. Without either none is taken.
"""

from __future__ import annotations

import ast
import io
import re
from dataclasses import dataclass
from pathlib import Path

from loraplex_admin.catalog import PAGES
from PIL import Image
from playwright.sync_api import Page

from tests.support import browser

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "screenshots"
# What takes pictures that a page may show: all that `make screenshots` runs.
TESTS = tuple(
    ROOT / path
    for path in re.findall(r"^PICTURES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
        0
    ].split()
)
# Each page of the console in the docs: with something of everything in it, for a bright and a dark room and for a phone;
# and before there is anything.
LOOKS = ("light", "dark", "narrow", "empty")
MAX_BYTES = 150_000
# The looks of 21 pages, and the steps of the story.
MAX_FILES = len(LOOKS) * len(PAGES) + 10
# Of a clone, for good: every renewal of a picture stays in its history.
MAX_BYTES_IN_ALL = 5_000_000
# Text on two or three colours of ground looks the same, in a third of the bytes.
_COLOURS = 64
_TRIES = 5
_MIN_HEIGHT, _MAX_HEIGHT = 640, 2400
# Streamlit scrolls its own parts, not the document: the window is made as high as what is in them.
_HEIGHT = """() => {
    const end = (selector) => {
        const found = document.querySelector(selector);
        if (!found || !found.getClientRects().length) return 0;
        const padding = parseFloat(getComputedStyle(found).paddingBottom);
        return found.getBoundingClientRect().bottom - padding;
    };
    document.querySelector('[data-testid="stMain"]').scrollTop = 0;
    const contents = ['stMainBlockContainer', 'stSidebarUserContent'].map(
        (name) => end(`[data-testid="${name}"]`));
    return Math.ceil(Math.max(...contents)) + 32;
}"""


def shown_in_docs() -> dict[str, list[str]]:
    """Names of the pictures that pages show, without `.png`, and the pages that show each."""
    found: dict[str, list[str]] = {}
    for page in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"):
        for name in re.findall(r"\(\S*screenshots/([\w.-]+)\.png\)", page.read_text()):
            found.setdefault(name, []).append(page.name)
    return found


def name_of(look: str, path: str) -> str:
    """What one of the console's pages is called in one of `LOOKS`."""
    return f"{path}-{look}"


def taken_by_tests() -> set[str]:
    """Names that tests take pictures under: of every page's looks, and all their literal texts."""
    return {name_of(look, page.path) for look in LOOKS for page in PAGES} | {
        node.value
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@dataclass
class Pictures:
    """Takes them, and keeps what is wanted.

    Attributes:
        folder: where all are kept; None: nowhere.
        is_for_docs: those that the docs show are renewed.
    """

    folder: Path | None = None
    is_for_docs: bool = False

    def take(self, page: Page, name: str) -> None:
        """One of the whole page, if it is wanted, under a name that no other picture has."""
        is_shown = self.is_for_docs and name in shown_in_docs()
        if self.folder is None and not is_shown:
            return
        png = _whole(page)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}.png").write_bytes(png)
        if is_shown:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.png").write_bytes(_small(png))


def _whole(page: Page) -> bytes:
    browser.settle(page)
    page.mouse.move(0, 0)  # what it points at grows tools
    before = page.viewport_size
    assert before is not None
    height = max(_MIN_HEIGHT, min(_MAX_HEIGHT, int(page.evaluate(_HEIGHT))))
    page.set_viewport_size({"width": before["width"], "height": height})
    try:
        for _ in range(_TRIES):
            browser.settle(page)
            png = page.screenshot(animations="disabled")
            # Live figures are drawn anew every few seconds, and are pale meanwhile.
            if not page.locator('[data-stale="true"]').count():
                break
        return png
    finally:
        page.set_viewport_size(before)


def _small(png: bytes) -> bytes:
    with Image.open(io.BytesIO(png)) as image:
        # By k-means: else what is rare and bright (the logo, a badge) turns grey.
        few = image.convert("RGB").quantize(_COLOURS, kmeans=1, dither=Image.Dither.NONE)
    out = io.BytesIO()
    few.save(out, "PNG", optimize=True)
    assert len(out.getvalue()) <= MAX_BYTES, f"{len(out.getvalue())} bytes: show less of the page"
    return out.getvalue()
