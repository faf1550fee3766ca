"""Deployments: which model ids a tenant has, exactly what answers under each, its revisions, and pins."""

from __future__ import annotations

import json
import time as clock
from functools import partial
from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Page, Tenant
from loraplex_admin.components import confirm, forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row, segment

_BASE = "the base, without an adapter"
_DAY_S = 86_400
_PIN_DAYS = {None: "for good", 7: "7 days", 30: "30 days", 365: "a year"}
_SAMPLING = ("temperature", "top_p", "max_tokens")


def render(api: Api, access: Access) -> None:
    """The list, a form for what shall answer, then the one that is open with its revisions."""
    st.title("Deployments")
    choices.show_notice()
    is_operator = access.may("platform_deployment.read")
    tenant = choices.tenant(
        api, access, key="deployments_tenant", action="deployment.read", allow_all=is_operator
    )
    if tenant is None and not is_operator:
        return
    if tenant is None:
        st.caption("The platform's own: the base model that all tenants reach.")
        can_write = access.may("platform_deployment.write")
    else:
        can_write = access.may("deployment.write", tenant["id"])
    listing = Listing(
        "deployments",
        fetch=partial(_page, api, tenant),
        search_label="Search model ids",
        columns=Columns(lambda one: _cells(one, _zone(tenant)), wide=("model id", "answers with")),
        empty="No deployment yet: this tenant reaches only the base model. "
        + ("Deploy something below." if can_write else "Its developers deploy adapters."),
    )
    name = listing.show()
    if can_write:
        _deploy(api, tenant)
    if name is not None:
        try:
            deployment = api.owned(tenant, "deployments").get(name)
        except ApiError as error:
            listing.refuse(error)
        else:
            _open(api, tenant, deployment, listing, can_write=can_write)
    if tenant is not None:
        _pins(api, tenant)


def _zone(tenant: Tenant | None) -> str:
    return "UTC" if tenant is None else tenant["billing_tz"]


def _page(
    api: Api, tenant: Tenant | None, after: str | None = None, search: str | None = None
) -> Page[Row]:
    """Rows whose id is the model id: that is what the API and the address call a deployment."""
    page = api.owned(tenant, "deployments").page(after=after, search=search)
    page["data"] = [row | {"id": row["name"]} for row in page["data"]]
    return page


def _cells(deployment: Row, zone: str) -> dict[str, object]:
    revision = deployment["revision"]
    return {
        "model id": fmt.cell(deployment["name"]),
        "answers with": _say_adapter(revision),
        "digest": fmt.digest(revision["digest"]),
        "revision": str(revision["number"]),
        "follows": _say_follow(deployment),
        "since": fmt.moment(deployment["updated_at"], zone),
    }


def _say_adapter(revision: Row) -> str:
    if revision["adapter_name"] is None:
        return _BASE
    return fmt.cell(f"{revision['adapter_name']} v{revision['version']}")


def _say_follow(deployment: Row) -> str:
    follow = deployment["follow"]
    return "–" if follow is None else f"alias {follow['alias']}"


# ---------------------------------------------------------------------------------- deploy


def _versions(api: Api, tenant: Tenant | None, key: str) -> dict[str, str]:
    """What can be deployed, of the newest adapters or those that are searched; the base first."""
    found = {"": _BASE}
    if tenant is None:
        return found
    adapters = api.of_tenant(tenant["id"], "adapters")
    for adapter in choices.from_many("adapters", adapters.page, key=key):
        for version in adapter["versions"]:
            if version["status"] == "ready":
                found[version["id"]] = f"{adapter['name']} v{version['version']}"
    return found


def _content_fields(api: Api, tenant: Tenant | None, key: str) -> tuple[Field, ...]:
    versions = _versions(api, tenant, f"{key}_adapter")
    return (
        Field("version_id", "Answers with", "choice", options=tuple(versions), labels=versions),
        Field(
            "engine_build_id",
            "Only on this engine build",
            max_chars=80,
            placeholder="bld_…",
            help="Its id is on the *Models* page. Empty: any build of the base.",
            is_optional=True,
        ),
        Field(
            "system_prompt",
            "System prompt",
            "area",
            help="For chats that bring no system message of their own.",
            is_optional=True,
        ),
        Field(
            "temperature",
            "Temperature",
            max_chars=8,
            placeholder="as the request has it",
            is_optional=True,
        ),
        Field("top_p", "Top p", max_chars=8, placeholder="as the request has it", is_optional=True),
        Field("max_tokens", "Most tokens", "whole", is_optional=True),
    )


def _content(form: Row) -> Row:
    """A revision as the API takes it."""
    sampling: Row = {}
    for name in _SAMPLING:
        if name in form:
            try:
                sampling[name] = form[name] if name == "max_tokens" else float(form[name])
            except ValueError as error:
                raise ApiError(
                    "Write a number such as 0.7.", status=400, code="invalid_request", param=name
                ) from error
    params: Row = {}
    if "system_prompt" in form:
        params["system_prompt"] = form["system_prompt"]
    if sampling:
        params["sampling"] = sampling
    body: Row = {"version_id": form["version_id"] or None}
    if "engine_build_id" in form:
        body["engine_build_id"] = form["engine_build_id"]
    return body | ({"params": params} if params else {})


def _deploy(api: Api, tenant: Tenant | None) -> None:
    with st.expander("Deploy", icon=":material/rocket_launch:", key=choices.fresh("deploy_box")):
        made = forms.create(
            "deploy",
            (
                Field(
                    "name",
                    "Model id",
                    max_chars=128,
                    placeholder="capitals",
                    help="What the tenant's clients write as `model`. One that is there changes at once; what is left empty "
                    "here stays as it is.",
                ),
                *_content_fields(api, tenant, "deploy"),
            ),
            submit="Deploy",
            check=lambda body: None if body["name"] else "Write a model id.",
            send=lambda body, _once: api.deploy_content(tenant, body["name"], _content(body)),
        )
    if made is not None:
        choices.rerun_with_notice(
            f"{fmt.code(made['name'])} answers with {fmt.literal(_say_adapter(made['revision']))} from now on."
        )


# ------------------------------------------------------------------------------------ open


def _open(
    api: Api, tenant: Tenant | None, deployment: Row, listing: Listing, *, can_write: bool
) -> None:
    name = deployment["name"]
    with st.container(border=True):
        st.subheader(fmt.literal(name))
        st.caption(
            f"{fmt.code(deployment['id'])} · base {fmt.code(deployment['base_model'])} · revision "
            f"{deployment['revision']['number']} answers"
        )
        try:
            _revisions(api, tenant, deployment)
            if can_write:
                _new_revision(api, tenant, name)
                if tenant is not None:
                    _pin(api, tenant, deployment)
                    _archive(api, tenant, name, listing)
        except ApiError as error:
            choices.show_refusal(error)


def _revisions(api: Api, tenant: Tenant | None, deployment: Row) -> None:
    zone, name = _zone(tenant), deployment["name"]
    revisions = api.owned(tenant, "deployments").under(name, "revisions")
    current = deployment["revision"]["id"]
    chosen = Listing(
        "revisions",
        fetch=lambda after=None: revisions.page(after=after),
        columns=Columns(
            lambda one: {
                "revision": str(one["number"]),
                "": "answers now" if one["id"] == current else "",
                "adapter": _say_adapter(one),
                "build": one["engine_build_id"] or "any",
                "prices": one["price_book_id"] or "in force",
                "parameters": fmt.cell(json.dumps(one["params"], ensure_ascii=False))
                if one["params"]
                else "–",
                "made": fmt.moment(one["created_at"], zone),
            },
            wide=("adapter",),
        ),
        empty="It has no revision yet.",
        is_main=False,
    ).show()
    if chosen is None or chosen == current:
        return
    found = revisions.get(chosen, against=current)
    st.markdown(f"**Revision {found['number']} beside what answers now**")
    st.dataframe(
        [
            {
                "field": one["field"],
                "now": _say(one["before"]),
                f"revision {found['number']}": _say(one["after"]),
            }
            for one in found["changes"] or ()
        ]
        or [{"field": "nothing differs"}],
        hide_index=True,
        key="revision_changes",
    )


def _say(value: Any) -> str:  # noqa: ANN401 (whatever JSON has there)
    return (
        "–" if value is None else fmt.cell(value if isinstance(value, str) else json.dumps(value))
    )


def _new_revision(api: Api, tenant: Tenant | None, name: str) -> None:
    revisions = api.owned(tenant, "deployments").under(name, "revisions")
    with st.expander(
        "New revision, for a rollout or a pin",
        icon=":material/add:",
        key=choices.fresh("revision_box"),
    ):
        made = forms.create(
            "revision",
            _content_fields(api, tenant, "revision"),
            submit="Make the revision",
            send=lambda body, once: revisions.create(_content(body), once=once),
        )
    if made is not None:
        choices.rerun_with_notice(
            f"Revision {made['number']} of {fmt.code(name)} is there. Nothing answers with it before a rollout does."
        )


def _pin(api: Api, tenant: Tenant, deployment: Row) -> None:
    name = deployment["name"]
    path = f"{api.of_tenant(tenant['id'], 'deployments').path}"
    with st.expander("Pin to a revision", icon=":material/push_pin:", key=choices.fresh("pin_box")):
        st.caption("The tenant's requests stay at it, whatever is deployed or rolled out.")
        made = forms.create(
            "pin",
            (
                Field(
                    "revision_id",
                    "Revision (id)",
                    max_chars=80,
                    default=deployment["revision"]["id"],
                ),
                Field("days", "For", "choice", options=tuple(_PIN_DAYS), labels=_PIN_DAYS),
                Field(
                    "reason",
                    "Reason",
                    max_chars=500,
                    placeholder="audited until the end of the year",
                ),
            ),
            submit="Pin it",
            send=lambda body, _once: api.send(
                "PUT", f"{path}/{segment(name)}/pin", _pin_body(body)
            ),
        )
    if made is not None:
        choices.rerun_with_notice(f"{fmt.code(name)} stays at revision {made['revision']}.")


def _pin_body(form: Row) -> Row:
    days = form.get("days")
    until = None if days is None else (int(clock.time()) // _DAY_S + 1 + days) * _DAY_S
    return {"revision_id": form["revision_id"], "reason": form["reason"], "until": until}


def _archive(api: Api, tenant: Tenant, name: str, listing: Listing) -> None:
    if not confirm.by_name(
        "Take this model id out of service",
        name=name,
        consequence="Its next request is refused with 404. A pin of it ends; its history stays.",
        button="Take it out",
        key="archive",
    ):
        return
    api.owned(tenant, "deployments").remove(name)
    listing.open(None)
    choices.rerun_with_notice(f"{fmt.code(name)} is out of service.")


# ------------------------------------------------------------------------------------ pins


def _pins(api: Api, tenant: Tenant) -> None:
    st.subheader("Pins")
    zone = tenant["billing_tz"]
    Listing(
        "pins",
        fetch=lambda after=None: api.of_tenant(tenant["id"], "pins").page(after=after),
        columns=Columns(
            lambda one: {
                "deployment": fmt.cell(one["deployment"]),
                "stays at": f"revision {one['revision']}",
                "until": fmt.reset(one["until"], zone, clock.time())
                if one["until"]
                else "for good",
                "state": one["state"],
                "trouble": ", ".join(one["problems"]).replace("_", " ") or "–",
                "why": fmt.cell(one["reason"]),
            },
            wide=("deployment", "until", "why"),
        ),
        empty="Nothing is pinned: requests go with whatever is deployed or rolled out.",
        is_main=False,
        can_open=False,
    ).show()
