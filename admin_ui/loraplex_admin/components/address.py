"""The page's state that belongs in its address: what is searched, which page of a list, what is open.

Whoever copies the address sends the same view. Names are short because people read them.
"""

from __future__ import annotations

import streamlit as st


def get(name: str) -> str | None:
    """What the address says; None: nothing."""
    value = st.query_params.get(name)
    return value or None


def put(**values: str | None) -> None:
    """Write into the address; None takes a name out. What stays the same is not sent to the browser."""
    for name, value in values.items():
        if value is None or not value:
            if name in st.query_params:
                del st.query_params[name]
        elif st.query_params.get(name) != value:
            st.query_params[name] = value
