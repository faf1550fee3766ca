"""The part of the evals' page that runs suites by themselves."""

from __future__ import annotations

import time as clock

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, ApiError, Tenant
from loraplex_admin.components import confirm, forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Collection, Row


def show(api: Api, tenant: Tenant, suites: dict[str, str], *, can_write: bool) -> None:
    """The list, a form for a new one, then the one that is open."""
    st.subheader("Schedules")
    schedules, zone = api.of_tenant(tenant["id"], "eval-schedules"), tenant["billing_tz"]
    listing = Listing(
        "schedules",
        fetch=schedules.page,
        columns=Columns(
            lambda one: {
                "name": fmt.cell(one["name"]),
                "suite": fmt.cell(suites.get(one["suite_id"], one["suite_id"])),
                "asks": fmt.cell(one["deployment"] or one["revision_id"]),
                "when": one["cron"] or f"every {one['every_hours']} h",
                "runs next": fmt.reset(one["next_at"], zone, clock.time())
                if one["is_enabled"]
                else "is off",
                "last trouble": fmt.cell(one["last_error"]) or "–",
            },
            wide=("runs next", "last trouble"),
        ),
        search_label="Search schedules",
        empty="Nothing runs by itself. "
        + ("Schedule a suite below." if can_write and suites else "First there must be a suite."),
        is_main=False,
        can_open=can_write,
    )
    open_id = listing.show()
    if not can_write:
        return
    if suites:
        _new_schedule(api, tenant, listing)
    if open_id is None:
        return
    try:
        _schedule(schedules, schedules.get(open_id), listing)
    except ApiError as error:
        listing.refuse(error)


def _new_schedule(api: Api, tenant: Tenant, listing: Listing) -> None:
    schedules = api.of_tenant(tenant["id"], "eval-schedules")
    deployments = api.of_tenant(tenant["id"], "deployments")
    if not deployments.page(limit=1)["data"]:
        return
    with st.expander(
        "New schedule", icon=":material/schedule:", key=choices.fresh("new_schedule_box")
    ):
        rows = choices.from_many("deployments", deployments.page, key="new_schedule_deployment")
        names = [one["name"] for one in rows]
        all_suites = api.of_tenant(tenant["id"], "eval-suites")
        rows = choices.from_many("suites", all_suites.page, key="new_schedule_suite")
        suites = {one["id"]: one["name"] for one in rows}
        made = forms.create(
            "new_schedule",
            (
                Field("name", "Name", max_chars=64, placeholder="nightly"),
                Field("suite_id", "Suite", "choice", options=tuple(suites), labels=suites),
                Field("deployment", "Deployment", "choice", options=names),
                Field(
                    "cron",
                    "When",
                    max_chars=128,
                    placeholder="0 3 * * *",
                    help=f"As cron has it, in {tenant['billing_tz']}.",
                ),
            ),
            submit="Schedule it",
            send=lambda body, once: schedules.create(body, once=once),
        )
    if made is not None:
        listing.go_to_start()
        said = fmt.reset(made["next_at"], tenant["billing_tz"], clock.time())
        choices.rerun_with_notice(f"{fmt.code(made['name'])} runs next {said}.")


def _schedule(schedules: Collection, schedule: Row, listing: Listing) -> None:
    id_ = schedule["id"]
    is_on = schedule["is_enabled"]
    if st.button("Switch it off" if is_on else "Switch it on", key=f"switch_{id_}"):
        schedules.change(id_, {"is_enabled": not is_on}, version=schedule["version"])
        choices.rerun_with_notice(
            "It does not run by itself now." if is_on else "It runs by itself again."
        )
    if confirm.by_name(
        "Delete this schedule",
        name=schedule["name"],
        consequence="It runs no more. Its finished runs stay.",
        button="Delete it",
        key=f"delete_{id_}",
    ):
        schedules.remove(id_)
        listing.open(None)
        choices.rerun_with_notice(f"{fmt.code(schedule['name'])} is deleted.")
