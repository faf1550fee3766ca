"""The question before something is lost: done only by whoever types its name."""

from __future__ import annotations

import unicodedata

import streamlit as st

from loraplex_admin import choices

NOT_THE_NAME = "That is not the name. Nothing was done."


def by_name(label: str, *, name: str, consequence: str, button: str, key: str) -> bool:
    """Whether it was confirmed in this run.

    Args:
        label: of the fold behind which the question is.
        name: what has to be typed; shown so that it can be copied, for nobody types every script.
        consequence: what happens then, in Markdown.
        key: begins the widgets' keys: `{key}_typed`, `{key}_go`.
    """
    box, typed = f"{key}_box", f"{key}_typed"
    with st.expander(label, icon=":material/warning:", key=choices.fresh(box)):
        st.warning(consequence)
        with st.form(key, border=False):
            is_named = ask(name, key=choices.fresh(typed))
            is_sent = st.form_submit_button(button, type="primary", key=f"{key}_go")
        if not is_sent:
            return False
        if not is_named:
            st.error(NOT_THE_NAME, icon=":material/error:")
            return False
    choices.empty_when_done(box, typed)
    return True


def ask(name: str, *, key: str) -> bool:
    """The name to copy and the field for it, of a form; whether that was typed."""
    st.code(name, language=None, wrap_lines=True)
    typed = st.text_input("Type the name above to confirm", key=key, autocomplete="off")
    return _plain(typed) == _plain(name)


def _plain(text: str) -> str:
    """The same for two ways to write one letter: keyboards differ."""
    return unicodedata.normalize("NFC", " ".join(text.split()))
