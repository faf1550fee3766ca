"""Tenants: who they are, how urgent their requests are, their projects, and the end of one."""

from __future__ import annotations

import zoneinfo
from functools import cache

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError
from loraplex_admin.components import confirm, forms, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

_SCHEDULING = (
    Field(
        "priority",
        "Priority",
        "whole",
        help="From -100 to 100. Requests of a larger one are served first.",
    ),
    Field(
        "weight",
        "Weight",
        help="Its share of what its priority gets: twice the weight, twice the tokens.",
    ),
    Field(
        "memory_weight",
        "Memory weight",
        help="Its share of an engine's KV cache. Empty: its weight.",
        is_optional=True,
    ),
    Field(
        "max_adapters",
        "Most adapters at a time",
        "whole",
        help="On one engine; requests for more wait. Empty: as many as there is room for.",
        is_optional=True,
    ),
)


@cache
def _zones() -> tuple[str, ...]:
    return ("UTC", *sorted(zoneinfo.available_timezones() - {"UTC"}))


def _fields() -> tuple[Field, ...]:
    return (
        Field("name", "Name", max_chars=200),
        Field(
            "billing_tz",
            "Time zone",
            "choice",
            options=_zones(),
            default="UTC",
            help="Whose days and months limits and invoices follow. It is fixed with the first request.",
        ),
        Field(
            "replays_answers",
            "Keep answers for retries",
            "flag",
            help="Answers to requests with an Idempotency-Key are kept for a day, encrypted.",
        ),
    )


def render(api: Api, access: Access) -> None:
    """The list, a form for a new one, then the one that is open."""
    st.title("Tenants")
    choices.show_notice()
    listing = Listing(
        "tenants",
        fetch=api.tenants,
        columns=Columns(_cells, wide=("name",)),
        search_label="Search tenants",
        empty="There is no tenant yet. Create the first one below: it gets keys, limits and bills of its own."
        if access.may("tenant.create")
        else "You are in no tenant yet. Ask an owner for an invitation.",
    )
    open_id = listing.show()
    if access.may("tenant.create"):
        _new_tenant(api, listing)
    if open_id is None:
        return
    try:
        tenant = api.all_tenants.get(open_id)
    except ApiError as error:
        listing.refuse(error)
        return
    _tenant(api, access, tenant, listing)


def _cells(tenant: Row) -> dict[str, object]:
    return {
        "slug": tenant["slug"],
        "name": fmt.cell(tenant["name"]),
        "status": tenant["status"],
        "time zone": tenant["billing_tz"],
        "created": fmt.moment(tenant["created_at"], tenant["billing_tz"]),
    }


def _new_tenant(api: Api, listing: Listing) -> None:
    with st.expander("New tenant", icon=":material/add:", key=choices.fresh("new_tenant_box")):
        made = forms.create(
            "new_tenant",
            (
                Field(
                    "slug",
                    "Slug",
                    max_chars=63,
                    help="Its short name, for good: lower-case letters, digits and dashes.",
                    placeholder="acme",
                ),
                Field("name", "Name (optional)", max_chars=200, is_optional=True),
                _fields()[1],
            ),
            submit="Create tenant",
            send=lambda body, once: dict(api.create_tenant(body, once=once)),
        )
    if made is None:
        return
    listing.go_to_start()
    listing.open(made["id"])
    st.session_state["last_tenant_id"] = made["id"]
    choices.rerun_with_notice(
        f"Tenant {fmt.code(made['slug'])} is there. Next: a key under *API keys*, people under *Members*."
    )


def _tenant(api: Api, access: Access, tenant: Row, listing: Listing) -> None:
    id_ = tenant["id"]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.subheader(fmt.literal(tenant["name"]))
            status.badge(tenant["status"])
        st.caption(
            f"{fmt.code(tenant['slug'])} · {fmt.code(id_)} · days and months of "
            f"{fmt.literal(tenant['billing_tz'])} · since {fmt.time(tenant['created_at'], tenant['billing_tz'])}"
        )
        if access.may("tenant.update", id_):
            saved = forms.edit(
                f"tenant_{id_}",
                tenant,
                _fields(),
                save=lambda body, version: api.all_tenants.change(id_, body, version=version),
                reload=lambda: api.all_tenants.get(id_),
            )
            if saved is not None:
                choices.rerun_with_notice(f"{fmt.code(tenant['slug'])} is changed.")
        _scheduling(api, access, id_)
        _projects(api, access, id_)
        _ends(api, access, tenant, listing)


def _scheduling(api: Api, access: Access, tenant_id: str) -> None:
    path = f"/tenants/{tenant_id}/scheduling"
    now = _as_text(api.read(path))
    with st.expander(
        "How urgent its requests are",
        icon=":material/low_priority:",
        key=choices.fresh("scheduling_box"),
    ):
        st.dataframe(
            [{one.label: one.say(now[one.name]) for one in _SCHEDULING}],
            hide_index=True,
            key="scheduling_table",
        )
        if not access.may("limit.write"):
            return
        saved = forms.edit(
            f"scheduling_{tenant_id}",
            now,
            _SCHEDULING,
            save=lambda body, version: api.send("PATCH", path, _as_numbers(body), version=version),
            reload=lambda: _as_text(api.read(path)),
        )
    if saved is not None:
        choices.empty("scheduling_box")
        choices.rerun_with_notice("Its requests are scheduled so from the next one on.")


def _as_text(scheduling: Row) -> Row:
    """Weights as the reader types them."""
    weights = {
        name: None if scheduling[name] is None else f"{scheduling[name]:g}"
        for name in ("weight", "memory_weight")
    }
    return scheduling | weights


def _as_numbers(body: Row) -> Row:
    changed = dict(body)
    for name in ("weight", "memory_weight"):
        if isinstance(changed.get(name), str):
            try:
                changed[name] = float(changed[name])
            except ValueError as error:
                raise ApiError(
                    "Write a number such as 2 or 0.5.",
                    status=400,
                    code="invalid_request",
                    param=name,
                ) from error
    return changed


def _projects(api: Api, access: Access, tenant_id: str) -> None:
    projects = api.of_tenant(tenant_id, "projects")
    with st.expander("Projects", icon=":material/folder:", key="projects"):
        listing = Listing(
            "projects",
            fetch=projects.page,
            columns=Columns(
                lambda one: {
                    "name": fmt.cell(one["name"]),
                    "since": fmt.moment(one["created_at"]),
                    "id": one["id"],
                },
                wide=("name",),
            ),
            search_label="Search projects",
            empty="No project yet. One has keys, limits and reports of its own within the tenant.",
            is_main=False,
        )
        open_id = listing.show()
        if not access.may("project.write", tenant_id):
            return
        if open_id is not None:
            try:
                _project(api, tenant_id, open_id, listing)
            except ApiError as error:
                listing.refuse(error)
        made = forms.create(
            "new_project",
            (Field("name", "Name of a new project", max_chars=80),),
            submit="Create project",
            send=lambda body, once: projects.create(body, once=once),
        )
    if made is not None:
        listing.go_to_start()
        choices.rerun_with_notice(f"Project {fmt.code(made['name'])} is there.")


def _project(api: Api, tenant_id: str, project_id: str, listing: Listing) -> None:
    projects = api.of_tenant(tenant_id, "projects")
    project = projects.get(project_id)
    saved = forms.edit(
        f"project_{project_id}",
        project,
        (Field("name", "Name", max_chars=80),),
        save=lambda body, version: projects.change(project_id, body, version=version),
        reload=lambda: projects.get(project_id),
    )
    if saved is not None:
        choices.rerun_with_notice(f"The project is called {fmt.code(saved['name'])} now.")
    if confirm.by_name(
        "Archive this project",
        name=project["name"],
        consequence="It takes no new keys. What it used stays in the reports.",
        button="Archive it",
        key=f"archive_{project_id}",
    ):
        try:
            projects.remove(project_id, version=project["version"])
        except ApiError as error:
            choices.show_refusal(error)
            return
        listing.open(None)
        choices.rerun_with_notice(f"Project {fmt.code(project['name'])} is archived.")


def _ends(api: Api, access: Access, tenant: Row, listing: Listing) -> None:
    id_, slug = tenant["id"], tenant["slug"]
    if access.may("tenant.suspend") and tenant["status"] == "active":
        if confirm.by_name(
            "Suspend this tenant",
            name=slug,
            consequence="All of its keys are refused from the next request on. Nothing is lost, and it can be activated "
            "again.",
            button="Suspend it",
            key=f"suspend_{id_}",
        ):
            _act(api, id_, "suspend", f"{fmt.code(slug)} is suspended.")
    elif (
        access.may("tenant.suspend")
        and tenant["status"] == "suspended"
        and st.button("Activate it again", key=f"activate_{id_}", type="primary")
    ):
        _act(api, id_, "activate", f"{fmt.code(slug)} is active again.")
    if not access.may("tenant.delete") or not confirm.by_name(
        "Delete this tenant for good",
        name=slug,
        consequence="Keys, members, adapters and their files, answers and names are erased and **cannot be brought back**. "
        "What the law has to be kept, invoices and the books behind them, stays.",
        button="Delete it for good",
        key=f"delete_{id_}",
    ):
        return
    try:
        api.all_tenants.remove(id_, confirm=slug)
    except ApiError as error:
        choices.show_refusal(error)
        return
    st.session_state["last_tenant_id"] = ""
    listing.open(None)
    choices.rerun_with_notice(f"{fmt.code(slug)} is deleted.")


def _act(api: Api, tenant_id: str, verb: str, notice: str) -> None:
    try:
        api.all_tenants.act(tenant_id, verb)
    except ApiError as error:
        choices.show_refusal(error)
        return
    choices.rerun_with_notice(notice)
