"""The console's script, run for every view of a page: who is logged in, which pages there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import streamlit as st
from streamlit.navigation.page import Page

from loraplex_admin import choices, connections
from loraplex_admin import format as fmt
from loraplex_admin.api import SESSION_COOKIE, Api, ApiError, ApiUnreachableError, User
from loraplex_admin.pages import (
    adapters,
    invariants,
    overview,
    playground,
    request_log,
    tenants,
    usage,
)

# A file of our own: Streamlit fetches icons and emoji of its own from elsewhere.
_ICON = Path(__file__).with_name("icon.png")

Render = Callable[[Api, User], None]


def _page(render: Render, api: Api, user: User, *, title: str, icon: str, path: str) -> Page:
    def run() -> None:
        try:
            render(api, user)
        except ApiUnreachableError:
            choices.show_unreachable()
        except ApiError as error:
            choices.show_refusal(error)

    return st.Page(run, title=title, icon=f":material/{icon}:", url_path=path, default=not path)


def _ask_to_log_in() -> None:
    """For a page that was open when its session ended; `app.py` sends fresh visits to the form."""
    _left, middle, _right = st.columns([1, 2, 1])
    with middle:
        st.title("You are logged out")
        st.link_button("Log in", "/login", type="primary")


def main() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="Loraplex", page_icon=str(_ICON), layout="wide")
    control_url = os.environ.get("LORAPLEX_CONTROL_URL", "http://127.0.0.1:8001")
    token = st.context.cookies.get(SESSION_COOKIE, "")
    api = Api(control_url, token, transport=connections.shared())
    try:
        user = api.current_user()
    except ApiUnreachableError:
        choices.show_unreachable()
        st.button("Try again", key="retry")
        return
    except ApiError as error:
        choices.show_refusal(error)
        return
    if user is None:
        _ask_to_log_in()
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
    st.logo(str(_ICON), size="large")
    with st.sidebar:
        st.caption(f"{fmt.literal(user['email'])} · {user['role']}")
        if st.button("Log out", key="log_out", type="tertiary", icon=":material/logout:"):
            api.log_out()
            st.rerun()
    navigation.run()


if __name__ == "__main__":
    main()
