"""One's own login; for the operator also who may log in and how long records are kept."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Page
from loraplex_admin.components import confirm, forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

_ROLES = {"admin": "admin: may change everything", "viewer": "viewer: may read everything"}
_KEPT = {
    "requests": "requests (metadata)",
    "audit_log": "audit log",
    "invariant_runs": "runs of the invariants",
    "webhook_deliveries": "deliveries of webhooks",
    "sessions": "logins that are over",
    "alerts": "alerts",
}


def render(api: Api, access: Access) -> None:
    """Who one is; then what the operator sets."""
    st.title("Settings")
    choices.show_notice()
    _own(api, access)
    if access.may("user.read"):
        _users(api, access)
    if access.may("retention.read"):
        _retention(api, access)


def _own(api: Api, access: Access) -> None:
    with st.container(border=True):
        st.markdown(f"You are {fmt.code(access.user['email'])}: {access.role}.")
        session = api.session()
        if session is not None:
            st.caption(f"This login ends {fmt.time(session['expires_at'])}.")
            if session["memberships"]:
                tenants = {
                    one["id"]: one["slug"] for one in api.tenants(limit=choices.MAX_CHOICES)["data"]
                }
                st.dataframe(
                    [
                        {
                            "tenant": tenants.get(one["tenant_id"], one["tenant_id"]),
                            "role": one["role"],
                        }
                        for one in session["memberships"]
                    ],
                    hide_index=True,
                    key="settings_memberships",
                )
        st.caption("Light and dark follow the browser; the menu at the top right changes it.")


def _users(api: Api, access: Access) -> None:
    st.subheader("Who may log in")
    users = api.of_platform("users")
    can_write = access.may("user.write")
    found: list[Row] = []

    def fetch(after: str | None = None, search: str | None = None) -> Page[Row]:
        page = users.page(after=after, search=search)
        found.extend(page["data"])
        return page

    listing = Listing(
        "users",
        fetch=fetch,
        columns=Columns(
            lambda one: {
                "e-mail": fmt.cell(one["email"]),
                "on the platform": one["role"] or "–",
                "since": fmt.moment(one["created_at"]),
                "can log in": "no" if one["disabled_at"] else "yes",
            },
            wide=("e-mail",),
        ),
        search_label="Search people",
        empty="Nobody may log in yet.",
        can_open=can_write,
        has_all=True,
    )
    open_id = listing.show()
    if not can_write:
        return
    user = next((one for one in found if one["id"] == open_id), None)
    if user is not None:
        _user(api, access, user)
    with st.expander(
        "New operator", icon=":material/person_add:", key=choices.fresh("new_user_box")
    ):
        made = forms.create(
            "new_user",
            (
                Field("email", "E-mail", max_chars=254),
                Field(
                    "password",
                    "Password",
                    "secret",
                    help="Hand it over in person; they cannot change it by mail.",
                ),
                Field(
                    "role", "Role", "choice", options=tuple(_ROLES), labels=_ROLES, default="viewer"
                ),
            ),
            submit="Let them in",
            send=lambda body, once: users.create(body, once=once),
        )
    if made is not None:
        listing.go_to_start()
        choices.rerun_with_notice(f"{fmt.code(made['email'])} may log in.")


def _user(api: Api, access: Access, user: Row) -> None:
    users, id_, email = api.of_platform("users"), user["id"], user["email"]
    with st.container(border=True):
        st.markdown(fmt.code(email))
        try:
            if user["disabled_at"]:
                if st.button("Let them log in again", key=f"enable_{id_}"):
                    users.act(id_, "enable")
                    choices.rerun_with_notice(f"{fmt.code(email)} may log in again.")
                return
            if confirm.by_name(
                "End all of their logins",
                name=email,
                consequence="They are logged out everywhere at once, and may log in anew.",
                button="End them",
                key=f"logout_{id_}",
            ):
                users.act(id_, "logout")
                choices.rerun_with_notice(f"{fmt.code(email)} has to log in anew.")
            reset = forms.create(
                f"password_{id_}",
                (Field("password", "Another password", "secret"),),
                submit="Set it",
                send=lambda body, once: users.act(id_, "password", body, once=once),
            )
            if reset is not None:
                choices.rerun_with_notice(
                    f"{fmt.code(email)} has another password; their logins ended."
                )
            if id_ != access.user["id"] and confirm.by_name(
                "Lock this person out",
                name=email,
                consequence="Their logins end at once and new ones are refused, until they are let in again.",
                button="Lock them out",
                key=f"disable_{id_}",
            ):
                users.act(id_, "disable")
                choices.rerun_with_notice(f"{fmt.code(email)} is locked out.")
        except ApiError as error:
            choices.show_refusal(error)


def _retention(api: Api, access: Access) -> None:
    st.subheader("How long records are kept")
    rules = api.read("/retention")["data"]
    st.dataframe(
        [
            {
                "what": _KEPT.get(rule["id"], rule["id"]),
                "kept": "for good" if rule["keep_days"] is None else f"{rule['keep_days']:,} days",
                "at least": f"{rule['least_days']:,} days",
                "due to go": f"{rule['rows_due']:,} rows",
                "held up by": fmt.cell("; ".join(rule["blocked"])) or "–",
            }
            for rule in rules
        ],
        hide_index=True,
        key="retention_table",
    )
    if not access.may("retention.write"):
        return
    with st.expander(
        "Change how long", icon=":material/auto_delete:", key=choices.fresh("retention_box")
    ):
        changed = forms.create(
            "retention",
            (
                Field("id", "What", "choice", options=[rule["id"] for rule in rules], labels=_KEPT),
                Field("keep_days", "Days", "whole", help="Empty: for good.", is_optional=True),
            ),
            submit="Keep it so long",
            send=lambda body, _once: api.send(
                "PUT", f"/retention/{body['id']}", {"keep_days": body.get("keep_days")}
            ),
        )
    if changed is not None:
        choices.rerun_with_notice("It holds from the worker's next round on.")
