"""The latest requests: metadata only, never a prompt."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, RequestRow, User


def render(api: Api, _user: User) -> None:
    """One page of the log, newest first."""
    st.title("Requests")
    tenant = choices.tenant(api, key="requests_tenant", allow_all=True)
    tenant_id = tenant["id"] if tenant else None
    cursors = f"requests_cursors_{tenant_id or 'all'}"
    page = api.requests(tenant_id=tenant_id, after=choices.cursor(cursors))
    if not page["data"]:
        st.info("No request yet.")
        return
    slugs = {t["id"]: t["slug"] for t in api.tenants(limit=choices.MAX_CHOICES)["data"]}
    st.dataframe(
        [_row(row, slugs) for row in page["data"]],
        hide_index=True,
        column_order=None if tenant is None else [c for c in _COLUMNS if c != "tenant"],
        height="content",
        column_config={
            "model": st.column_config.TextColumn(width="medium"),
            **{name: st.column_config.TextColumn(alignment="right") for name in _NUMBERS},
        },
        key="requests_table",
    )
    choices.pager(cursors, page)
    st.caption("Newest first. Prompts and answers are stored nowhere.")


_COLUMNS = (
    "time",
    "tenant",
    "model",
    "state",
    "status",
    "ended",
    "prompt",
    "completion",
    "first ms",
    "total ms",
    "error",
    "kind",
    "id",
)
_NUMBERS = ("status", "prompt", "completion", "first ms", "total ms")


def _row(row: RequestRow, slugs: dict[str, str]) -> dict[str, object]:
    return {
        "time": fmt.time(row["created_at"]),
        "tenant": slugs.get(row["tenant_id"], row["tenant_id"]),
        "model": row["model"],
        "state": "running" if row["state"] == "reserved" else row["state"],
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
