"""Charts: a title with the unit, axes that say what they count, and a sentence where there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from loraplex_admin import format as fmt

_HEIGHT = 280
# Legend and axis are within it.
_SPLIT_HEIGHT = 120


def lines(
    rows: Sequence[dict[str, Any]],
    *,
    x: str,
    y: str,
    series: str | None = None,
    title: str,
    unit: str,
    empty: str,
    key: str,
    form: str = "~s",
    zone: str = "UTC",
    domain: tuple[float, float] | None = None,
) -> None:
    """A line for each series over time. `x` holds Unix seconds; times are shown as the zone's clocks do.

    Args:
        unit: of `y`, beside the title and in the tooltip.
        empty: what to say while there are fewer than two points.
        form: d3's format of the axis.
        zone: of the times.
        domain: of `y`, where its ends are known.
    """
    known = [row for row in rows if row.get(y) is not None and row.get(x) is not None]
    st.markdown(f"**{title}** ({unit})")
    if len(known) < 2:
        st.info(empty)
        return
    columns = [x, y, *([series] if series else [])]
    frame = pd.DataFrame([{name: row[name] for name in columns} for row in known])
    if series:
        frame[series] = [fmt.cell(name) for name in frame[series]]
    # What a clock shows there, given as if it were UTC: shown so wherever the reader is.
    frame["at"] = [
        datetime.fromtimestamp(unix_s, fmt.zone(zone)).replace(tzinfo=UTC) for unix_s in frame[x]
    ]
    scale = alt.Undefined if domain is None else alt.Scale(domain=list(domain))
    colour = (
        {
            "color": alt.Color(
                f"{series}:N",
                title=None,
                legend=alt.Legend(orient="top", labelLimit=160, columns=2),
            )
        }
        if series
        else {}
    )
    chart = (
        alt.Chart(frame)
        .mark_line(point=True)
        .encode(
            x=alt.X(
                "at:T",
                title=f"time ({zone})",
                scale=alt.Scale(type="utc"),
                axis=alt.Axis(format="%b %d %H:%M", labelOverlap=True, tickCount=6),
            ),
            y=alt.Y(f"{y}:Q", title=None, scale=scale, axis=alt.Axis(format=form, tickCount=5)),
            tooltip=[
                alt.Tooltip("utcyearmonthdatehoursminutes(at):T", title=f"at ({zone})"),
                *([alt.Tooltip(f"{series}:N", title="series")] if series else []),
                alt.Tooltip(f"{y}:Q", title=unit, format=form),
            ],
            **colour,
        )
        .properties(height=_HEIGHT)
    )
    st.altair_chart(chart, key=key)


def bars(
    rows: Sequence[tuple[str, float]],
    *,
    title: str,
    unit: str,
    empty: str,
    key: str,
    form: str = "~s",
    least_end: float = 1.0,
) -> None:
    """A bar for each name, in the order given.

    Args:
        least_end: where the axis ends at least: bars that are all nought need an axis too.
    """
    st.markdown(f"**{title}** ({unit})")
    if not rows:
        st.info(empty)
        return
    frame = pd.DataFrame(
        [(fmt.cell(name), value) for name, value in rows], columns=["name", "value"]
    )
    end = max(least_end, float(frame["value"].max()))
    chart = (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            x=alt.X(
                "value:Q",
                title=None,
                scale=alt.Scale(domain=[0, end]),
                axis=alt.Axis(format=form, tickCount=4),
            ),
            y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(labelLimit=160)),
            tooltip=[alt.Tooltip("name:N", title="of"), alt.Tooltip("value:Q", title=unit)],
        )
        .properties(height=40 + 28 * len(frame))
    )
    st.altair_chart(chart, key=key)


def split(parts: Sequence[tuple[str, float]], *, title: str, key: str) -> None:
    """One bar that is divided: who has which share, in percent."""
    st.markdown(f"**{title}** (% of traffic)")
    order = [fmt.cell(name) for name, _ in parts]
    frame = pd.DataFrame({"side": order, "share": [share for _, share in parts]})
    frame["rank"] = range(len(parts))
    frame["text"] = [f"{share:.1%}" for share in frame["share"]]
    chart = (
        alt.Chart(frame)
        .mark_bar(height=28)
        .encode(
            x=alt.X(
                "share:Q",
                stack="zero",
                title=None,
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", tickCount=5),
            ),
            color=alt.Color("side:N", sort=order, title=None, legend=alt.Legend(orient="top")),
            order=alt.Order("rank:Q"),
            tooltip=[alt.Tooltip("side:N", title="side"), alt.Tooltip("text:N", title="share")],
        )
        .properties(height=_SPLIT_HEIGHT)
    )
    st.altair_chart(chart, key=key)
