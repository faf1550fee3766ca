"""A tenant's API keys: made, changed, rotated and revoked. A secret is shown once, when it is made."""

from __future__ import annotations

import time as clock

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Tenant
from loraplex_admin.components import confirm, forms, one_time, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.components.sentences import sentences
from loraplex_admin.resources import Row

_SLOT = "key"
_DAY_S = 86_400
_LIVES = {None: "never", 30: "in 30 days", 90: "in 90 days", 365: "in a year"}
_GRACES = {0: "at once", 3600: "in an hour", _DAY_S: "in a day", 7 * _DAY_S: "in 7 days"}
_SCOPES = {"inference": "completions", "models.read": "the list of models"}
_SCOPES_FIELD = Field(
    "scopes",
    "It may use",
    "choices",
    options=tuple(_SCOPES),
    labels=_SCOPES,
    default=tuple(_SCOPES),
)
_NETWORKS_FIELD = Field(
    "ip_allow",
    "Only from these networks",
    "lines",
    help="One a line, such as 203.0.113.0/24. Empty: from anywhere.",
    is_optional=True,
)


def render(api: Api, access: Access) -> None:
    """The keys, a form for a new one, then the one that is open."""
    st.title("API keys")
    choices.show_notice()
    one_time.show(_SLOT)
    tenant = choices.tenant(api, access, key="keys_tenant", action="key.read")
    if tenant is None:
        return
    keys, zone = api.of_tenant(tenant["id"], "keys"), tenant["billing_tz"]
    can_write = access.may("key.write", tenant["id"])
    listing = Listing(
        "keys",
        fetch=keys.page,
        columns=Columns(
            lambda one: {
                "name": fmt.cell(one["name"]),
                "key": one["redacted"],
                "status": one["status"],
                "last used": fmt.moment(one["last_used_at"], zone)
                if one["last_used_at"]
                else "never",
                "made": fmt.moment(one["created_at"], zone),
                "expires": fmt.moment(one["expires_at"], zone) if one["expires_at"] else "never",
                "may call": "everything"
                if one["grants"] is None
                else f"{len(one['grants'])} granted",
            },
            wide=("name",),
            help={"last used": "To about a minute."},
        ),
        search_label="Search keys",
        empty="This tenant has no key yet. Create one below, and give its secret to who calls the gateway."
        if can_write
        else "This tenant has no key yet.",
    )
    open_id = listing.show()
    if not can_write and open_id is None:
        return
    grants = _grants_field(api, tenant)
    if can_write:
        _new_key(api, tenant, listing, grants)
    if open_id is None:
        return
    try:
        key = keys.get(open_id)
    except ApiError as error:
        listing.refuse(error)
        return
    _key(api, tenant, key, grants, can_write=can_write)


def _new_key(api: Api, tenant: Tenant, listing: Listing, grants: Field) -> None:
    keys = api.of_tenant(tenant["id"], "keys")
    with st.expander("New key", icon=":material/add:", key=choices.fresh("new_key_box")):
        projects = _projects(api, tenant)
        made = forms.create(
            "new_key",
            (
                Field("name", "Name", max_chars=80, placeholder="production"),
                Field(
                    "expires_days",
                    "It expires",
                    "choice",
                    options=tuple(_LIVES),
                    labels=_LIVES,
                ),
                Field(
                    "project_id",
                    "Project",
                    "choice",
                    options=(None, *projects),
                    labels={None: "none", **projects},
                    is_optional=True,
                ),
                _SCOPES_FIELD,
                _NETWORKS_FIELD,
                grants,
            ),
            submit="Create key",
            send=lambda body, once: keys.create(_new_body(body), once=once),
        )
    if made is None:
        return
    one_time.keep(_SLOT, made["name"], made["secret"])
    listing.go_to_start()
    listing.open(made["id"])
    st.rerun()


def _new_body(form: Row) -> Row:
    body = {name: value for name, value in form.items() if name != "expires_days"}
    days = form.get("expires_days")
    if days is not None:
        # Whole days, so that a second click within one is the same request.
        body["expires_at"] = (int(clock.time()) // _DAY_S + 1 + days) * _DAY_S
    if "grants" in body:
        body["grants"] = [_grant(one) for one in body["grants"]]
    return body


def _grant(text: str) -> Row:
    kind, _, id_ = text.partition(":")
    return {"kind": kind, "id": id_}


def _projects(api: Api, tenant: Tenant) -> dict[str, str]:
    """The newest, or those searched, by id."""
    projects = api.of_tenant(tenant["id"], "projects")
    rows = choices.from_many("projects", projects.page, key="new_key_project")
    return {one["id"]: one["name"] for one in rows}


def _grants_field(api: Api, tenant: Tenant) -> Field:
    """What can be granted, the newest of each kind or those searched; nothing chosen: everything."""
    labels: dict[str, str] = {}
    for one in api.of_platform("base-models").page()["data"]:
        labels[f"base:{one['id']}"] = f"base model {one['name']}"
    deployments = api.of_tenant(tenant["id"], "deployments")
    for one in choices.from_many("deployments to grant", deployments.page, key="grant_deployment"):
        labels[f"deployment:{one['id']}"] = f"deployment {one['name']}"
    adapters = api.of_tenant(tenant["id"], "adapters")
    for one in choices.from_many("adapters to grant", adapters.page, key="grant_adapter"):
        labels[f"adapter:{one['id']}"] = f"adapter {one['name']}"
    return Field(
        "grants",
        "It may call only",
        "choices",
        options=tuple(labels),
        labels=labels,
        help="Nothing chosen: everything that the tenant may.",
        is_optional=True,
    )


def _key(api: Api, tenant: Tenant, key: Row, grants: Field, *, can_write: bool) -> None:
    zone = tenant["billing_tz"]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.subheader(fmt.literal(key["name"]))
            status.badge(key["status"])
        st.caption(f"{fmt.code(key['redacted'])} · {fmt.code(key['id'])}")
        sentences(
            [
                {
                    "what": "may use",
                    "it is": fmt.cell(", ".join(_SCOPES.get(s, s) for s in key["scopes"])),
                },
                {"what": "from", "it is": fmt.cell(", ".join(key["ip_allow"])) or "anywhere"},
                {"what": "may call", "it is": _say_grants(key, grants)},
                {
                    "what": "made",
                    "it is": f"{fmt.time(key['created_at'], zone)} by {fmt.cell(key['created_by']) or '–'}",
                },
                {"what": "last used", "it is": fmt.time(key["last_used_at"], zone)},
                {"what": "expires", "it is": fmt.time(key["expires_at"], zone)},
                *(
                    [
                        {
                            "what": "revoked",
                            "it is": f"{fmt.time(key['revoked_at'], zone)}: "
                            f"{key['revoke_reason'] or 'no reason given'}",
                        }
                    ]
                    if key["revoked_at"]
                    else []
                ),
            ]
        )
        if can_write and key["status"] in ("active", "disabled"):
            _change(api, tenant, key, grants)
            _rotate(api, tenant, key)
            _revoke(api, tenant, key)


def _say_grants(key: Row, grants: Field) -> str:
    if key["grants"] is None:
        return "everything that the tenant may"
    said = [f"{one['kind']}:{one['id']}" for one in key["grants"]]
    return ", ".join(fmt.cell(grants.labels.get(one, one)) for one in said)


def _change(api: Api, tenant: Tenant, key: Row, grants: Field) -> None:
    keys = api.of_tenant(tenant["id"], "keys")
    saved = forms.edit(
        f"key_{key['id']}",
        _with_grants_as_text(key),
        (
            Field("name", "Name", max_chars=80),
            Field(
                "status",
                "Status",
                "choice",
                options=("active", "disabled"),
                labels={"disabled": "disabled: refused until it is active again"},
            ),
            _SCOPES_FIELD,
            _NETWORKS_FIELD,
            grants,
        ),
        save=lambda body, version: keys.change(key["id"], _changed_body(body), version=version),
        reload=lambda: _with_grants_as_text(keys.get(key["id"])),
    )
    if saved is not None:
        choices.rerun_with_notice(f"{fmt.code(saved['name'])} is so from its next request on.")


def _with_grants_as_text(key: Row) -> Row:
    grants = [f"{one['kind']}:{one['id']}" for one in key["grants"] or ()]
    return key | {"grants": grants, "scopes": list(key["scopes"])}


def _changed_body(body: Row) -> Row:
    if "grants" not in body:
        return body
    # No list: nothing narrows the key any more.
    return body | {"grants": [_grant(one) for one in body["grants"]] or None}


def _rotate(api: Api, tenant: Tenant, key: Row) -> None:
    keys = api.of_tenant(tenant["id"], "keys")
    with st.expander(
        "Rotate the secret",
        icon=":material/autorenew:",
        key=choices.fresh(f"rotate_{key['id']}_box"),
    ):
        made = forms.create(
            f"rotate_{key['id']}",
            (
                Field(
                    "grace_s",
                    "The old secret ends",
                    "choice",
                    options=tuple(_GRACES),
                    labels=_GRACES,
                    default=_DAY_S,
                    help="Until then both work, so that callers can change over.",
                ),
            ),
            submit="Make a new secret",
            confirm_name=key["name"],
            send=lambda body, once: keys.act(key["id"], "rotate", body, once=once),
        )
    if made is not None:
        one_time.keep(_SLOT, made["name"], made["secret"])
        st.rerun()


def _revoke(api: Api, tenant: Tenant, key: Row) -> None:
    if not confirm.by_name(
        "Revoke this key",
        name=key["name"],
        consequence="Its next request is refused. **This cannot be undone.**",
        button="Revoke it",
        key=f"revoke_{key['id']}",
    ):
        return
    try:
        api.of_tenant(tenant["id"], "keys").remove(key["id"], reason="revoked in the console")
    except ApiError as error:
        choices.show_refusal(error)
        return
    choices.rerun_with_notice(f"{fmt.code(key['name'])} is revoked.")
