"""The state of something, as a badge: one colour for one kind of state, on all pages."""

from __future__ import annotations

from typing import Final, Literal

import streamlit as st

from loraplex_admin import format as fmt

_Colour = Literal["green", "orange", "red", "gray", "blue"]
_COLOURS: Final[dict[str, _Colour]] = {
    **dict.fromkeys(("active", "enabled", "final", "ready", "passed", "promoted", "live"), "green"),
    **dict.fromkeys(
        ("suspended", "disabled", "draft", "queued", "paused", "draining", "warning"), "orange"
    ),
    **dict.fromkeys(("failed", "error", "timeout", "aborted", "rolled_back"), "red"),
    **dict.fromkeys(("running", "shadow", "canary", "evaluating"), "blue"),
}


def badge(state: str) -> None:
    """Draw it; what is over or unknown is gray."""
    st.badge(fmt.literal(state.replace("_", " ")), color=_COLOURS.get(state, "gray"))
