"""Widgets and lines that several pages share."""

from __future__ import annotations

from typing import TypeVar

import streamlit as st

from loraplex_admin import format as fmt
from loraplex_admin.api import Api, ApiError, Page, Tenant

# Enough for a select box with search; beyond it the reader pastes an id.
MAX_CHOICES = 100

ItemT = TypeVar("ItemT")


def tenant(api: Api, *, key: str, allow_all: bool = False) -> Tenant | None:
    """Let the reader choose a tenant; the choice follows them from page to page.

    None: there is no tenant yet, or the pasted id is of none (said on the page), or `allow_all` and
    all were chosen.
    """
    page = api.tenants(limit=MAX_CHOICES)
    tenants = {tenant["id"]: tenant for tenant in page["data"]}
    last = str(st.session_state.get("last_tenant_id", ""))
    if last and last not in tenants:
        tenants |= {found["id"]: found for found in [_find(api, last)] if found}
    if not tenants and not allow_all:
        st.info("There is no tenant yet. An admin creates one under *Tenants and keys*.")
        return None
    ids = ["", *tenants] if allow_all else list(tenants)
    chosen = st.selectbox(
        "Tenant",
        ids,
        index=ids.index(last) if last in ids else 0,
        format_func=lambda id_: tenants[id_]["slug"] if id_ in tenants else id_ or "All tenants",
        accept_new_options=page["has_more"],
        help=f"The newest {MAX_CHOICES} are listed; paste the id of another."
        if page["has_more"]
        else None,
        key=key,
    )
    if not chosen:
        st.session_state["last_tenant_id"] = ""
        return None
    found = tenants.get(chosen) or _find(api, chosen.strip())
    if found is None:
        st.error(f"No tenant has the id {fmt.code(chosen)}.", icon=":material/error:")
        return None
    st.session_state["last_tenant_id"] = found["id"]
    return found


def _find(api: Api, tenant_id: str) -> Tenant | None:
    try:
        return api.tenant(tenant_id)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def fresh(name: str) -> str:
    """The key of a field that `empty(name)` empties: browsers keep what was typed under a key."""
    times = st.session_state.get(f"{name}_times", 0)
    return f"{name}_{times}" if times else name


def empty(*names: str) -> None:
    """Empty fields whose contents have been used, at the next run."""
    for name in names:
        st.session_state.pop(fresh(name), None)
        st.session_state[f"{name}_times"] = st.session_state.get(f"{name}_times", 0) + 1


def rerun_with_notice(text: str) -> None:
    """Run the page again, with what has been done said above it, in Markdown."""
    st.session_state["notice"] = text
    st.rerun()


def show_notice() -> None:
    """What `rerun_with_notice` left, until the next click."""
    text = st.session_state.pop("notice", None)
    if text is not None:
        st.success(text, icon=":material/check_circle:")


def show_refusal(error: ApiError) -> None:
    """The API's own words; they name the field and the remedy."""
    where = f" ({fmt.code(error.param)})" if error.param else ""
    st.error(f"{fmt.literal(str(error))}{where}", icon=":material/error:")


def show_unreachable() -> None:
    """One line instead of a page."""
    st.error("The control API does not answer. Is it running?", icon=":material/cloud_off:")


def pager(key: str, page: Page[ItemT]) -> None:
    """Buttons for a keyset-paged list whose cursors are kept under `key` in the session."""
    cursors: list[str] = st.session_state.setdefault(key, [])
    if not cursors and not page["has_more"]:
        return
    with st.container(horizontal=True):
        if st.button("Previous", key=f"{key}_previous", disabled=not cursors):
            cursors.pop()
            st.rerun()
        last_id = page["last_id"]
        if st.button("Next", key=f"{key}_next", disabled=not page["has_more"]) and last_id:
            cursors.append(last_id)
            st.rerun()


def cursor(key: str) -> str | None:
    """Where the page that `pager(key)` shows begins."""
    cursors: list[str] = st.session_state.get(key, [])
    return cursors[-1] if cursors else None
