"""Invoices and credit notes: read, taken as a file, and by the operator drafted, finalized and voided."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from functools import partial

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Tenant
from loraplex_admin.components import confirm, forms, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

_SECTIONS = {"usage": "usage", "earlier": "from before", "adjustment": "credit or debit"}
# Of a line: leaves room for its amount, the last column.
_DESCRIPTION_PX = 270
_TOKENS_PER_PRICE = 1_000_000
_TOKEN_CLASSES = ("input", "cached_input", "output")
_PER = {
    **dict.fromkeys(_TOKEN_CLASSES, "per 1M tokens"),
    "request": "per request",
    "adapter_hour": "per hour",
}
_STATUSES = {"draft": "draft", "final": "final", "void": "void"}
_PROFILE = (
    Field("legal_name", "Legal name", max_chars=200),
    Field("address", "Address", "area", max_chars=1000),
    Field("email", "E-mail for invoices", max_chars=254, is_optional=True),
    Field("tax_id", "Tax number", max_chars=60, is_optional=True),
    Field("tax_percent", "Tax in percent", max_chars=8, placeholder="19"),
    Field("payment_days", "Days to pay", "whole"),
)
_PROFILE_DEFAULTS: Row = {
    "legal_name": "",
    "address": "",
    "email": None,
    "tax_id": None,
    "tax_percent": "0",
    "payment_days": 30,
    "tax_label": "Tax",
    "tax_note": None,
}


def render(api: Api, access: Access) -> None:
    """The list, the operator's tools, then the one that is open."""
    st.title("Invoices")
    choices.show_notice()
    left, right = st.columns(2)
    with left:
        tenant = choices.tenant(
            api, access, key="invoices_tenant", action="invoice.read", allow_all=access.is_operator
        )
    if tenant is None and not access.is_operator:
        return
    with right:
        wanted = choices.filtered("Status", _STATUSES, name="status")
    tenant_id = tenant["id"] if tenant else None
    can_write = access.may("invoice.write")
    if tenant is not None:
        _balance(api, access, tenant)
    listing = Listing(
        "invoices",
        fetch=lambda **query: api.of_platform("invoices").page(
            tenant_id=tenant_id, status=wanted, **query
        ),
        columns=Columns(_cells, numbers=("total", "due"), wide=("number",)),
        search_label="Search invoices",
        empty="No invoice is so. Choose *any* status."
        if wanted
        else "There is no invoice yet. The first draft is made when the month ends"
        + (", or now, below." if can_write and tenant else "."),
    )
    open_id = listing.show()
    if tenant is not None and can_write:
        _draft(api, tenant, listing)
        _profile(api, tenant)
    if open_id is None:
        return
    invoice = _found(api, open_id, tenant_id)
    if invoice is None:
        listing.say_gone(
            "it is gone, none of yours, or not of the tenant that is chosen. Choose its tenant above"
        )
        return
    _invoice(api, invoice, listing, can_write=can_write)


def _cells(invoice: Row) -> dict[str, object]:
    zone = invoice["time_zone"]
    return {
        "number": invoice["number"] or "(draft)",
        "kind": invoice["kind"].replace("_", " "),
        "status": invoice["status"],
        "month": invoice["month"],
        "total": fmt.usd(invoice["total_usd"]),
        "due": fmt.usd(invoice["due_usd"]),
        "due on": invoice["due_on"] or "–",
        "issued": fmt.moment(invoice["issued_at"], zone),
    }


def _found(api: Api, invoice_id: str, tenant_id: str | None) -> Row | None:
    """With its lines; its path wants the tenant, which the list knows."""
    if tenant_id is None:
        rows = api.of_platform("invoices").page(limit=choices.MAX_CHOICES)["data"]
        tenant_id = next((one["tenant_id"] for one in rows if one["id"] == invoice_id), None)
        if tenant_id is None:
            return None
    try:
        return api.of_tenant(tenant_id, "invoices").get(invoice_id)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def _invoice(api: Api, invoice: Row, listing: Listing, *, can_write: bool) -> None:
    id_, zone = invoice["id"], invoice["time_zone"]
    invoices = api.of_tenant(invoice["tenant_id"], "invoices")
    name = invoice["number"] or f"draft of {invoice['month']}"
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.subheader(fmt.literal(name))
            status.badge(invoice["status"])
        st.caption(
            f"{fmt.literal(invoice['customer']['name'])} · {fmt.time(invoice['period_start'], zone)} to "
            f"{fmt.time(invoice['period_end'], zone)} · {invoice['currency']}"
        )
        figures = st.columns(4)
        for column, (label, what) in zip(
            figures,
            (
                ("Subtotal", "subtotal_usd"),
                ("Tax", "tax_usd"),
                ("Total", "total_usd"),
                ("Due", "due_usd"),
            ),
            strict=True,
        ):
            column.metric(label, fmt.usd(invoice[what]), border=True)
        _lines(invoice)
        if invoice["void_reason"]:
            st.info(
                f"Void since {fmt.time(invoice['voided_at'], zone)}: {fmt.literal(invoice['void_reason'])}"
            )
        with st.container(horizontal=True):
            for kind, mime in (("pdf", "application/pdf"), ("html", "text/html")):
                st.download_button(
                    f"Download {kind.upper()}",
                    partial(invoices.download, id_, f"document.{kind}"),
                    file_name=f"{name.replace('/', '-').replace(' ', '-')}.{kind}",
                    mime=mime,
                    on_click="ignore",
                    icon=":material/download:",
                    key=f"invoice_{kind}_{id_}",
                )
        if can_write:
            _change(api, invoice, name, listing)


def _lines(invoice: Row) -> None:
    if not invoice["lines"]:
        st.info("Nothing is on it: nothing was used in this month.")
        return
    st.dataframe(
        [
            {
                "part": _SECTIONS[line["section"]],
                "what": fmt.cell(line["description"]),
                "class": (line["price_class"] or "–").replace("_", " "),
                "quantity": line["quantity"],
                "price": say_price(line),
                "amount": fmt.usd(line["amount_usd"]),
            }
            for line in invoice["lines"]
        ],
        hide_index=True,
        height="content",
        column_config={
            "what": st.column_config.TextColumn(width=_DESCRIPTION_PX),
            **{
                name: st.column_config.TextColumn(alignment="right")
                for name in ("quantity", "price", "amount")
            },
        },
        key=f"lines_{invoice['id']}",
    )


def say_price(line: Row) -> str:
    """As price books and the printed invoice have it: `$0.03 per 1M tokens`."""
    price, per = Decimal(line["unit_price_usd"]), _PER.get(line["price_class"])
    if line["price_class"] in _TOKEN_CLASSES:
        price *= _TOKENS_PER_PRICE
    return f"{fmt.usd(str(price))} {per}" if per else fmt.usd(str(price))


def _change(api: Api, invoice: Row, name: str, listing: Listing) -> None:
    if invoice["status"] == "draft":
        _finalize(api, invoice, name)
        _drop(api, invoice, name, listing)
    elif invoice["status"] == "final" and invoice["kind"] == "invoice":
        _void(api, invoice, name, listing)


def _finalize(api: Api, invoice: Row, name: str) -> None:
    if not confirm.by_name(
        "Finalize this invoice",
        name=name,
        consequence="It is computed once more, gets the next number and is **frozen for good**; its webhooks go out.",
        button="Finalize it",
        key=f"finalize_{invoice['id']}",
    ):
        return
    try:
        final = api.of_tenant(invoice["tenant_id"], "invoices").act(invoice["id"], "finalize")
    except ApiError as error:
        choices.show_refusal(error)
        return
    choices.rerun_with_notice(f"{fmt.code(final['number'])} is issued.")


def _drop(api: Api, invoice: Row, name: str, listing: Listing) -> None:
    if not confirm.by_name(
        "Throw the draft away",
        name=name,
        consequence="The draft is gone; it can be drafted again from the books.",
        button="Throw it away",
        key=f"drop_{invoice['id']}",
    ):
        return
    try:
        api.of_tenant(invoice["tenant_id"], "invoices").remove(invoice["id"])
    except ApiError as error:
        choices.show_refusal(error)
        return
    listing.open(None)
    choices.rerun_with_notice("The draft is gone. It can be drafted again from the books.")


def _void(api: Api, invoice: Row, name: str, listing: Listing) -> None:
    reason = st.text_input("Why it is voided", max_chars=400, key=f"void_reason_{invoice['id']}")
    if not confirm.by_name(
        "Void this invoice",
        name=name,
        consequence="A credit note cancels it. Only the tenant's newest one can be voided.",
        button="Void it",
        key=f"void_{invoice['id']}",
    ):
        return
    invoices = api.of_tenant(invoice["tenant_id"], "invoices")
    try:
        note = invoices.act(invoice["id"], "void", {"reason": reason.strip()})
    except ApiError as error:
        choices.show_refusal(error)
        return
    listing.go_to_start()
    listing.open(note["id"])
    choices.rerun_with_notice(f"{fmt.code(note['number'])} cancels {fmt.code(name)}.")


def _draft(api: Api, tenant: Tenant, listing: Listing) -> None:
    invoices = api.of_tenant(tenant["id"], "invoices")
    today = datetime.now(UTC)
    months = [f"{year}-{month:02}" for year, month in _last_months(today.year, today.month, 13)]
    with st.expander("Draft a month", icon=":material/add:", key=choices.fresh("draft_box")):
        made = forms.create(
            "draft",
            (
                Field(
                    "month", "Month", "choice", options=months, help=f"Of {tenant['billing_tz']}."
                ),
            ),
            submit="Draft it",
            send=lambda body, once: invoices.create(body, once=once),
        )
    if made is not None:
        listing.go_to_start()
        listing.open(made["id"])
        choices.rerun_with_notice(f"The draft of {made['month']} is there.")


def _last_months(year: int, month: int, count: int) -> list[tuple[int, int]]:
    found = []
    for _ in range(count):
        found.append((year, month))
        year, month = (year, month - 1) if month > 1 else (year - 1, 12)
    return found


def _profile(api: Api, tenant: Tenant) -> None:
    path = f"/tenants/{tenant['id']}/billing-profile"

    def read() -> Row:
        try:
            return api.read(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return _PROFILE_DEFAULTS | {"version": None}

    def save(body: Row, version: int | None) -> Row:
        known = {name: value for name, value in now.items() if name in _PROFILE_DEFAULTS}
        return api.send("PUT", path, known | body, version=version)

    now = read()
    with st.expander(
        "Whom its invoices are made out to",
        icon=":material/contact_mail:",
        key=choices.fresh("profile_box"),
    ):
        if now["version"] is None:
            st.info(
                "Nobody yet: an invoice can be drafted, and is finalized only once this is filled in."
            )
        saved = forms.edit(f"profile_{tenant['id']}", now, _PROFILE, save=save, reload=read)
    if saved is not None:
        choices.empty("profile_box")
        choices.rerun_with_notice("Invoices without a number are made out so from now on.")


def _balance(api: Api, access: Access, tenant: Tenant) -> None:
    balance = api.read(f"/tenants/{tenant['id']}/balance")
    columns = st.columns(3)
    columns[0].metric("Used so far", fmt.usd(balance["usage_usd"]), border=True)
    columns[1].metric("Credits and debits", fmt.usd(balance["adjustments_usd"]), border=True)
    columns[2].metric("Balance", fmt.usd(balance["balance_usd"]), border=True)
    if not access.may("credit.write"):
        return
    adjustments = api.of_tenant(tenant["id"], "adjustments")
    with st.expander(
        "Credit or debit", icon=":material/add_card:", key=choices.fresh("adjust_box")
    ):
        made = forms.create(
            "adjust",
            (
                Field(
                    "kind",
                    "Kind",
                    "choice",
                    options=("credit", "debit"),
                    labels={
                        "credit": "credit: in the tenant's favour",
                        "debit": "debit: they owe it",
                    },
                ),
                Field("amount_usd", "Dollars", max_chars=24, placeholder="25.00"),
                Field("reason", "Reason", max_chars=400, help="It is on the next invoice."),
            ),
            submit="Book it",
            send=lambda body, once: adjustments.create(body, once=once),
        )
    if made is not None:
        choices.rerun_with_notice(f"A {made['kind']} of {fmt.usd(made['amount_usd'])} is booked.")
