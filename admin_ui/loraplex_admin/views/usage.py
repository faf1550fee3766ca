"""Tokens and dollars over time, as a chart, a table and a CSV file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TypedDict

import altair as alt
import pandas as pd
import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, UsageRow

_RANGES = {
    "Last hour": (timedelta(hours=1), "1m"),
    "Last day": (timedelta(days=1), "1h"),
    "Last 7 days": (timedelta(days=7), "1h"),
    "Last 30 days": (timedelta(days=30), "1d"),
    "Last 90 days": (timedelta(days=90), "1d"),
}
_GROUPS = {
    "Model": "model",
    "Tenant": "tenant_id",
    "Project": "project_id",
    "Key": "key_id",
    "Deployment": "deployment_id",
    "Adapter version": "adapter_version_id",
}
_MEASURES = {
    "Dollars": "cost_usd",
    "Completion tokens": "completion_tokens",
    "Prompt tokens": "prompt_tokens",
    "Requests": "requests",
}
# More colours than this cannot be told apart: the rest of the chart is one group.
_MAX_COLOURS = 6
_REST = "others"
_TIME_FORMATS = {"1m": "%H:%M", "1h": "%b %d %H:%M", "1d": "%b %d"}
_WIDTHS = {
    "1m": timedelta(minutes=1),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
}


class _Query(TypedDict):
    start: int
    end: int
    bucket: str
    group_by: list[str]
    tenant_id: str | None


def render(api: Api, access: Access) -> None:
    """Filters, totals, chart, table, download."""
    st.title("Usage")
    filters = st.columns(4)
    with filters[0]:
        tenant = choices.tenant(
            api, access, key="usage_tenant", action="usage.read", allow_all=True
        )
    # What is chosen is in the address, under the key of its box.
    chosen_range = filters[1].selectbox(
        "Time", list(_RANGES), index=1, key="usage_range", bind="query-params"
    )
    span, bucket = _RANGES[chosen_range]
    chosen_group = filters[2].selectbox(
        "Split by", list(_GROUPS), key="usage_group", bind="query-params"
    )
    group = _GROUPS[chosen_group]
    measure = filters[3].selectbox(
        "Chart", list(_MEASURES), key="usage_measure", bind="query-params"
    )
    zone = tenant["billing_tz"] if tenant else "UTC"
    query = _query(span, bucket, group, tenant["id"] if tenant else None, zone)
    rows, is_cut = api.usage(**query)
    if not rows:
        st.info(
            "Nothing was used in this time. Choose a longer one, or ask something on the *Playground*.",
            icon=":material/lightbulb:",
        )
        return
    if is_cut:
        st.warning("There is more than is shown here; the CSV has it all.")
    _totals(rows)
    _chart(rows, group, measure, bucket, query, zone)
    _table(rows, group)
    st.download_button(
        "Download CSV",
        lambda: api.usage_csv(**query),
        file_name="loraplex-usage.csv",
        mime="text/csv",
        icon=":material/download:",
        on_click="ignore",
        key="usage_csv",
    )
    st.caption(
        f"Times are {zone}. Prompt, cached (part of the prompt), completion and absorbed are tokens; "
        "for absorbed ones the platform pays."
    )


def _query(span: timedelta, bucket: str, group: str, tenant_id: str | None, zone: str) -> _Query:
    """Whole buckets, of the tenant's zone: a chart must not begin with a piece of one."""
    if bucket == "1d":
        tomorrow = (datetime.now(fmt.zone(zone)) + timedelta(days=1)).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        # On the wall's clock: a day may have 23 hours.
        start, end = int((tomorrow - span).timestamp()), int(tomorrow.timestamp())
    else:
        width_s = int(_WIDTHS[bucket].total_seconds())
        end = (int(datetime.now(UTC).timestamp()) // width_s + 1) * width_s
        start = end - int(span.total_seconds())
    return {
        "start": start,
        "end": end,
        "bucket": bucket,
        "group_by": [group],
        "tenant_id": tenant_id,
    }


def _totals(rows: list[UsageRow]) -> None:
    columns = st.columns(4)
    cost = sum((Decimal(row["cost_usd"]) for row in rows), Decimal(0))
    columns[0].metric("Cost", fmt.usd(str(cost)), border=True)
    columns[1].metric("Requests", fmt.count(sum(r["requests"] for r in rows)), border=True)
    prompt = sum(r["prompt_tokens"] for r in rows)
    columns[2].metric("Prompt tokens", fmt.count(prompt), border=True)
    completion = sum(r["completion_tokens"] for r in rows)
    columns[3].metric("Completion tokens", fmt.count(completion), border=True)


def _label(row: UsageRow, group: str) -> str:
    if group == "tenant_id":
        return row.get("tenant") or row["tenant_id"]
    if group == "adapter_version_id":
        return row.get("adapter_version_id") or "base"
    return str(row.get(group) or "–")


def _chart(
    rows: list[UsageRow], group: str, measure: str, bucket: str, query: _Query, zone: str
) -> None:
    field = _MEASURES[measure]
    sums: dict[str, Decimal] = {}
    for row in rows:
        label = _label(row, group)
        sums[label] = sums.get(label, Decimal(0)) + Decimal(row[field])  # type: ignore[literal-required]
    largest = sorted(sums, key=lambda label: (-sums[label], label))
    shown = largest if len(largest) <= _MAX_COLOURS else largest[: _MAX_COLOURS - 1]
    chart = (
        alt.Chart(_bars(rows, group, field, shown, zone))
        .mark_rect(stroke=None)
        .encode(
            # The wall's clock of the zone, given as if it were UTC: shown so wherever the reader is.
            x=alt.X(
                "start:T",
                title=None,
                scale=alt.Scale(type="utc", domain=_edges(query, zone)),
                axis=alt.Axis(format=_TIME_FORMATS[bucket], labelOverlap=True, grid=False),
            ),
            x2="end:T",
            y=alt.Y(
                "from:Q",
                title=measure,
                scale=alt.Scale(zero=True),
                axis=alt.Axis(format="$,.2~g" if field == "cost_usd" else "~s", tickCount=5),
            ),
            y2="to:Q",
            color=alt.Color(
                "group:N",
                title=None,
                sort=[*shown, _REST],
                legend=alt.Legend(orient="top", labelLimit=160, columns=2, symbolType="square"),
            ),
            tooltip=[
                alt.Tooltip("utcyearmonthdatehoursminutes(start):T", title=f"from ({zone})"),
                alt.Tooltip("group:N", title="split"),
                alt.Tooltip("exact:N", title=measure),
            ],
        )
        .properties(height=280)
    )
    st.altair_chart(chart, key="usage_chart")


def _bars(
    rows: list[UsageRow], group: str, field: str, shown: list[str], zone: str
) -> pd.DataFrame:
    """One stacked piece of a bar per bucket and group, in the legend's order."""
    values: dict[tuple[int, int, str], Decimal] = {}
    for row in rows:
        label = _label(row, group)
        place = (row["start_time"], row["end_time"], label if label in shown else _REST)
        values[place] = values.get(place, Decimal(0)) + Decimal(row[field])  # type: ignore[literal-required]
    heights: dict[int, Decimal] = {}
    pieces = []
    order = [*shown, _REST]
    for start, end, label in sorted(values, key=lambda place: (place[0], order.index(place[2]))):
        value = values[start, end, label]
        low = heights.get(start, Decimal(0))
        heights[start] = low + value
        exact = fmt.usd(str(value)) if field == "cost_usd" else fmt.count(int(value))
        pieces.append((start, end, label, float(low), float(low + value), exact))
    frame = pd.DataFrame(pieces, columns=["start", "end", "group", "from", "to", "exact"])
    for edge in ("start", "end"):
        frame[edge] = [_on_the_wall(unix_s, zone) for unix_s in frame[edge]]
    return frame


def _edges(query: _Query, zone: str) -> list[str]:
    """The ends of the time axis, though nothing happened there."""
    return [_on_the_wall(unix_s, zone).isoformat() for unix_s in (query["start"], query["end"])]


def _on_the_wall(unix_s: int, zone: str) -> datetime:
    """What a clock shows there, as a time of UTC."""
    return datetime.fromtimestamp(unix_s, fmt.zone(zone)).replace(tzinfo=UTC)


def _table(rows: list[UsageRow], group: str) -> None:
    totals: dict[str, dict[str, int]] = {}
    costs: dict[str, Decimal] = {}
    for row in rows:
        label = _label(row, group)
        line = totals.setdefault(label, dict.fromkeys(_COUNTS, 0))
        for column, field in _COUNTS.items():
            line[column] += row[field]  # type: ignore[literal-required]
        costs[label] = costs.get(label, Decimal(0)) + Decimal(row["cost_usd"])
    title = next(name for name, value in _GROUPS.items() if value == group).lower()
    counts = {column: st.column_config.NumberColumn(format="localized") for column in _COUNTS}
    st.dataframe(
        [
            {title: label, "cost": fmt.usd(str(costs[label])), **totals[label]}
            for label in sorted(totals, key=lambda label: (-costs[label], label))
        ],
        hide_index=True,
        column_config={
            title: st.column_config.TextColumn(width="medium"),
            "cost": st.column_config.TextColumn(alignment="right"),
            **counts,
        },
        key="usage_table",
    )


_COUNTS = {
    "requests": "requests",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "completion": "completion_tokens",
    "absorbed": "absorbed_tokens",
}
