"""A list: paged and searched by the server, with search, place and choice in the address.

At most one page of rows is ever in this process or in the browser, however many there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import ApiError, Page
from loraplex_admin.components import address
from loraplex_admin.components.sentences import sentences

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Columns:
    """How rows are shown.

    Attributes:
        cells: a row as the cells of a table, in their order. Cells are text as it is, never Markdown.
        numbers: columns that are set to the right.
        wide, widest: columns whose text is long, and very long.
        help: what a column's name does not say.
    """

    cells: Callable[[Any], dict[str, Any]]
    numbers: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    widest: tuple[str, ...] = ()
    help: Mapping[str, str] = field(default_factory=dict)

    def config(self, names: list[str]) -> dict[str, Any]:
        """As Streamlit takes it."""
        return {
            name: st.column_config.TextColumn(
                width="large" if name in self.widest else "medium" if name in self.wide else None,
                alignment="right" if name in self.numbers else None,
                help=self.help.get(name),
            )
            for name in names
            if name in (*self.numbers, *self.wide, *self.widest) or name in self.help
        }


@dataclass(frozen=True, slots=True)
class Listing:
    """One list of a page.

    Attributes:
        name: begins the keys of its widgets and, unless `is_main`, its names in the address.
        fetch: one page: `fetch(after=..., search=...)`; without a search box `search` is never given.
        columns: how rows are shown.
        empty: what to say, and to do next, while there is nothing at all.
        search_label: of the search box; None: there is none.
        is_main: the page's own list: its place in the address is `q`, `after`, `id`.
        can_open: rows are chosen, to see more of one.
        wraps: rows cannot be opened, and are sentences: shown in whole.
        has_all: what is opened is read from this page's rows, so only what is among them can be.
    """

    name: str
    fetch: Callable[..., Page[Any]]
    columns: Columns
    empty: str
    search_label: str | None = None
    is_main: bool = True
    can_open: bool = True
    wraps: bool = False
    has_all: bool = False

    def show(self) -> str | None:
        """Draw it; the id of the row that is open, if one is (it need not be on this page)."""
        search = self._search_box()
        after = address.get(self._in_address("after"))
        try:
            page = self._page(after, search)
        except ApiError as error:
            if after is None or error.param != "after":
                raise
            # An address somebody has shortened: begin at the beginning.
            address.put(**{self._in_address("after"): None})
            after, page = None, self._page(None, search)
        if not page["data"]:
            if search:
                st.info("Nothing here has that in its name. Try a shorter piece of it.")
            elif after is not None:
                st.info("There is nothing further on.")
            else:
                st.info(self.empty, icon=":material/lightbulb:")
            self._pager(page, after)
            chosen = address.get(self._in_address("id"))
        else:
            chosen = self._table(page)
            self._pager(page, after)
        if self.has_all and chosen not in (None, *(str(row["id"]) for row in page["data"])):
            self.say_gone("it is gone, on another page of the list, or none of yours")
        return chosen

    def refuse(self, error: ApiError) -> None:
        """Say why what is open cannot be shown; an address may be older than the end of what it opens.

        Whether it never was, is gone or belongs to somebody else is not said: the reader may not know.
        """
        if error.status == _NOT_FOUND:
            self.say_gone("it is gone, or none of yours")
        else:
            choices.show_refusal(error)

    def say_gone(self, why: str) -> None:
        """Say that what is open cannot be shown, and offer to close it."""
        st.warning(f"What this address opens is not here: {why}.", icon=":material/link_off:")
        if st.button("Close it", key=f"{self.name}_close"):
            self.open(None)
            st.rerun()

    def open(self, id_: str | None) -> None:
        """Open a row (or none) at the next run, as if it had been chosen."""
        address.put(**{self._in_address("id"): id_})
        st.session_state.pop(f"{self.name}_seen", None)
        st.session_state[f"{self.name}_times"] = st.session_state.get(f"{self.name}_times", 0) + 1

    def go_to_start(self) -> None:
        """Show the first page, for what has just been made is there."""
        st.session_state.pop(f"{self.name}_trail", None)
        address.put(**{self._in_address("after"): None, self._in_address("q"): None})
        choices.empty(f"{self.name}_search")

    def _in_address(self, what: str) -> str:
        return what if self.is_main else f"{self.name}_{what}"

    def _page(self, after: str | None, search: str | None) -> Page[Any]:
        if self.search_label is None:
            return self.fetch(after=after)
        return self.fetch(after=after, search=search)

    def _search_box(self) -> str | None:
        if self.search_label is None:
            return None
        name = self._in_address("q")
        before = address.get(name)
        typed = st.text_input(
            self.search_label,
            value=before or "",
            max_chars=80,
            key=choices.fresh(f"{self.name}_search"),
            icon=":material/search:",
            placeholder="A piece of its name",
        )
        search = typed.strip() or None
        if search != before:
            st.session_state.pop(f"{self.name}_trail", None)
            address.put(**{name: search, self._in_address("after"): None})
        return search

    def _table(self, page: Page[Any]) -> str | None:
        ids = [str(row["id"]) for row in page["data"]]
        rows = [
            {
                name: fmt.cell(text) if isinstance(text, str) else text
                for name, text in self.columns.cells(row).items()
            }
            for row in page["data"]
        ]
        # A choice is a row's place in the table: with other rows it is another table, or the place would
        # point at somebody else.
        times = st.session_state.get(f"{self.name}_times", 0)
        key = f"{self.name}_table_{zlib.crc32(chr(10).join(ids).encode()):x}_{times}"
        config = self.columns.config(list(rows[0]))
        if self.wraps:
            sentences(rows)
            return None
        if not self.can_open:
            st.dataframe(rows, hide_index=True, height="content", column_config=config, key=key)
            return None
        event = st.dataframe(
            rows,
            hide_index=True,
            height="content",
            column_config=config,
            on_select="rerun",
            selection_mode="single-row",
            key=key,
        )
        at = event["selection"]["rows"]
        open_id = address.get(self._in_address("id"))
        seen = st.session_state.get(f"{self.name}_seen")
        if at and at[0] < len(ids):
            open_id = ids[at[0]]
            st.session_state[f"{self.name}_seen"] = (key, open_id)
        elif seen == (key, open_id):
            # It was chosen in this very table, and is not any more.
            open_id = None
            st.session_state.pop(f"{self.name}_seen")
        address.put(**{self._in_address("id"): open_id})
        if open_id is None:
            st.caption("Tick a row to open it.")
        return open_id

    def _pager(self, page: Page[Any], after: str | None) -> None:
        """Keyset pages: on by the last id, back by where we came from, or to the start."""
        if after is None:
            # Where we came from is over, also when a filter has led here.
            st.session_state.pop(f"{self.name}_trail", None)
            if not page["has_more"]:
                return
        trail: list[str] = st.session_state.setdefault(f"{self.name}_trail", [])
        name = self._in_address("after")
        with st.container(horizontal=True):
            if st.button("Previous", key=f"{self.name}_previous", disabled=after is None):
                if trail:
                    trail.pop()
                address.put(**{name: trail[-1] if trail else None})
                st.rerun()
            last_id = page["last_id"]
            if st.button("Next", key=f"{self.name}_next", disabled=not page["has_more"]):
                trail.append(str(last_id))
                address.put(**{name: last_id})
                st.rerun()
