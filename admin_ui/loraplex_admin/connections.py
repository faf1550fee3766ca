"""Connections to the control API, kept open between the runs of a script."""

from __future__ import annotations

import httpx
import streamlit as st


@st.cache_resource
def shared() -> httpx.HTTPTransport:
    """Of all readers together: a page is several calls. Nobody's cookies are in it."""
    return httpx.HTTPTransport()
