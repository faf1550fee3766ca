"""Widgets that several pages share."""

from __future__ import annotations

import streamlit as st

from loraplex_admin.api import Api, ApiError, Tenant

# Enough for a select box with search; beyond it the reader pastes an id.
_MAX_CHOICES = 100


def tenant(api: Api, *, key: str, allow_all: bool = False) -> Tenant | None:
    """Let the reader choose a tenant; the choice follows them from page to page.

    None: there is no tenant yet (said on the page), or `allow_all` and all were chosen.
    """
    page = api.tenants(limit=_MAX_CHOICES)
    tenants = page["data"]
    if not tenants and not allow_all:
        st.info("There is no tenant yet. Create one under *Tenants and keys*.")
        return None
    options: list[Tenant | None] = [None, *tenants] if allow_all else [*tenants]
    ids = [option["id"] if option else "" for option in options]
    last = st.session_state.get("last_tenant_id", "")
    chosen = st.selectbox(
        "Tenant",
        options,
        index=ids.index(last) if last in ids else 0,
        format_func=lambda option: option["slug"] if option else "All tenants",
        key=key,
    )
    if page["has_more"]:
        st.caption(f"The first {_MAX_CHOICES} tenants are listed.")
    st.session_state["last_tenant_id"] = chosen["id"] if chosen else ""
    return chosen


def show_refusal(error: ApiError) -> None:
    """The API's own words; they name the field and the remedy."""
    where = f" (`{error.param}`)" if error.param else ""
    st.error(f"{error}{where}", icon=":material/error:")


def pager(key: str, last_id: str | None, *, has_more: bool) -> None:
    """Buttons for a keyset-paged list whose cursors are kept under `key` in the session."""
    cursors: list[str] = st.session_state.setdefault(key, [])
    if not cursors and not has_more:
        return
    back, forward, _rest = st.columns([1, 1, 6])
    if back.button("Previous", key=f"{key}_previous", disabled=not cursors):
        cursors.pop()
        st.rerun()
    if forward.button("Next", key=f"{key}_next", disabled=not has_more) and last_id:
        cursors.append(last_id)
        st.rerun()


def cursor(key: str) -> str | None:
    """Where the page that `pager(key)` shows begins."""
    cursors: list[str] = st.session_state.get(key, [])
    return cursors[-1] if cursors else None
