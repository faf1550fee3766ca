"""Everything that the console writes other people's words into, by itself: a Streamlit script for browser tests.

`?surface=title&hostile=1` draws that one for each text of the corpus; without `hostile` each time with a harmless word.
`&mutant=literal` breaks that escape first: what judges the page must find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import streamlit as st
import streamlit.components.v1 as frame
from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import ApiError
from loraplex_admin.components import charts, confirm, forms, one_time, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing

from tests.admin_ui.corpus import CORPUS
from tests.admin_ui.hostility import WORD, groups


def _heading(draw: Callable[[str], Any]) -> Callable[[str, int], None]:
    def surface(text: str, _: int) -> None:
        draw(fmt.literal(text))

    return surface


def _sentence(draw: Callable[[str], Any]) -> Callable[[str, int], None]:
    def surface(text: str, _: int) -> None:
        draw(f"The one called {fmt.code(text)} is **there** since now.")

    return surface


def _refusal(text: str, _: int) -> None:
    choices.show_refusal(ApiError(text, status=422, code="invalid_request", param=text))


def _notice(text: str, _: int) -> None:
    st.session_state["notice"] = f"{fmt.code(text)} is *there*."
    choices.show_notice()


def _fold(text: str, number: int) -> None:
    with st.expander(fmt.literal(text), key=f"fold_{number}"):
        st.caption("in it")


def _fold_of_code(text: str, number: int) -> None:
    with st.expander(f"Lost: {fmt.code(text)}", key=f"fold_{number}"):
        st.caption("in it")


def _chooser(text: str, number: int) -> None:
    Field("one", "One", "choice", options=[text]).draw(f"chooser_{number}", text)


def _choosers(text: str, number: int) -> None:
    Field("some", "Some", "choices", options=[text]).draw(f"choosers_{number}", [text])


def _confirm(text: str, number: int) -> None:
    confirm.by_name(
        "End it", name=text, consequence="It **ends**.", button="End it", key=f"confirm_{number}"
    )


def _secret(text: str, number: int) -> None:
    one_time.keep(f"slot_{number}", text, "sk-secret")
    one_time.show(f"slot_{number}")


def _field(text: str, number: int) -> None:
    Field("name", "Name").draw(f"field_{number}", text)
    Field("about", "About", "area").draw(f"area_{number}", text)


def _tables(texts: list[str]) -> None:
    st.dataframe(
        [{"name": fmt.cell(text)} for text in texts],
        hide_index=True,
        height="content",
        key="table",
        column_config={"name": st.column_config.TextColumn(width="large")},
    )


def _list(texts: list[str]) -> None:
    rows = [{"id": f"key_{number}", "name": text} for number, text in enumerate(texts)]
    page = {"data": rows, "first_id": None, "last_id": None, "has_more": False}
    Listing(
        "list",
        fetch=lambda **_: page,  # type: ignore[arg-type, return-value]
        columns=Columns(lambda one: {"name": fmt.cell(one["name"])}, widest=("name",)),
        empty="Nothing.",
    ).show()


def _difference(texts: list[str]) -> None:
    fields = [Field(f"f{number}", f"Field {number}") for number in range(len(texts))]
    was = {one.name: "before" for one in fields} | {"version": 1}
    now = {one.name: text for one, text in zip(fields, texts, strict=True)} | {"version": 2}
    st.session_state["form_opened"] = was
    st.session_state["form_mine"] = {fields[0].name: "mine"}
    forms.edit("form", was, fields, save=lambda *_: now, reload=lambda: now)


def _charts(draw: Callable[[list[str], str], None]) -> Callable[[list[str]], None]:
    """A few texts in each, so that all of them are written beside it."""

    def surface(texts: list[str]) -> None:
        for first in range(0, len(texts), 3):
            draw(texts[first : first + 3], f"chart_{first}")

    return surface


def _lines(texts: list[str], key: str) -> None:
    rows = [{"at": 60 * at, "n": at, "who": text} for text in texts for at in (1, 2)]
    charts.lines(rows, x="at", y="n", series="who", title="T", unit="u", empty="Nothing.", key=key)


def _bars(texts: list[str], key: str) -> None:
    charts.bars([(text, 1.0) for text in texts], title="T", unit="u", empty="Nothing.", key=key)


def _split(texts: list[str], key: str) -> None:
    charts.split([(text, 1 / len(texts)) for text in texts], title="T", key=key)


def _sidebar(text: str, _: int) -> None:
    with st.sidebar:
        st.caption(f"{fmt.literal(text)} · admin")


# One text at a time.
EACH: Final[dict[str, Callable[[str, int], Any]]] = {
    "title": _heading(st.title),
    "subheader": _heading(st.subheader),
    "markdown": _heading(st.markdown),
    "list item": lambda text, _: st.markdown(f"- {fmt.literal(text)}"),
    "error": lambda text, _: st.error(fmt.literal(text), icon=":material/error:"),
    "error sentence": lambda text, _: st.error(f"**Refused.** {fmt.literal(text)}"),
    "caption of code": _sentence(st.caption),
    "warning of code": _sentence(st.warning),
    "success of code": _sentence(st.success),
    "badge": lambda text, _: status.badge(text),
    "refusal": _refusal,
    "notice": _notice,
    "fold": _fold,
    "fold of code": _fold_of_code,
    "chooser": _chooser,
    "choosers": _choosers,
    "confirmation": _confirm,
    "secret": _secret,
    "field": _field,
    "text": lambda text, _: st.text(text),
    "code": lambda text, _: st.code(text, language=None, wrap_lines=True),
    "sidebar": _sidebar,
}
# All of them in one.
TOGETHER: Final[dict[str, Callable[[list[str]], None]]] = {
    "table": _tables,
    "list": _list,
    "difference": _difference,
    "lines": _charts(_lines),
    "bars": _charts(_bars),
    "split": _charts(_split),
}
SURFACES: Final = (*EACH, *TOGETHER)


def _naive_code(text: str) -> str:
    return f"`{text}`"


def _run(text: str) -> None:
    if text.startswith(
        "<script>"
    ):  # a frame for each of the others would keep the browser for long
        frame.html(text, height=20)


# What is broken in each, and on which surface that must show.
MUTANTS: Final[dict[str, tuple[str, Any, str, Any]]] = {
    "literal": ("title", fmt, "literal", lambda text: text),
    "literal in a refusal": ("refusal", fmt, "literal", lambda text: text),
    "literal in a fold": ("fold", fmt, "literal", lambda text: text),
    "literal in a badge": ("badge", fmt, "literal", lambda text: text),
    "literal in the sidebar": ("sidebar", fmt, "literal", lambda text: text),
    "punctuation": ("title", fmt, "_PUNCTUATION", frozenset("*_")),
    "joiner": ("title", fmt, "_JOINER", ""),
    "joiner in code": ("caption of code", fmt, "_JOINER", ""),
    "code": ("caption of code", fmt, "code", lambda text: f"`{text}`"),
    "code in a notice": ("notice", fmt, "code", lambda text: f"`{text}`"),
    "code in a secret": ("secret", fmt, "code", lambda text: f"`{text}`"),
    "length": ("caption of code", fmt, "_shorten", lambda text: text),
    "direction": ("title", fmt, "_isolated", lambda text: text),
    "cell": ("table", fmt, "cell", lambda text: text),
    "cell in a list": ("list", fmt, "cell", lambda text: text),
    "cell in a difference": ("difference", fmt, "cell", lambda text: text),
    "cell in a chooser": ("choosers", fmt, "cell", lambda text: text),
    "cell in bars": ("bars", fmt, "cell", lambda text: text),
    "cell in lines": ("lines", fmt, "cell", lambda text: text),
    "cell in a split": ("split", fmt, "cell", lambda text: text),
    "text": ("text", st, "text", st.markdown),
    "code block": ("confirmation", st, "code", lambda text, **_: st.markdown(text)),
    "html": ("text", st, "text", st.html),
    "script": ("text", st, "text", _run),
}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """With one escape out of order."""
    if not name:
        yield
        return
    _, where, what, instead = MUTANTS[name]
    with mock.patch.object(where, what, instead):
        yield


CHARTS: Final = ("lines", "bars", "split")
# So much of a label beside a chart, and of any text, is surely shown.
_LABEL_CHARS: Final = 8
_SHOWN_CHARS: Final = 50


def texts_of(surface: str) -> list[str]:
    """What must be read there."""
    num_chars = _LABEL_CHARS if surface in CHARTS else _SHOWN_CHARS
    return [_given(surface, text)[:num_chars] for text in CORPUS]


def _given(surface: str, text: str) -> str:
    # A badge writes `rolled_back` as two words.
    return (text.replace("_", " ") if surface == "badge" else text).strip()


def values_of(surface: str, *, is_hostile: bool) -> list[str]:
    """What stands there: the texts, or as many harmless words; told apart where one would not be there twice."""
    if surface == "difference":  # which shows as many rows as a table has room for
        return [one.value if is_hostile else WORD for one in groups()]
    if is_hostile:
        return [_given(surface, text) for text in CORPUS]
    number = " {}" if surface in CHARTS else ""
    return [WORD + number.format(at) for at in range(len(CORPUS))]


def main() -> None:
    """Draw what the address names."""
    st.set_page_config(page_title="Surfaces", layout="wide")
    surface = st.query_params["surface"]
    texts = values_of(surface, is_hostile="hostile" in st.query_params)
    with broken(st.query_params.get("mutant")):
        st.title("Surfaces")
        if surface in TOGETHER:
            TOGETHER[surface](texts)
        else:
            for number, text in enumerate(texts):
                EACH[surface](text, number)


if __name__ == "__main__":
    main()
