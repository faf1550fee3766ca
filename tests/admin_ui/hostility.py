"""How a page in a real browser is judged that is full of what somebody wrote to make more of it than words.

A page is opened twice with the same things on it: once with a harmless word in place of every text that
people chose, once with hostile ones. Nothing may have been run, fetched or made of the second that the first has not:
every kind of element is there as often, and each text is read, letter for letter, as often as the word was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page

from tests.admin_ui.corpus import LONG, NAMES
from tests.support import browser

WORD: Final = "Harmlessword"
# As much as one text shows before it is cut (`format._MOST_CHARS`), less what stands between.
_GROUP_CHARS: Final = 270
# No sentence of ours with a text or two in it is so long.
_ENDLESS_CHARS: Final = 2000
# Between two of them, so that one that opens something does not hide the next where the escape is broken.
_BETWEEN: Final = "\n\n"
# Of each long one at the beginning of the text that all of them are in.
_LONG_CHARS: Final = 50

_WATCH: Final = """
(() => {
    const seen = { ran: [], drawn: new Set(), made: [] };
    window.__seen = seen;
    let top = window;
    try { top = window.top.__seen ? window.top : window; } catch (error) { /* another origin */ }
    for (const name of ['alert', 'confirm', 'prompt', 'print', 'open'])
        window[name] = (...given) => { top.__seen.ran.push(`${name}(${given})`); };
    for (const name of ['fillText', 'strokeText']) {
        const before = CanvasRenderingContext2D.prototype[name];
        CanvasRenderingContext2D.prototype[name] = function (text, ...rest) {
            seen.drawn.add(String(text));
            return before.call(this, text, ...rest);
        };
    }
    // Also what was there for a moment only.
    const alive = ALIVE;
    new MutationObserver((changes) => {
        for (const change of changes)
            for (const node of change.addedNodes) {
                if (node.nodeType !== 1) continue;
                for (const one of [node, ...node.querySelectorAll('*')])
                    if (one.matches(alive)) seen.made.push(one.outerHTML.slice(0, 200));
            }
    }).observe(document, { childList: true, subtree: true });
})();
"""
# What Streamlit never makes of a page of ours: whatever looks so came out of a text.
_ALIVE: Final = (
    "body iframe, body object, body embed, body form[action], body base, body meta, body link[href*='example'], "
    "[onerror], [onload], [onmouseover], [ontoggle], [onclick], [srcdoc], a[href^='javascript:'], a[href^='data:'], "
    "[href*='example.com'], [src*='example.com'], img[src='x'], body script:not([src]), math:not(.katex math), "
    "b, details[ontoggle]"
)
# Not `code`, which a refusal of a name has that another has not: a text in it would not be read as it is.
# Elements that Markdown makes, and Streamlit's own words in it: counted, as our own sentences have some of them.
_COUNTED: Final = """() => {
    const tags = 'a img strong em del h1 h2 h3 h4 h5 h6 ul ol li table blockquote pre hr sup sub svg script style '
        + 'iframe math video audio details mark input textarea button';
    const counts = {};
    for (const tag of tags.split(' ')) counts[tag] = document.body.getElementsByTagName(tag).length;
    const others = {
        katex: '.katex', icon: '[data-testid=stIconMaterial]', colour: '.stMarkdownColoredText, [class*=colored-text]',
        badge: '.stMarkdownBadge', small: '.stMarkdownSmall', styled: '[data-testid=stMarkdownContainer] span[style]',
        markdown_link: '[data-testid=stMarkdownContainer] a', markdown_image: '[data-testid=stMarkdownContainer] img',
        markdown_span: '[data-testid=stMarkdownContainer] span', paragraph: '[data-testid=stMarkdownContainer] p',
        error: '[data-testid=stException]', alert: '[data-testid=stAlert]', grid: '[data-testid=stDataFrame]',
    };
    for (const [name, selector] of Object.entries(others))
        counts[name] = document.body.querySelectorAll(selector).length;
    return counts;
}"""
_READ: Final = """() => {
    const words = [], cells = [], codes = [];
    const walk = (node, into) => {
        if (node.nodeType === 3) { into.push(node.data); return; }
        if (node.nodeType !== 1 || /^(SCRIPT|STYLE|NOSCRIPT)$/.test(node.tagName)) return;
        if (node.matches('[data-testid=stDataFrame] *')) into = cells;
        else if (node.matches('pre, textarea, [data-testid=stText]')) into = codes;
        if (node.matches('p, li, div, td, h1, h2, h3, pre, label')) into.push('\\u0001');
        for (const child of node.childNodes) walk(child, into);
        if (node.matches('p, li, div, td, h1, h2, h3, pre, label')) into.push('\\u0001');
        if (node.matches('input, textarea')) codes.push('\\u0001' + node.value + '\\u0001');
    };
    walk(document.body, words);
    return {
        words: words.join(''), cells: cells.join(''), codes: codes.join(''), title: document.title,
        drawn: [...window.__seen.drawn].join('\\u0001'), ran: window.__seen.ran, made: window.__seen.made,
    };
}"""
_FILLED: Final = """() => [...document.querySelectorAll('[data-testid=stDataFrame]')]
    .filter((one) => one.getClientRects().length).every((one) => one.querySelector('[role=grid] td'))"""
_SIGNS: Final = re.compile("[\u202a-\u202e\u2066-\u2069\u2060\ufffd]")
# Isolates are ours where a text is written from right to left; these turn what stands around.
_TURNS: Final = re.compile("[\u202a-\u202e]")


@dataclass(frozen=True, slots=True)
class Group:
    """Texts that stand in one value.

    Attributes:
        texts: what must be read of it.
        value: all of them.
    """

    texts: tuple[str, ...]
    value: str


def groups() -> list[Group]:
    """All of the corpus: as many at a time as a value has room for, and one of those that are endless."""
    packed: list[list[str]] = [[]]
    for text in NAMES:
        if len(_BETWEEN.join([*packed[-1], text])) > _GROUP_CHARS:
            packed.append([])
        packed[-1].append(text)
    begun = tuple(text[:_LONG_CHARS] for text in LONG)
    return [
        *(Group(tuple(texts), _BETWEEN.join(texts)) for texts in packed),
        Group(begun, _BETWEEN.join((*begun, LONG[0]))),
    ]


@dataclass(frozen=True, slots=True)
class Look:
    """What is on a page: text outside of tables, in their cells, in code and fields, drawn; elements by kind."""

    words: str
    cells: str
    codes: str
    drawn: str
    title: str
    ran: list[str]
    made: list[str]
    counts: dict[str, int]

    @classmethod
    def at(cls, page: Page) -> Look:
        """The page as it stands, its tables filled."""
        page.wait_for_function(_FILLED)
        return cls(**page.evaluate(_READ), counts=page.evaluate(_COUNTED))

    def num(self, text: str, where: str) -> int:
        """How often a text is read there as it is."""
        return _plain(getattr(self, where)).count(_plain(text))


def _plain(text: str) -> str:
    """Without what the console adds (joiners, isolates) or puts in the place of signs, and JSON's escapes."""
    return re.sub(r"\s+", " ", _SIGNS.sub("", text).replace("\\", ""))


@dataclass
class Watched:
    """A page of somebody who is logged in, and all that went wrong on it.

    Attributes:
        page: the browser's.
        trouble: dialogs, errors of scripts, requests to elsewhere.
    """

    page: Page
    trouble: list[str] = field(default_factory=list)

    def look(self, url: str, path: str) -> Look:
        """Open an address and read it."""
        browser.visit(self.page, url, path)
        return Look.at(self.page)


@contextmanager
def watched(chromium: Browser, url: str, cookies: Sequence[Any] = ()) -> Iterator[Watched]:
    """A page, and what it asks of any other host than the console's noted."""
    page = browser.open_page(chromium)
    found = Watched(page)
    host = urlsplit(url).netloc
    page.context.add_init_script(_WATCH.replace("ALIVE", repr(_ALIVE)))
    page.on("dialog", lambda one: (found.trouble.append(f"dialog {one.message}"), one.dismiss()))
    page.on("pageerror", lambda error: found.trouble.append(f"error {error}"))
    page.context.on("page", lambda one: found.trouble.append(f"opened {one.url}"))

    def watch(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != host:
            found.trouble.append(f"fetched {request.url}")

    # Not by a route, which would keep the browser from its cache, and every page from being quick.
    page.context.on("request", watch)
    page.context.add_cookies(list(cookies))
    try:
        yield found
    finally:
        page.context.close()


def judge(look: Look, harmless: Look, group: Group, num_values: int = 1) -> list[str]:
    """What is wrong with a page that has this group in place of the harmless word; nothing: all of it is inert.

    Args:
        num_values: in so many values are the group's texts, not in each of them.
    """
    wrong = [f"ran {one}" for one in look.ran] + [f"made {one}" for one in look.made]
    wrong += [
        f"{look.counts[kind]} {kind}, harmless {num}"
        for kind, num in harmless.counts.items()
        if look.counts[kind] != num
    ]
    if look.title != harmless.title:
        wrong.append(f"the title became {look.title[:100]!r}")
    # Only where it is there to be copied, or typed, is a text given with its direction signs.
    for where in ("words", "cells", "drawn"):
        turns = _TURNS.search(getattr(look, where))
        if turns is not None:
            near = getattr(look, where)[max(0, turns.start() - 30) : turns.end() + 10]
            wrong.append(f"direction sign U+{ord(turns[0]):04X} in {where}: {near!a}")
    longest = max(map(len, "\u0001".join((look.words, look.cells, look.drawn)).split("\u0001")))
    if longest > _ENDLESS_CHARS:
        wrong.append(f"a text of {longest} characters")
    for text in group.texts:
        shown = text.strip()
        expected = harmless.num(WORD, "words") // num_values
        if look.num(shown, "words") < expected:
            wrong.append(
                f"{shown!r} is read {look.num(shown, 'words')} times as it is, the word {expected}"
            )
        if harmless.num(WORD, "cells") and not look.num(shown, "cells"):
            wrong.append(f"{shown!r} is in no cell as it is")
        if harmless.num(WORD, "codes") and not look.num(shown, "codes"):
            wrong.append(f"{shown!r} is in no code or field as it is")
    return wrong
