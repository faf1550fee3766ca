"""The console's entry point: who is logged in, which pages there are.

Streamlit cannot set an HttpOnly cookie, so the login form belongs to the control API: it sets the
session cookie for this host (cookies ignore ports) and leads back here. A refresh keeps the login.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

import streamlit as st
from streamlit.navigation.page import Page

from loraplex_admin.api import SESSION_COOKIE, Api, ApiUnreachableError, User
from loraplex_admin.pages import (
    adapters,
    invariants,
    overview,
    playground,
    request_log,
    tenants,
    usage,
)

Render = Callable[[Api, User], None]


def _public_control_url(control_url: str) -> str:
    """The control API as the reader's browser reaches it: the host they used for the console.

    The session cookie belongs to a host name, so `localhost` and `127.0.0.1` must not be mixed.
    """
    public = os.environ.get("LORAPLEX_CONTROL_PUBLIC_URL")
    if public:
        return public
    parts = urlsplit(control_url)
    host = urlsplit(st.context.url or "").hostname or parts.hostname or "127.0.0.1"
    return urlunsplit((parts.scheme, f"{host}:{parts.port}", "", "", ""))


def _page(render: Render, api: Api, user: User, *, title: str, icon: str, path: str) -> Page:
    def run() -> None:
        try:
            render(api, user)
        except ApiUnreachableError:
            st.error("The control API does not answer. Is it running?", icon=":material/cloud_off:")

    return st.Page(run, title=title, icon=f":material/{icon}:", url_path=path)


def _ask_to_log_in(control_url: str) -> None:
    _left, middle, _right = st.columns([1, 2, 1])
    with middle:
        st.title("Loraplex")
        st.write("Log in to manage tenants, adapters and bills.")
        st.link_button("Log in", f"{_public_control_url(control_url)}/login", type="primary")
        st.caption("You are sent back here afterwards. `loraplex up --demo` prints a login.")


def main() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="Loraplex", page_icon=":material/hub:", layout="wide")
    control_url = os.environ.get("LORAPLEX_CONTROL_URL", "http://127.0.0.1:8001")
    api = Api(control_url, st.context.cookies.get(SESSION_COOKIE, ""))
    try:
        user = api.current_user()
    except ApiUnreachableError:
        st.error("The control API does not answer. Is it running?", icon=":material/cloud_off:")
        st.button("Try again", key="retry")
        return
    if user is None:
        _ask_to_log_in(control_url)
        return
    navigation = st.navigation(
        {
            "Fleet": [
                _page(overview.render, api, user, title="Overview", icon="monitoring", path=""),
                _page(
                    invariants.render,
                    api,
                    user,
                    title="Invariants",
                    icon="balance",
                    path="invariants",
                ),
            ],
            "Tenants": [
                _page(
                    tenants.render, api, user, title="Tenants and keys", icon="key", path="tenants"
                ),
                _page(adapters.render, api, user, title="Adapters", icon="layers", path="adapters"),
                _page(
                    playground.render,
                    api,
                    user,
                    title="Playground",
                    icon="forum",
                    path="playground",
                ),
            ],
            "Money": [
                _page(usage.render, api, user, title="Usage", icon="bar_chart", path="usage"),
                _page(
                    request_log.render,
                    api,
                    user,
                    title="Requests",
                    icon="list_alt",
                    path="requests",
                ),
            ],
        }
    )
    with st.sidebar:
        st.caption(f"{user['email']} · {user['role']}")
        if st.button("Log out", key="log_out", type="tertiary", icon=":material/logout:"):
            api.log_out()
            st.rerun()
    navigation.run()


if __name__ == "__main__":
    main()
