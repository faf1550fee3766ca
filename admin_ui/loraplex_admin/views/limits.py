"""Quotas and rates: what is set, what is left of it and until when, and why a request was blocked."""

from __future__ import annotations

import time as clock

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Tenant
from loraplex_admin.components import address, confirm, explanation, forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

_SCOPES = ("platform", "tenant", "project", "key", "adapter", "deployment")
_QUOTAS = {
    "requests": "requests",
    "tokens_in": "prompt tokens",
    "tokens_out": "completion tokens",
    "tokens_total": "tokens, prompt and completion",
    "cost": "cost",
}
_RATES = {
    "rpm": "requests a minute",
    "tpm_in": "prompt tokens a minute",
    "tpm_out": "completion tokens a minute",
    "tpm_total": "tokens a minute, prompt and completion",
    "concurrency": "requests at a time",
}
_METRICS = _QUOTAS | _RATES
_PERIODS = {
    None: "none: it is a rate",
    "day": "a day",
    "month": "a month",
    "total": "in total",
    "rolling": "any last hours",
}
_FAIL_MODES = {
    "local": "count in each gateway by itself",
    "open": "let everything through",
    "closed": "refuse everything",
}


def render(api: Api, access: Access) -> None:
    """The question first: whoever comes here was blocked. Then limits as they stand."""
    st.title("Limits")
    choices.show_notice()
    why = st.container(border=True)
    tenant = choices.tenant(
        api, access, key="limits_tenant", action="limit.read", allow_all=access.is_operator
    )
    with why:
        _why(api, tenant["billing_tz"] if tenant else "UTC")
    if tenant is None and not access.is_operator:
        return
    zone = tenant["billing_tz"] if tenant else "UTC"
    limits = api.of_platform("limits")
    tenant_id = tenant["id"] if tenant else None
    st.subheader("What is set")
    listing = Listing(
        "limits",
        fetch=lambda **query: limits.page(tenant_id=tenant_id, **query),
        columns=Columns(
            lambda one: _cells(one, zone),
            numbers=("limit", "used", "held", "left"),
            help={
                "held": "Reserved by requests in progress, at their worst case.",
                "begins anew": f"In the tenant's time zone ({zone}).",
            },
        ),
        search_label="Search limits",
        empty="Nothing is limited here. "
        + (
            "Set a first limit below." if access.may("limit.write") else "The operator sets limits."
        ),
    )
    open_id = listing.show()
    if access.may("limit.write"):
        _new_limit(api, tenant, listing)
        if open_id is not None:
            try:
                _limit(api, limits.get(open_id), zone, listing)
            except ApiError as error:
                listing.refuse(error)
    if tenant is not None:
        _effective(api, tenant)


# ------------------------------------------------------------------------------------- why


def _why(api: Api, zone: str) -> None:
    st.subheader("Why was I blocked?")
    before = address.get("request")
    with (
        st.form("why", border=False),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        typed = st.text_input(
            "Request id",
            value=before or "",
            max_chars=80,
            placeholder="req_…",
            help="The x-request-id of the answer; the error's message names it as well.",
            key="why_request",
        )
        is_asked = st.form_submit_button("Explain", type="primary", key="why_go")
    if is_asked:
        address.put(request=typed.strip() or None)
    wanted = typed.strip() if is_asked else before
    if wanted:
        _explain(api, wanted, zone)


def _explain(api: Api, request_id: str, zone: str) -> None:
    found = explanation.show(api, request_id, zone)
    if found is None:
        return
    rows = []
    for limit_id in found["limit_ids"]:
        try:
            rows.append(_cells(api.of_platform("limits").get(limit_id), zone))
        except ApiError as error:
            if error.status != 404:
                raise
            st.caption(f"Limit {fmt.code(limit_id)} is not there any more.")
    if rows:
        st.markdown("**The limits that decided, as they stand now**")
        st.dataframe(rows, hide_index=True, key="why_limits")


# --------------------------------------------------------------------------------- limits


def _cells(limit: Row, zone: str) -> dict[str, object]:
    use, unit = limit["use"], limit["unit"]
    return {
        "of": limit["scope_kind"],
        "counts": _name(limit),
        "limit": fmt.amount(limit["value"], unit),
        "left": _bare(use and use["remaining"], unit),
        "begins anew": fmt.reset(use["period_end"], zone, clock.time()) if use else "all the time",
        "used": _bare(use and use["used"], unit),
        "held": _bare(use and use["held"], unit),
        "refuses": "yes" if limit["hard"] else "no, it only alerts",
        "alerts at": ", ".join(f"{pct} %" for pct in limit["alert_pct"]) or "–",
        "of what": limit["scope_id"] or "the platform",
    }


def _bare(value: str | None, unit: str) -> str:
    """An amount beside another one that names its unit."""
    return "–" if value is None else fmt.amount(value, unit).partition(" ")[0]


def _name(limit: Row) -> str:
    """`cost a month`, `requests a minute`."""
    metric = _METRICS[limit["metric"]]
    if limit["period"] == "rolling":
        return f"{metric} in any {limit['window_hours']} h"
    if limit["metric"] in _RATES:
        return metric
    return f"{metric} {_PERIODS[limit['period']]}"


def _new_limit(api: Api, tenant: Tenant | None, listing: Listing) -> None:
    limits = api.of_platform("limits")
    scopes = _SCOPES[1:] if tenant else _SCOPES
    with st.expander("New limit", icon=":material/add:", key=choices.fresh("new_limit_box")):
        made = forms.create(
            "new_limit",
            (
                Field("scope_kind", "It limits a", "choice", options=scopes),
                Field(
                    "scope_id",
                    "Id of that",
                    max_chars=80,
                    default=tenant["id"] if tenant else None,
                    help="The tenant's, project's, key's, adapter's or deployment's id; none for the platform.",
                    is_optional=True,
                ),
                Field("metric", "It counts", "choice", options=tuple(_METRICS), labels=_METRICS),
                Field(
                    "period",
                    "For",
                    "choice",
                    options=tuple(_PERIODS),
                    labels=_PERIODS,
                    default="month",
                    help="Days and months are those of the tenant's time zone.",
                    is_optional=True,
                ),
                Field(
                    "window_hours",
                    "Hours (of any last hours)",
                    "whole",
                    is_optional=True,
                ),
                Field(
                    "value",
                    "At most",
                    max_chars=28,
                    help="Requests, tokens, or dollars of cost.",
                    placeholder="100.00",
                ),
                Field("hard", "Refuse what is over it (else only alert)", "flag", default=True),
                Field(
                    "alert_pct",
                    "Alert at percent",
                    "lines",
                    help="One a line, such as 80.",
                    is_optional=True,
                ),
                Field(
                    "fail_mode",
                    "While Redis is away (rates)",
                    "choice",
                    options=(None, *_FAIL_MODES),
                    labels={None: "as usual", **_FAIL_MODES},
                    is_optional=True,
                ),
            ),
            submit="Set the limit",
            send=lambda body, once: limits.create(_body(body), once=once),
            check=_missing,
        )
    if made is not None:
        listing.go_to_start()
        choices.rerun_with_notice(
            f"{fmt.literal(_name(made))}: {fmt.amount(made['value'], made['unit'])} at most."
        )


def _missing(body: Row) -> str | None:
    if body["metric"] in _QUOTAS and "period" not in body:
        return "Choose a period: this counts over time."
    if body["metric"] in _RATES and "period" in body:
        return "A rate has no period: choose *none: it is a rate*."
    return None


def _body(form: Row) -> Row:
    if "alert_pct" not in form:
        return form
    return form | {"alert_pct": _percents(form["alert_pct"])}


def _percents(lines: list[str]) -> list[int]:
    try:
        return sorted({int(line.rstrip(" %")) for line in lines})
    except ValueError as error:
        raise ApiError(
            "Write whole percents, one a line, such as 80.",
            status=400,
            code="invalid_request",
            param="alert_pct",
        ) from error


def _limit(api: Api, limit: Row, zone: str, listing: Listing) -> None:
    limits, id_ = api.of_platform("limits"), limit["id"]
    with st.container(border=True):
        st.markdown(f"**{fmt.literal(_name(limit))}** of {limit['scope_kind']} · {fmt.code(id_)}")
        is_rate = limit["metric"] in _RATES
        fields = [Field("value", "At most", max_chars=28)]
        if is_rate:
            fields += [
                Field(
                    "burst",
                    "At once",
                    "whole",
                    help="How much may come at once; empty: the limit itself.",
                ),
                Field(
                    "fail_mode",
                    "While Redis is away",
                    "choice",
                    options=tuple(_FAIL_MODES),
                    labels=_FAIL_MODES,
                ),
            ]
        else:
            fields.append(Field("alert_pct", "Alert at percent", "lines"))
        saved = forms.edit(
            f"limit_{id_}",
            _as_text(limit),
            fields,
            save=lambda body, version: limits.change(id_, _body(body), version=version),
            reload=lambda: _as_text(limits.get(id_)),
        )
        if saved is not None:
            choices.rerun_with_notice(
                f"{fmt.amount(saved['value'], saved['unit'])} from the next request on."
            )
        name = f"{_name(limit)} of {_whose(api, limit)}"
        if not confirm.by_name(
            "Remove this limit",
            name=name,
            consequence="Requests are not held back by it any more, from the next one on.",
            button="Remove it",
            key=f"unlimit_{id_}",
        ):
            return
        limits.remove(id_, version=limit["version"])
    listing.open(None)
    choices.rerun_with_notice(f"{fmt.literal(name)} is not limited any more.")


def _whose(api: Api, limit: Row) -> str:
    """`tenant acme`: whoever confirms has to see whom it concerns."""
    kind, id_ = limit["scope_kind"], limit["scope_id"]
    if id_ is None:
        return "the platform"
    return f"{kind} {api.tenant(id_)['slug'] if kind == 'tenant' else id_}"


def _as_text(limit: Row) -> Row:
    return limit | {"alert_pct": [str(pct) for pct in limit["alert_pct"]]}


# ------------------------------------------------------------------------------- effective


def _effective(api: Api, tenant: Tenant) -> None:
    st.subheader("What binds a caller now")
    left, right = st.columns(2)
    with left:
        rows = choices.from_many(
            "keys", api.of_tenant(tenant["id"], "keys").page, key=f"effective_key_{tenant['id']}"
        )
    keys = {one["id"]: one for one in rows}
    if not keys:
        if st.session_state.get(f"effective_key_{tenant['id']}_search", "").strip():
            return  # it says already that none was found
        st.info(
            "This tenant has no key yet, so nobody calls. Make one under *API keys*.",
            icon=":material/lightbulb:",
        )
        return
    with right:
        rows = choices.from_many(
            "deployments",
            api.of_tenant(tenant["id"], "deployments").page,
            key=f"effective_deployment_{tenant['id']}",
        )
    deployments = {one["id"]: one["name"] for one in rows}
    key_id = left.selectbox(
        "Key",
        list(keys),
        format_func=lambda id_: fmt.cell(f"{keys[id_]['name']} ({keys[id_]['redacted']})"),
        key=f"effective_key_{tenant['id']}",
    )
    deployment_id = right.selectbox(
        "Deployment",
        ["", *deployments],
        format_func=lambda id_: deployments.get(id_, "any"),
        key=f"effective_deployment_{tenant['id']}",
    )
    rows = api.effective_limits(key_id, deployment_id or None)
    if not rows:
        st.info("Nothing limits this caller.")
        return
    st.dataframe(
        [_standing_cells(row, tenant["billing_tz"]) for row in rows],
        hide_index=True,
        column_config={
            name: st.column_config.TextColumn(alignment="right")
            for name in ("limit", "used", "held", "left")
        },
        key="effective_table",
    )
    st.caption("Narrowest scope first. All of them must have something left for a request to run.")


def _standing_cells(row: Row, zone: str) -> dict[str, object]:
    unit = row["unit"]
    return {
        "of": f"{row['scope_kind']}{' (shared)' if row['is_shared'] else ''}",
        "counts": _name(row),
        "limit": fmt.amount(row["value"], unit),
        "left": _bare(row["remaining"], unit),
        "begins anew": fmt.reset(row["resets_at"], zone, clock.time()),
        "used": _bare(row["used"], unit),
        "held": _bare(row["held"], unit),
        "refuses": "yes" if row["hard"] else "no, it only alerts",
    }
