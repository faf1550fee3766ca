"""The latest requests: metadata only, never a prompt."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, User


def render(api: Api, _user: User) -> None:
    """One page of the log, newest first."""
    st.title("Requests")
    tenant = choices.tenant(api, key="requests_tenant", allow_all=True)
    cursors = f"requests_cursors_{tenant['id'] if tenant else 'all'}"
    page = api.requests(tenant_id=tenant["id"] if tenant else None, after=choices.cursor(cursors))
    if not page["data"]:
        st.info("No request yet.")
        return
    st.dataframe(
        [
            {
                "time": fmt.time(row.get("admitted_at")),
                "model": row.get("model"),
                "state": row.get("state"),
                "status": row.get("http_status"),
                "finish": row.get("finish_reason"),
                "prompt": row.get("prompt_tokens"),
                "completion": row.get("completion_tokens"),
                "TTFT ms": row.get("ttft_ms"),
                "total ms": row.get("e2e_ms"),
                "error": row.get("error_code"),
                "id": row["id"],
            }
            for row in page["data"]
        ],
        hide_index=True,
        key="requests_table",
    )
    choices.pager(cursors, page["last_id"], has_more=page["has_more"])
