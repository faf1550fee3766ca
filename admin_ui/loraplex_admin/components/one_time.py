"""Secrets that are shown once, right after they were made, and are then nowhere in the console."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import format as fmt


def keep(slot: str, name: str, secret: str | None, hint: str = "") -> None:
    """Have `show(slot)` show it from the next run on. None: a replay, whose answer has no secret."""
    st.session_state[f"secret_{slot}"] = (name, secret, hint)


def show(slot: str) -> None:
    """What `keep` left, until the reader says that they have it."""
    kept = st.session_state.get(f"secret_{slot}")
    if kept is None:
        return
    name, secret, hint = kept
    with st.container(border=True):
        if secret is None:
            st.warning(
                f"{fmt.code(name)} was made by an earlier click, whose answer was lost, and with it the secret. "
                "Rotate it to get another one.",
                icon=":material/key_off:",
            )
        else:
            st.warning(
                f"Copy the secret of {fmt.code(name)} now: it is shown this once.",
                icon=":material/key:",
            )
            st.code(secret, language=None, wrap_lines=True)
        if hint:
            st.caption(hint)
        if st.button("I have copied it" if secret else "Understood", key=f"{slot}_done"):
            del st.session_state[f"secret_{slot}"]
            st.rerun()
