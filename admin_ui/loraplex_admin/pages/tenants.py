"""Tenants, and each one's API keys. A secret is shown once, when it is made."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, ApiError, ApiKey, Tenant, User


def render(api: Api, user: User) -> None:
    """The list, a form for a new tenant, then the keys of the chosen one."""
    st.title("Tenants and keys")
    choices.show_notice()
    can_write = user["role"] == "admin"
    _tenant_list(api)
    if can_write:
        _new_tenant(api)
    st.subheader("Keys")
    _new_secret()
    tenant = choices.tenant(api, key="tenants_tenant")
    if tenant is None:
        return
    _keys(api, tenant, can_write=can_write)


def _tenant_list(api: Api) -> None:
    page = api.tenants(after=choices.cursor("tenants_cursors"))
    if not page["data"]:
        return
    st.dataframe(
        [
            {
                "slug": tenant["slug"],
                "name": tenant["name"],
                "status": tenant["status"],
                "created": fmt.time(tenant["created_at"]),
                "id": tenant["id"],
            }
            for tenant in page["data"]
        ],
        hide_index=True,
        column_config={
            name: st.column_config.TextColumn(width="medium") for name in ("slug", "name")
        },
        key="tenants_table",
    )
    choices.pager("tenants_cursors", page)


def _new_tenant(api: Api) -> None:
    with st.expander("New tenant", icon=":material/add:"), st.form("new_tenant", border=False):
        slug = st.text_input(
            "Slug",
            key=choices.fresh("new_tenant_slug"),
            max_chars=63,
            help="Its short name, for good: lower-case letters, digits and dashes.",
        )
        name = st.text_input("Name (optional)", key=choices.fresh("new_tenant_name"), max_chars=200)
        if st.form_submit_button("Create tenant", type="primary", key="new_tenant_go"):
            try:
                tenant = api.create_tenant(slug.strip(), name.strip())
            except ApiError as error:
                choices.show_refusal(error)
                return
            st.session_state["last_tenant_id"] = tenant["id"]
            for name in ("tenants_tenant", "tenants_cursors"):
                st.session_state.pop(name, None)
            choices.empty("new_tenant_slug", "new_tenant_name")
            choices.rerun_with_notice(f"Tenant {fmt.code(tenant['slug'])} is there.")


def _new_secret() -> None:
    made: ApiKey | None = st.session_state.get("new_secret")
    if made is None:
        return
    with st.container(border=True):
        st.warning(
            f"Copy the key {fmt.code(made['name'])} now: it is shown this once.",
            icon=":material/key:",
        )
        st.code(made["secret"], language=None, wrap_lines=True)
        if st.button("I have copied it", key="new_secret_done"):
            del st.session_state["new_secret"]
            st.rerun()


def _keys(api: Api, tenant: Tenant, *, can_write: bool) -> None:
    if can_write:
        _new_key(api, tenant)
    cursors = f"keys_cursors_{tenant['id']}"
    page = api.keys(tenant["id"], after=choices.cursor(cursors))
    if not page["data"]:
        st.info("This tenant has no key yet.")
    for key in page["data"]:
        _key_row(api, tenant, key, can_write=can_write)
    choices.pager(cursors, page)


def _new_key(api: Api, tenant: Tenant) -> None:
    with (
        st.form("new_key"),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        name = st.text_input(
            "Name of a new key",
            key=choices.fresh("new_key_name"),
            max_chars=80,
            placeholder="production",
        )
        is_asked = st.form_submit_button("Create key", type="primary", key="new_key_go")
    if not is_asked:
        return
    try:
        st.session_state["new_secret"] = api.create_key(tenant["id"], name.strip())
    except ApiError as error:
        choices.show_refusal(error)
        return
    st.session_state.pop(f"keys_cursors_{tenant['id']}", None)
    choices.empty("new_key_name")
    st.rerun()


def _key_row(api: Api, tenant: Tenant, key: ApiKey, *, can_write: bool) -> None:
    with st.container(border=True):
        about, state, action = st.columns([6, 2, 2], vertical_alignment="center")
        about.text(key["name"])
        about.caption(_about(key))
        state.badge(key["status"], color="green" if key["status"] == "active" else "gray")
        if not can_write or key["status"] != "active":
            return
        asked = f"revoke_asked_{key['id']}"
        if not st.session_state.get(asked):
            if action.button("Revoke", key=f"revoke_{key['id']}"):
                st.session_state[asked] = True
                st.rerun()
            return
        st.warning("Its next request is refused. This cannot be undone.")
        with st.container(horizontal=True):
            is_sure = st.button("Revoke it", key=f"revoke_yes_{key['id']}", type="primary")
            is_kept = st.button("Keep it", key=f"revoke_no_{key['id']}")
        if is_sure:
            try:
                api.revoke_key(tenant["id"], key["id"])
            except ApiError as error:
                choices.show_refusal(error)
                return
        if is_sure or is_kept:
            del st.session_state[asked]
            st.rerun()


def _about(key: ApiKey) -> str:
    parts = [fmt.code(key["redacted"]), f"made {fmt.time(key['created_at'])}"]
    if key["revoked_at"] is not None:
        parts.append(f"revoked {fmt.time(key['revoked_at'])}")
    elif key["expires_at"] is not None:
        parts.append(f"expires {fmt.time(key['expires_at'])}")
    used = key["last_used_at"]
    parts.append("never used" if used is None else f"last used {fmt.time(used)}")
    return " · ".join(parts)
