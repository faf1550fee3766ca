"""Leading the reader's tab elsewhere. Links of Streamlit's open another tab, and this one would stay behind, logged out."""

from __future__ import annotations

from urllib.parse import urlencode, urlsplit

import streamlit as st
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.scriptrunner import get_script_run_ctx


def here() -> str:
    """This page's own address, with what is open on it: a path of this console."""
    path = urlsplit(str(st.context.url or "")).path or "/"
    query = urlencode(st.query_params.to_dict())
    return f"{path}?{query}" if query else path


def to(address: str) -> None:
    """Load another page in this tab, as `st.login` does; its message is the only one that can."""
    context = get_script_run_ctx()
    if context is not None:
        message = ForwardMsg()
        message.auth_redirect.url = address
        context.enqueue(message)
