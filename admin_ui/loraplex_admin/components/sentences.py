"""A small table of sentences: its cells wrap, so that each is read in whole."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from loraplex_admin import format as fmt


def sentences(rows: Sequence[dict[str, str]]) -> None:
    """Draw it. Cells are text as it is; for more than a page of rows a list is the better table."""
    st.table(
        [{name: fmt.literal(cell) for name, cell in row.items()} for row in rows],
        border="horizontal",
        hide_index=True,
    )
