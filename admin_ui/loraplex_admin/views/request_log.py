"""The latest requests: metadata only, never a prompt; of the one that is open, what became of it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, Tenant
from loraplex_admin.components import address, explanation
from loraplex_admin.components.listing import Columns, Listing

_STATES = {"reserved": "running"}
_ARMS = ("stable", "canary", "shadow", "pinned", "named")


def render(api: Api, access: Access) -> None:
    """The log, newest first; then the one that is open, explained."""
    st.title("Requests")
    tenant = choices.tenant(
        api, access, key="requests_tenant", action="request.read", allow_all=True
    )
    tenant_id = tenant["id"] if tenant else None
    zone = tenant["billing_tz"] if tenant else "UTC"
    slugs = {}
    if tenant is None:
        slugs = {one["id"]: one["slug"] for one in api.tenants(limit=choices.MAX_CHOICES)["data"]}
    wanted = _filters()
    typed = st.text_input(
        "Request id",
        max_chars=80,
        key="request",
        bind="query-params",
        icon=":material/search:",
        placeholder="req_…, the x-request-id of an answer",
    ).strip()
    if typed:
        with st.container(border=True):
            explanation.show(api, typed, zone)
    open_id = Listing(
        "requests",
        fetch=lambda after=None: api.requests(tenant_id=tenant_id, after=after, **wanted),
        columns=Columns(
            lambda one: _cells(one, slugs, zone),
            numbers=("status", "prompt", "completion", "first ms", "total ms"),
            help={
                "prompt": "Tokens.",
                "completion": "Tokens.",
                "first ms": "Until the first token, in milliseconds.",
                "total ms": "Until the last one, in milliseconds.",
            },
        ),
        empty="No request is so. Take a filter out."
        if any(wanted.values())
        else "No request yet. Give a key's secret to who calls, or ask something on the *Playground*.",
    ).show()
    st.caption(_say_contents(tenant))
    if open_id is not None:
        with st.container(border=True):
            explanation.show(api, open_id, zone)


def _say_contents(tenant: Tenant | None) -> str:
    """Who opted in, and what that keeps; of no one is there a text that could be shown here."""
    if tenant is None or not tenant["replays_answers"]:
        return "Newest first. Prompts and answers are stored nowhere."
    return (
        "Newest first. Prompts are stored nowhere. This tenant opted in to replays: answers to requests with an "
        "Idempotency-Key are kept for a day, sealed, for whoever repeats the request under that key. They are shown to "
        "nobody else, and so not here."
    )


def _filters() -> dict[str, str | None]:
    """What is asked; each is in the address under the key of its field."""
    with st.expander("Filters", icon=":material/filter_list:", key="requests_filters"):
        columns = st.columns(3)
        wanted: dict[str, str | None] = {
            "revision_id": columns[0].text_input(
                "Answered by revision",
                max_chars=80,
                key="revision",
                bind="query-params",
                placeholder="rev_…",
            ),
            "rollout_id": columns[1].text_input(
                "Of rollout", max_chars=80, key="rollout", bind="query-params", placeholder="rol_…"
            ),
            "arm": columns[2].selectbox("Side", ["any", *_ARMS], key="side", bind="query-params"),
        }
    wanted = {
        name: None if value is None or value.strip() in ("", "any") else value.strip()
        for name, value in wanted.items()
    }
    if st.session_state.setdefault("requests_wanted", wanted) != wanted:
        st.session_state["requests_wanted"] = wanted
        address.put(after=None, id=None)
    return wanted


def _cells(row: Any, slugs: dict[str, str], zone: str) -> dict[str, object]:  # noqa: ANN401 (a row)
    whose = {"tenant": slugs.get(row["tenant_id"], row["tenant_id"])} if slugs else {}
    return {
        "time": fmt.moment(row["created_at"], zone),
        **whose,
        "model": fmt.cell(row["model"]),
        "state": _STATES.get(row["state"], row["state"]),
        "status": _number(row["http_status"]),
        "ended": row["finish_reason"] or "",
        "prompt": _number(row["prompt_tokens"]),
        "completion": _number(row["completion_tokens"]),
        "first ms": _number(row["ttft_ms"]),
        "total ms": _number(row["e2e_ms"]),
        "error": row["error_code"] or "",
        "side": row.get("arm") or "",
        "kind": row["kind"],
        "id": row["id"],
    }


def _number(value: int | None) -> str:
    """Blank while there is none: a table writes "None" otherwise."""
    return "" if value is None else str(value)
