"""Who belongs to a tenant, as what, and who has been invited."""

from __future__ import annotations

import os

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Page, Tenant
from loraplex_admin.components import confirm, forms, one_time
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

_ROLES = {
    "owner": "owner: everything",
    "admin": "admin: everything but owners",
    "developer": "developer: adapters, deployments, keys",
    "billing": "billing: usage and invoices",
    "viewer": "viewer: reads",
}
_DAY_S = 86_400
_DAYS = (1, 7, 30)


def render(api: Api, access: Access) -> None:
    """Members, then invitations."""
    st.title("Members")
    choices.show_notice()
    one_time.show("invitation")
    tenant = choices.tenant(api, access, key="members_tenant", action="member.read")
    if tenant is None:
        return
    can_write = access.may("member.write", tenant["id"])
    if can_write:
        _invite(api, tenant)
    _members(api, tenant, can_write=can_write)
    _invitations(api, tenant, can_write=can_write)


def _invite(api: Api, tenant: Tenant) -> None:
    invitations = api.of_tenant(tenant["id"], "invitations")
    with st.expander(
        "Invite somebody", icon=":material/person_add:", key=choices.fresh("invite_box")
    ):
        made = forms.create(
            "invite",
            (
                Field("email", "E-mail", max_chars=254, placeholder="ada@example.com"),
                Field(
                    "role",
                    "Role",
                    "choice",
                    options=tuple(_ROLES),
                    labels=_ROLES,
                    default="developer",
                ),
                Field(
                    "expires_in_s",
                    "The invitation may be used for",
                    "choice",
                    options=[days * _DAY_S for days in _DAYS],
                    labels={
                        days * _DAY_S: f"{days} days" if days > 1 else "1 day" for days in _DAYS
                    },
                    default=7 * _DAY_S,
                ),
            ),
            submit="Invite",
            send=lambda body, once: invitations.create(body, once=once),
        )
    if made is None:
        return
    where = f"{os.environ.get('LORAPLEX_CONSOLE_URL', '').rstrip('/')}/join"
    one_time.keep(
        "invitation",
        made["email"],
        made["token"],
        f"Send it to them: they use it once, at {fmt.code(where)} of this console.",
    )
    st.rerun()


def _members(api: Api, tenant: Tenant, *, can_write: bool) -> None:
    members = api.of_tenant(tenant["id"], "members")
    zone = tenant["billing_tz"]
    listing = Listing(
        "members",
        fetch=members.page,
        columns=Columns(
            lambda one: {
                "e-mail": fmt.cell(one["email"]),
                "role": one["role"],
                "since": fmt.moment(one["created_at"], zone),
                "can log in": "no" if one["disabled_at"] else "yes",
            },
            wide=("e-mail",),
        ),
        search_label="Search members",
        empty="Nobody belongs to this tenant yet. Invite somebody above.",
        can_open=can_write,
    )
    open_id = listing.show()
    if open_id is not None and can_write:
        try:
            _member(api, tenant, members.get(open_id), listing)
        except ApiError as error:
            listing.refuse(error)


def _member(api: Api, tenant: Tenant, member: Row, listing: Listing) -> None:
    members = api.of_tenant(tenant["id"], "members")
    id_, email = member["id"], member["email"]
    with st.container(border=True):
        st.markdown(f"{fmt.code(email)} is {member['role']} of {fmt.code(tenant['slug'])}.")
        saved = forms.edit(
            f"member_{id_}",
            member,
            (Field("role", "Role", "choice", options=tuple(_ROLES), labels=_ROLES),),
            save=lambda body, version: members.change(id_, body, version=version),
            reload=lambda: members.get(id_),
        )
        if saved is not None:
            choices.rerun_with_notice(
                f"{fmt.code(email)} is {saved['role']} from the next request on."
            )
        if not confirm.by_name(
            "Remove this member",
            name=email,
            consequence="They see nothing of this tenant any more, from the next request on. Their own keys end.",
            button="Remove them",
            key=f"remove_{id_}",
        ):
            return
        members.remove(id_, version=member["version"])
    listing.open(None)
    choices.rerun_with_notice(f"{fmt.code(email)} is no member any more.")


def _invitations(api: Api, tenant: Tenant, *, can_write: bool) -> None:
    st.subheader("Invitations")
    invitations = api.of_tenant(tenant["id"], "invitations")
    zone = tenant["billing_tz"]
    emails: dict[str, str] = {}

    def fetch(after: str | None = None) -> Page[Row]:
        page = invitations.page(after=after)
        emails.update((one["id"], one["email"]) for one in page["data"])
        return page

    listing = Listing(
        "invitations",
        fetch=fetch,
        columns=Columns(
            lambda one: {
                "e-mail": fmt.cell(one["email"]),
                "role": one["role"],
                "status": one["status"],
                "sent": fmt.moment(one["created_at"], zone),
                "good until": fmt.moment(one["expires_at"], zone),
            },
            wide=("e-mail",),
        ),
        empty="Nobody has been invited yet.",
        is_main=False,
        can_open=can_write,
    )
    open_id = listing.show()
    if (
        open_id is None
        or not can_write
        or not confirm.by_name(
            "Withdraw this invitation",
            name=emails.get(open_id, open_id),
            consequence="Its token is worth nothing from then on.",
            button="Withdraw it",
            key=f"withdraw_{open_id}",
        )
    ):
        return
    try:
        invitations.remove(open_id)
    except ApiError as error:
        choices.show_refusal(error)
        return
    listing.open(None)
    choices.rerun_with_notice("The invitation is withdrawn: its token is worth nothing now.")
