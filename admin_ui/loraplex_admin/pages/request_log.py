"""The latest requests: metadata only, never a prompt; of the one that is open, what became of it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError
from loraplex_admin.components.listing import Columns, Listing

_STATES = {"reserved": "running"}


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
    open_id = Listing(
        "requests",
        fetch=lambda after=None: api.requests(tenant_id=tenant_id, after=after),
        columns=Columns(
            lambda one: _cells(one, slugs, zone),
            numbers=("status", "prompt", "completion", "first ms", "total ms"),
            wide=("model",),
            help={
                "prompt": "Tokens.",
                "completion": "Tokens.",
                "first ms": "Until the first token, in milliseconds.",
                "total ms": "Until the last one, in milliseconds.",
            },
        ),
        empty="No request yet. Give a key's secret to who calls, or ask something on the *Playground*.",
    ).show()
    st.caption("Newest first. Prompts and answers are stored nowhere.")
    if open_id is not None:
        _explain(api, open_id, zone)


def _cells(row: Any, slugs: dict[str, str], zone: str) -> dict[str, object]:  # noqa: ANN401 (a row)
    whose = {"tenant": slugs.get(row["tenant_id"], row["tenant_id"])} if slugs else {}
    return {
        "time": fmt.time(row["created_at"], zone),
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
        "kind": row["kind"],
        "id": row["id"],
    }


def _number(value: int | None) -> str:
    """Blank while there is none: a table writes "None" otherwise."""
    return "" if value is None else str(value)


def _explain(api: Api, request_id: str, zone: str) -> None:
    with st.container(border=True):
        st.markdown(f"What became of {fmt.code(request_id)}")
        try:
            found = api.explain(request_id)
        except ApiError as error:
            choices.show_refusal(error)
            return
        st.markdown(fmt.literal(found["summary"]))
        for detail in found["details"]:
            st.markdown(f"- {fmt.literal(detail)}")
        st.caption(fmt.time(found["at"], zone))
