"""Names and answers that are more than words to somebody: on every page that shows them, they are words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from loraplex_admin import format as fmt
from loraplex_admin.api import Api
from loraplex_admin.catalog import PAGES
from streamlit.testing.v1 import AppTest

from tests.admin_ui.altered import Altered
from tests.admin_ui.corpus import CORPUS, LONG, NAMES
from tests.admin_ui.driver import access_of, checked, marked, open_page, table
from tests.admin_ui.stand import Stand, cookie_of

# What a page must never give to Streamlit as Markdown: the text itself, for each of these is something in it.
_ACTIVE = re.compile(r"[*_`<>\[\]$:#~|\\]|https?://|->|<-|--")


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def test_keys_with_hostile_names_are_listed_and_opened_as_they_are(
    admin: Api, full: dict[str, Any]
) -> None:
    # The API refuses what could break a log; whatever it takes is shown as it is.
    assert len(full["keys"]) >= len(NAMES) - 1

    test = open_page("keys", admin, full)
    names = list(table(test, "keys")["name"])
    assert names == [fmt.cell(key["name"]) for key in reversed(full["keys"])][: len(names)]
    test = open_page("keys", admin, full, id=full["keys"][0]["id"])
    for key in full["keys"]:
        test.query_params["id"] = key["id"]
        given = marked(checked(test.run()))
        assert fmt.literal(key["name"]) in [one.value for one in test.subheader]
        if _ACTIVE.search(key["name"]):
            assert key["name"] not in unescaped(given), key["name"]
    assert full["name"] not in marked(open_page("tenants", admin, id=full["id"]))


ACTIVE = re.compile(
    r"<[a-z!/]|\]\(|https?://|(?<![a-z]):material/|\u202e|```|\$\$?|javascript:|\*\*.*\(alert|:[a-z]+\["
)
# Our own words.
_OURS = re.compile(r":(?:green|orange|red|gray|blue)-badge\[|^:material/[a-z_]+:$", flags=re.M)


def unescaped(text: str) -> str:
    """What is left for Streamlit to read as more than words: without code spans, escapes, our own badges and icons."""
    plain = re.sub(r"\\[!-/:-@\[-`{-~]", "\N{MIDDLE DOT}", _outside_of_code(text))
    return _OURS.sub("", plain)


def _outside_of_code(text: str) -> str:
    return re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.S)


PATHS = [page.path for page in PAGES]
# Nine at a time: more would be cut where the page joins them.
SLICES = range(0, len(CORPUS), 9)


def hostile_page(
    platform: Stand, admin: Api, path: str, texts: Any, full: dict[str, Any]
) -> tuple[AppTest, int]:
    """The page with what is open on it, of an API in whose answers all that people wrote is `texts`; how often that was."""
    altered = Altered()
    altered.texts = texts
    try:
        api = Api(platform.control_url, cookie_of(admin), transport=altered)
        opened = full["opened"].get(path, {})
        return open_page(path, api, full, access=access_of(admin), **opened), altered.num_changed
    finally:
        altered.close()


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first == SLICES[0] else [pytest.mark.slow])
        for first in SLICES
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_every_page_shows_what_an_api_full_of_it_says(
    path: str, first: int, platform: Stand, admin: Api, full: dict[str, Any]
) -> None:
    test, num_changed = hostile_page(platform, admin, path, CORPUS[first : first + 9], full)

    for line in unescaped(marked(test)).splitlines():
        assert not ACTIVE.search(line), line[:300]
        assert len(line) < 6000, line[:200]
    print(f"{path}: {num_changed} hostile values")


def test_an_escape_that_is_left_out_is_found(
    platform: Stand, admin: Api, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "literal", lambda text: text)

    test, _ = hostile_page(platform, admin, "tenants", ("<img src=x onerror=alert(1)>",), full)

    assert ACTIVE.search(unescaped(marked(test)))


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_what_is_endless_is_cut_and_says_so(text: str) -> None:
    for shown in (fmt.literal(text), fmt.code(text), fmt.cell(text)):
        assert len(shown) < 1200
        assert "more characters" in shown.replace("\\", "")


def test_direction_signs_are_seen_and_kept_from_the_sentence() -> None:
    assert fmt.cell("user\u202egpj.exe") == "user\ufffdgpj.exe"
    for shown in (fmt.code("user\u202egpj.exe"), fmt.literal("user\u202egpj.exe")):
        assert "\u202e" not in shown
        assert shown.strip("`")[0] == "\u2068"
        assert shown.strip("`")[-1] == "\u2069"
    assert fmt.code("שלום") == "`\u2068שלום\u2069`"
    assert fmt.literal("plain") == "plain"


def test_the_corpus_travels_through_json_as_it_is() -> None:
    for text in CORPUS:
        assert json.loads(json.dumps(text)) == text
