"""Connections to the control API, kept open between the runs of a script."""

from __future__ import annotations

import httpx
import streamlit as st

_IDLE_S = 2.0


@st.cache_resource
def shared() -> httpx.HTTPTransport:
    """Of all readers together: a page is several calls. Nobody's cookies are in it."""
    # Uvicorn closes a connection that has been idle for 5 s. A request that crosses with that fails, and a
    # page that cannot be drawn loses what was typed into it: so we are the first to close.
    limits = httpx.Limits(
        max_connections=100, max_keepalive_connections=20, keepalive_expiry=_IDLE_S
    )
    return httpx.HTTPTransport(limits=limits)
