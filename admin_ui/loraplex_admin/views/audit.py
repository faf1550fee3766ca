"""Every change that was ever made: who, what, when, and what it was before."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, Page
from loraplex_admin.components import address
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import PAGE_SIZE, Row

_FILTERS = {
    "action": ("Action", "key.rotate, or the beginning of one: key.*"),
    "actor_id": ("Who (id)", "usr_…"),
    "object_id": ("What (id)", "key_…, ten_…"),
    "request_id": ("Request id", "req_…"),
}


def render(api: Api, access: Access) -> None:
    """Filters, the list, what is open, the file, and where the chain of hashes stands."""
    st.title("Audit log")
    tenant = choices.tenant(
        api, access, key="audit_tenant", action="audit.read", allow_all=access.is_operator
    )
    if tenant is None and not access.is_operator:
        return
    zone = tenant["billing_tz"] if tenant else "UTC"
    wanted = _filters(zone)
    wanted["tenant_id"] = tenant["id"] if tenant else None
    found: list[Row] = []

    def fetch(after: str | None = None) -> Page[Row]:
        page = api.page("/audit", after=after, limit=PAGE_SIZE, **wanted)
        found.extend(page["data"])
        return page

    def cells(one: Row) -> dict[str, object]:
        # Whose it is says the box above.
        return {
            name: cell
            for name, cell in _cells(one, zone).items()
            if name != "tenant" or tenant is None
        }

    is_narrow = any(value for name, value in wanted.items() if name != "tenant_id")
    open_id = Listing(
        "audit",
        fetch=fetch,
        columns=Columns(cells, wide=("action",), widest=("what",)),
        empty="Nothing matches. Take a filter out."
        if is_narrow
        else "Nothing has been changed here yet.",
        has_all=True,
    ).show()
    entry = next((one for one in found if one["id"] == open_id), None)
    if entry is not None:
        _entry(entry, zone)
    st.download_button(
        "Download CSV",
        lambda: api.download("/audit", format="csv", **wanted),
        file_name="loraplex-audit.csv",
        mime="text/csv",
        icon=":material/download:",
        on_click="ignore",
        key="audit_csv",
    )
    st.caption("All that matches, up to 20,000 entries; cells are safe in a spreadsheet.")
    _chain(api, wanted["tenant_id"])


def _filters(zone: str) -> dict[str, str | None]:
    """What is asked; kept in the address, so that a filtered view can be sent to somebody."""
    wanted: dict[str, str | None] = {}
    with st.expander(
        "Filters", icon=":material/filter_list:", key="audit_filters", expanded=bool(_given())
    ):
        for column, (name, (label, hint)) in zip(st.columns(4), _FILTERS.items(), strict=True):
            typed = column.text_input(
                label,
                value=address.get(name) or "",
                placeholder=hint,
                max_chars=80,
                key=f"audit_{name}",
            ).strip()
            wanted[name] = typed or None
        days = st.date_input(
            f"Days ({zone})",
            value=[
                day
                for day in (_day(address.get("from")), _day(address.get("to")))
                if day is not None
            ],
            key="audit_days",
        )
    first, last = _span(days)
    before = {name: address.get(name) for name in (*_FILTERS, "from", "to")}
    now = wanted | {
        "from": None if first is None else first.isoformat(),
        "to": None if last is None else last.isoformat(),
    }
    if now != before:
        address.put(**now, after=None, id=None)
    wanted["start_time"] = _midnight(first, zone)
    wanted["end_time"] = _midnight(None if last is None else last + timedelta(days=1), zone)
    return wanted


def _given() -> list[str]:
    return [name for name in (*_FILTERS, "from", "to") if address.get(name)]


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        return None


def _span(days: object) -> tuple[date | None, date | None]:
    chosen = [
        day for day in (days if isinstance(days, tuple) else (days,)) if isinstance(day, date)
    ]
    return (chosen[0], chosen[-1]) if chosen else (None, None)


def _midnight(day: date | None, zone: str) -> str | None:
    if day is None:
        return None
    return str(int(datetime.combine(day, time(), fmt.zone(zone)).timestamp()))


def _cells(entry: Row, zone: str) -> dict[str, object]:
    return {
        "time": fmt.moment(entry["at"], zone),
        "who": entry["actor_id"] or entry["actor_kind"].replace("_", " "),
        "action": entry["action"],
        "what": entry["object_id"] or entry["object_kind"],
        "tenant": entry["tenant_id"] or "the platform",
        "request": entry["request_id"] or "–",
    }


def _entry(entry: Row, zone: str) -> None:
    with st.container(border=True):
        st.markdown(f"{fmt.code(entry['action'])} · {fmt.time(entry['at'], zone)}")
        ids = (
            ("by", entry["actor_id"] or entry["actor_kind"].replace("_", " ")),
            ("of", entry["object_id"] or entry["object_kind"]),
            ("in the request", entry["request_id"]),
        )
        st.caption(" · ".join(f"{what} {fmt.code(id_)}" for what, id_ in ids if id_))
        before, after = entry["before"] or {}, entry["after"] or {}
        if before or after:
            st.dataframe(
                [
                    {
                        "field": name,
                        "before": _say(before.get(name)),
                        "after": _say(after.get(name)),
                    }
                    for name in sorted(before.keys() | after.keys())
                ],
                hide_index=True,
                key=f"audit_changes_{entry['id']}",
            )
        if entry["detail"]:
            st.code(
                json.dumps(entry["detail"], indent=2, ensure_ascii=False),
                language=None,
                wrap_lines=True,
            )
        if entry["hash"] is not None:
            st.caption(f"Number {fmt.count(entry['seq'])} of its chain · {fmt.code(entry['hash'])}")


def _say(value: object) -> str:
    return "–" if value is None else fmt.cell(json.dumps(value, ensure_ascii=False))


def _chain(api: Api, tenant_id: str | None) -> None:
    with st.expander("The chain of hashes", icon=":material/link:", key="audit_chain"):
        chains = api.of_platform("audit/chains").page(tenant_id=tenant_id)["data"]
        if not chains:
            st.info("No chain has begun yet: it begins with the first change.")
            return
        st.dataframe(
            [
                {
                    "of": one["id"],
                    "newest": fmt.count(one["seq"]),
                    "hash": one["hash"],
                    "since": fmt.moment(one["updated_at"]),
                }
                for one in chains
            ],
            hide_index=True,
            key="audit_chains",
        )
        st.caption(
            "Keep these somewhere else from time to time: a log that was cut off does not lead to them any more."
        )
