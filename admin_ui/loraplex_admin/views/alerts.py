"""What somebody should look at: thresholds passed, pins that end, evals that changed, rollouts held, webhooks off."""

from __future__ import annotations

import time as clock
from typing import Any, Final

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, Page
from loraplex_admin.components import status
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

KINDS: Final = {
    "limit_threshold": "limit: a threshold is passed",
    "pin_expiring": "pin: ends soon",
    "pin_expired": "pin: has ended",
    "eval_changed": "eval: answers changed",
    "rollout_hold": "rollout: held",
    "rollout_aborted": "rollout: aborted",
    "webhook_failed": "webhook: switched off",
}
# Where its remedy is.
_PAGES: Final = {
    "limit_threshold": "Limits",
    "pin_expiring": "Deployments",
    "pin_expired": "Deployments",
    "eval_changed": "Evals",
    "rollout_hold": "Rollouts",
    "rollout_aborted": "Rollouts",
    "webhook_failed": "Webhooks",
}
_DAY_S: Final = 86_400
_SPANS: Final = {"1d": ("last day", 1), "7d": ("last 7 days", 7), "30d": ("last 30 days", 30)}


def render(api: Api, access: Access) -> None:
    """Filters, the list, then the one that is open."""
    st.title("Alerts")
    left, middle, right = st.columns(3)
    with left:
        tenant = choices.tenant(
            api, access, key="alerts_tenant", action="alert.read", allow_all=True
        )
    with middle:
        kind = choices.filtered("Kind", KINDS, name="kind")
    with right:
        span = choices.filtered(
            "Time", {name: words for name, (words, _) in _SPANS.items()}, name="time"
        )
    zone = tenant["billing_tz"] if tenant else "UTC"
    slugs = {}
    if tenant is None:
        slugs = {one["id"]: one["slug"] for one in api.tenants(limit=choices.MAX_CHOICES)["data"]}
    start = None if span is None else str(int(clock.time()) - _SPANS[span][1] * _DAY_S)
    found: list[Row] = []

    def fetch(after: str | None = None) -> Page[Row]:
        page = api.of_platform("alerts").page(
            after=after, tenant_id=tenant["id"] if tenant else None, kind=kind, start_time=start
        )
        found.extend(page["data"])
        return page

    open_id = Listing(
        "alerts",
        fetch=fetch,
        columns=Columns(lambda one: _cells(one, slugs, zone), widest=("what",)),
        empty="No alert is so. Choose *any* kind and time."
        if kind or span
        else "Nothing has called for attention. Set percents at which a limit alerts on *Limits*, and an address "
        "that is told on *Webhooks*.",
        has_all=True,
    ).show()
    alert = next((one for one in found if one["id"] == open_id), None)
    if alert is not None:
        _alert(alert, zone, access)


def _say_kind(kind: str) -> str:
    return KINDS.get(kind, kind.replace("_", " "))


def cells(alert: Row, zone: str) -> dict[str, str]:
    """An alert as a table shows it."""
    return {
        "time": fmt.moment(alert["at"], zone),
        "severity": alert["severity"],
        "what": fmt.cell(alert["summary"]),
        "kind": _say_kind(alert["kind"]),
    }


def _cells(alert: Row, slugs: dict[str, str], zone: str) -> dict[str, Any]:
    owner = alert["tenant_id"]
    whose = slugs.get(owner, owner) if owner else "the platform"
    return cells(alert, zone) | ({"tenant": whose} if slugs else {})


def _alert(alert: Row, zone: str, access: Access) -> None:
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{fmt.literal(_say_kind(alert['kind']))}**", width="content")
            status.badge(alert["severity"])
        st.markdown(fmt.literal(alert["summary"]))
        for subject in alert["subjects"]:
            st.markdown(
                f"- {fmt.literal(subject['kind'].replace('_', ' '))} {fmt.code(subject['id'])}"
            )
        page = _PAGES.get(alert["kind"])
        if page is not None and (
            page != "Webhooks" or access.may("webhook.read", alert["tenant_id"])
        ):
            st.caption(f"See *{page}* for what to do.")
        st.caption(f"{fmt.code(alert['id'])} · {fmt.time(alert['at'], zone)}")
