"""Tenants, and each one's API keys. A secret is shown once, when it is made."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, ApiError, ApiKey, Tenant, User


def render(api: Api, user: User) -> None:
    """The list, a form for a new tenant, then the keys of the chosen one."""
    st.title("Tenants and keys")
    can_write = user["role"] == "admin"
    _tenant_list(api)
    if can_write:
        _new_tenant(api)
    st.divider()
    tenant = choices.tenant(api, key="tenants_tenant")
    if tenant is None:
        return
    _new_secret()
    _keys(api, tenant, can_write=can_write)


def _tenant_list(api: Api) -> None:
    page = api.tenants(after=choices.cursor("tenants_cursors"))
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
        key="tenants_table",
    )
    choices.pager("tenants_cursors", page["last_id"], has_more=page["has_more"])


def _new_tenant(api: Api) -> None:
    with st.expander("New tenant", icon=":material/add:"), st.form("new_tenant", border=False):
        slug = st.text_input(
            "Slug", key="new_tenant_slug", help="Lower-case letters, digits and dashes."
        )
        name = st.text_input("Name (optional)", key="new_tenant_name")
        if st.form_submit_button("Create tenant", type="primary"):
            try:
                tenant = api.create_tenant(slug.strip(), name.strip())
            except ApiError as error:
                choices.show_refusal(error)
                return
            st.session_state["last_tenant_id"] = tenant["id"]
            st.session_state.pop("tenants_tenant", None)
            st.rerun()


def _new_secret() -> None:
    secret = st.session_state.get("new_secret")
    if secret is None:
        return
    with st.container(border=True):
        st.warning("Copy the key now: it is shown this once.", icon=":material/key:")
        st.code(secret, language=None)
        if st.button("I have copied it", key="new_secret_done"):
            del st.session_state["new_secret"]
            st.rerun()


def _keys(api: Api, tenant: Tenant, *, can_write: bool) -> None:
    st.subheader(f"Keys of {tenant['slug']}")
    cursors = f"keys_cursors_{tenant['id']}"
    page = api.keys(tenant["id"], after=choices.cursor(cursors))
    if not page["data"]:
        st.info("This tenant has no key yet.")
    for key in page["data"]:
        _key_row(api, tenant, key, can_write=can_write)
    choices.pager(cursors, page["last_id"], has_more=page["has_more"])
    if not can_write:
        return
    with st.form("new_key"):
        name = st.text_input("Name of a new key", key="new_key_name")
        if st.form_submit_button("Create key", type="primary"):
            try:
                made = api.create_key(tenant["id"], name.strip())
            except ApiError as error:
                choices.show_refusal(error)
                return
            st.session_state["new_secret"] = made["secret"]
            st.rerun()


def _key_row(api: Api, tenant: Tenant, key: ApiKey, *, can_write: bool) -> None:
    with st.container(border=True):
        about, state, action = st.columns([5, 3, 2], vertical_alignment="center")
        about.text(key["name"])
        about.caption(
            f"`{key['redacted']}` · made {fmt.time(key['created_at'])} · "
            f"last used {fmt.time(key['last_used_at'])}"
        )
        state.badge(key["status"], color="green" if key["status"] == "active" else "gray")
        if not can_write or key["status"] != "active":
            return
        asked = f"revoke_asked_{key['id']}"
        if not st.session_state.get(asked):
            if action.button("Revoke", key=f"revoke_{key['id']}"):
                st.session_state[asked] = True
                st.rerun()
            return
        st.write("Its next request is refused. This cannot be undone.")
        yes, no, _rest = st.columns([2, 2, 6])
        if yes.button("Revoke it", key=f"revoke_yes_{key['id']}", type="primary"):
            api.revoke_key(tenant["id"], key["id"])
            del st.session_state[asked]
            st.rerun()
        if no.button("Keep it", key=f"revoke_no_{key['id']}"):
            del st.session_state[asked]
            st.rerun()
