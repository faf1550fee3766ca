"""The console's script, run for every view of a page: who is logged in, which pages there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import streamlit as st
from streamlit.navigation.page import Page as StreamlitPage

from loraplex_admin import catalog, choices, connections
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import SESSION_COOKIE, Api, ApiError, ApiUnreachableError

# A file of our own: Streamlit fetches icons and emoji of its own from elsewhere.
_ICON = Path(__file__).with_name("icon.png")
# As wide as the longest of its titles: tables want the rest.
_SIDEBAR_PX = 216


def _page(page: catalog.Page, api: Api, access: Access, *, is_start: bool = False) -> StreamlitPage:
    """A page at its path; as the start, at `/` and not in the sidebar.

    The start has no path of its own, so it is another one than the page: an address that somebody sends means the same
    to every role, whichever page each of them starts with.
    """

    def run() -> None:
        try:
            page.render(api, access)
        except ApiUnreachableError:
            # It went away while this very page was drawn.
            choices.wait_for_the_api(api)
        except ApiError as error:
            choices.show_refusal(error)

    return st.Page(
        run,
        title=page.title,
        icon=f":material/{page.icon}:",
        url_path="start" if is_start else page.path,
        default=is_start,
        visibility="hidden" if is_start else "visible",
    )


def _refused(page: catalog.Page, access: Access) -> StreamlitPage:
    """At the address of a page that this reader may not see: that, instead of another page as if nothing were."""

    def run() -> None:
        st.title(page.title)
        st.error(
            f"You are not allowed to see this page: you are {fmt.literal(access.role)}, and it takes "
            f"{fmt.code(page.action)}.",
            icon=":material/lock:",
        )
        st.caption(
            "An owner or admin of the tenant gives roles under *Members*; an admin of the platform under *Settings*."
        )

    return st.Page(run, title=page.title, url_path=page.path, visibility="hidden")


def _ask_to_log_in() -> None:
    """For a page that was open when its session ended; `app.py` sends fresh visits to the form."""
    _left, middle, _right = st.columns([1, 2, 1])
    with middle:
        st.title("You are logged out")
        st.caption("After the login you are back on this page.")
        choices.offer_login("Log in")


def _instead_of_any_page(draw: Callable[[], None]) -> None:
    """At whatever page's address, which Streamlit would else forget: it knows only the pages of a run."""
    start = st.Page(draw, title="Loraplex", url_path="start", default=True)
    others = [st.Page(draw, title=one.title, url_path=one.path) for one in catalog.PAGES]
    st.navigation([start, *others], position="hidden").run()


def main() -> None:
    """Draw the page that the address names."""
    st.set_page_config(
        page_title="Loraplex",
        page_icon=str(_ICON),
        layout="wide",
        initial_sidebar_state=_SIDEBAR_PX,
    )
    control_url = os.environ.get("LORAPLEX_CONTROL_URL", "http://127.0.0.1:8001")
    token = st.context.cookies.get(SESSION_COOKIE, "")
    api = Api(control_url, token, transport=connections.shared())
    try:
        session = api.session()
    except ApiUnreachableError:
        _instead_of_any_page(lambda: choices.wait_for_the_api(api))
        return
    except ApiError as error:
        refusal = error
        _instead_of_any_page(lambda: choices.show_refusal(refusal))
        return
    if session is None:
        _instead_of_any_page(_ask_to_log_in)
        return
    access = Access.of(session)
    pages = catalog.pages_for(access)
    sections = {pages[0].section: [_page(pages[0], api, access, is_start=True)]}
    for page in pages:
        sections.setdefault(page.section, []).append(_page(page, api, access))
    sections[pages[0].section] += [
        _refused(page, access) for page in catalog.PAGES if page not in pages
    ]
    navigation = st.navigation(sections, expanded=True)
    st.logo(str(_ICON), size="large")
    with st.sidebar:
        st.caption(f"{fmt.literal(access.user['email'])} · {access.role}")
        if st.button("Log out", key="log_out", type="tertiary", icon=":material/logout:"):
            api.log_out()
            st.rerun()
    choices.give_back_what_was_typed()
    navigation.run()


if __name__ == "__main__":
    main()
