"""Tokens and dollars over time, as a chart, a table and a CSV file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import altair as alt
import pandas as pd
import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, ApiError, UsageRow, User

_RANGES = {
    "Last hour": (timedelta(hours=1), "1m"),
    "Last day": (timedelta(days=1), "1h"),
    "Last 7 days": (timedelta(days=7), "1h"),
    "Last 30 days": (timedelta(days=30), "1d"),
}
_GROUPS = {"Model": "model", "Tenant": "tenant_id", "Key": "key_id"}
_MEASURES = {"Completion tokens": "completion_tokens", "Prompt tokens": "prompt_tokens"}


def render(api: Api, _user: User) -> None:
    """Filters, totals, chart, table, download."""
    st.title("Usage")
    filters = st.columns(4)
    with filters[0]:
        tenant = choices.tenant(api, key="usage_tenant", allow_all=True)
    span, bucket = _RANGES[filters[1].selectbox("Time", list(_RANGES), index=1, key="usage_range")]
    group = _GROUPS[filters[2].selectbox("Split by", list(_GROUPS), key="usage_group")]
    measure = filters[3].selectbox("Show", list(_MEASURES), key="usage_measure")
    end = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    query = {
        "start": int((end - span).timestamp()),
        "end": int(end.timestamp()),
        "bucket": bucket,
        "group_by": [group],
        "tenant_id": tenant["id"] if tenant else None,
    }
    try:
        rows = api.usage(**query)  # type: ignore[arg-type] # one query for both answers
    except ApiError as error:
        choices.show_refusal(error)
        return
    if not rows:
        st.info("Nothing was used in this time.")
        return
    _totals(rows)
    _chart(rows, group, _MEASURES[measure], measure)
    _table(rows, group)
    st.download_button(
        "Download CSV",
        api.usage_csv(**query),  # type: ignore[arg-type] # as above
        file_name="loraplex-usage.csv",
        mime="text/csv",
        icon=":material/download:",
        key="usage_csv",
    )


def _totals(rows: list[UsageRow]) -> None:
    columns = st.columns(4)
    columns[0].metric("Cost", fmt.usd(str(sum(Decimal(r["cost_usd"]) for r in rows))), border=True)
    columns[1].metric("Requests", fmt.count(sum(r["requests"] for r in rows)), border=True)
    prompt = sum(r["prompt_tokens"] for r in rows)
    columns[2].metric("Prompt tokens", fmt.count(prompt), border=True)
    completion = sum(r["completion_tokens"] for r in rows)
    columns[3].metric("Completion tokens", fmt.count(completion), border=True)


def _label(row: UsageRow, group: str) -> str:
    if group == "tenant_id":
        return row.get("tenant") or row["tenant_id"]
    return str(row.get(group) or "–")


def _chart(rows: list[UsageRow], group: str, field: str, title: str) -> None:
    frame = pd.DataFrame(
        {
            "time": pd.to_datetime([row["start_time"] for row in rows], unit="s", utc=True),
            "value": [row[field] for row in rows],  # type: ignore[literal-required]
            "group": [_label(row, group) for row in rows],
        }
    )
    chart = (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            x=alt.X("time:T", title=None),
            y=alt.Y("value:Q", title=title),
            color=alt.Color("group:N", title=None, legend=alt.Legend(orient="top", labelLimit=240)),
            tooltip=[
                alt.Tooltip("time:T", format="%Y-%m-%d %H:%M"),
                alt.Tooltip("group:N", title="split"),
                alt.Tooltip("value:Q", title=title, format=","),
            ],
        )
        .properties(height=280)
    )
    st.altair_chart(chart, key="usage_chart")


def _table(rows: list[UsageRow], group: str) -> None:
    totals: dict[str, dict[str, int | Decimal]] = {}
    for row in rows:
        line = totals.setdefault(
            _label(row, group),
            {"requests": 0, "prompt": 0, "completion": 0, "absorbed": 0, "cost": Decimal(0)},
        )
        line["requests"] += row["requests"]
        line["prompt"] += row["prompt_tokens"]
        line["completion"] += row["completion_tokens"]
        line["absorbed"] += row["absorbed_tokens"]
        line["cost"] += Decimal(row["cost_usd"])
    st.dataframe(
        [
            {
                "split": label,
                "requests": line["requests"],
                "prompt tokens": line["prompt"],
                "completion tokens": line["completion"],
                "absorbed tokens": line["absorbed"],
                "cost": fmt.usd(str(line["cost"])),
            }
            for label, line in sorted(totals.items())
        ],
        hide_index=True,
        key="usage_table",
    )
