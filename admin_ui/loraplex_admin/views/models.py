"""Base models and the engine builds that compute them: what a revision can be tied to."""

from __future__ import annotations

import json

import streamlit as st

from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, Page
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row


def render(api: Api, _access: Access) -> None:
    """Models, then builds and the facts of the one that is open."""
    st.title("Models")
    Listing(
        "models",
        fetch=api.of_platform("base-models").page,
        columns=Columns(
            lambda one: {
                "name": fmt.cell(one["name"]),
                "weights": fmt.digest(one["revision"]),
                "license": one["license"] or "–",
                "tokenizer": fmt.digest(one["tokenizer_sha256"]),
                "chat template": fmt.digest(one["chat_template_sha256"]),
                "id": one["id"],
            },
        ),
        empty="No base model is registered: the control API registers its own when it starts.",
        search_label="Search models",
        can_open=False,
        is_main=False,
    ).show()
    st.subheader("Engine builds")
    st.caption("Replicas of one build give the same bits. A revision can be tied to one.")
    found: list[Row] = []

    def fetch(after: str | None = None, search: str | None = None) -> Page[Row]:
        page = api.of_platform("engine-builds").page(after=after, search=search)
        found.extend(page["data"])
        return page

    open_id = Listing(
        "builds",
        fetch=fetch,
        columns=Columns(
            lambda one: {
                "fingerprint": fmt.digest(one["fingerprint"]),
                "base": fmt.cell(one["base_model"]),
                "runs now": "yes" if one["is_running"] else "no",
                "replicas": "–"
                if one["replicas"] is None
                else ", ".join(one["replicas"]) or "none",
                "last seen": fmt.moment(one["last_seen_at"]),
            },
            wide=("base", "replicas"),
        ),
        empty="No engine was ever seen here. Start one with `loraplex engine`.",
        search_label="Search builds",
        has_all=True,
    ).show()
    build = next((one for one in found if one["id"] == open_id), None)
    if build is None:
        return
    with st.container(border=True):
        st.markdown(f"{fmt.code(build['id'])} · {fmt.code(build['fingerprint'])}")
        st.caption(
            f"Seen first {fmt.time(build['first_seen_at'])}, last {fmt.time(build['last_seen_at'])}"
        )
        st.code(
            json.dumps(build["facts"], indent=2, ensure_ascii=False), language=None, wrap_lines=True
        )
