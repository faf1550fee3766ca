"""Invoices and billing profiles over HTTP."""

from __future__ import annotations

import asyncio
from datetime import date
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse

from loraplex_platform.billing import invoice_queries as queries
from loraplex_platform.billing import invoices, profiles
from loraplex_platform.billing.document import Document, compose
from loraplex_platform.billing.invoice_html import render_html
from loraplex_platform.billing.invoice_schemas import (
    BillingProfileResource,
    DraftRequest,
    InvoiceResource,
    InvoiceStatus,
    InvoiceWithLines,
    NewBillingProfile,
    VoidRequest,
    show_invoice,
    show_profile,
    show_whole_invoice,
)
from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Invoice
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id
from loraplex_platform.tenancy import service as tenancy
from loraplex_platform.tenancy.routes import Owner

all_router = admin_router("/invoices", "Invoices")
router = admin_router("/tenants/{tenant_id}/invoices", "Invoices")
profile_router = admin_router("/tenants/{tenant_id}/billing-profile", "Invoices")

InvoiceId = Annotated[str, Path(description="The invoice's id, `inv_...`.", max_length=80)]


async def _found(owner: Owner, invoice_id: InvoiceId, session: DbSession) -> Invoice:
    return await invoices.find(session, owner.id, invoice_id)


Found = Annotated[Invoice, Depends(_found)]


async def _tenant_filter(
    session: DbSession,
    tenant_id: Annotated[
        str | None, Query(description="Only this tenant's; all of them if not given.")
    ] = None,
) -> UUID | None:
    if tenant_id is None:
        return None
    try:
        wanted = parse_id("tenant", tenant_id)
    except MalformedIdError:
        raise NotFoundError("No such tenant.", param="tenant_id") from None
    return (await tenancy.get_tenant(session, wanted)).id


async def _whole(session: DbSession, invoice: Invoice) -> InvoiceWithLines:
    return show_whole_invoice(invoice, await queries.lines_of(session, invoice.id))


@all_router.get("")
@requires("invoice.read")
async def list_all_invoices(
    tenant: Annotated[UUID | None, Depends(_tenant_filter)],
    page: Paging,
    session: DbSession,
    status: Annotated[InvoiceStatus | None, Query(description="Only of this status.")] = None,
    search: Search = None,
) -> ListPage[InvoiceResource]:
    """Invoices and credit notes of all tenants that the caller may see, newest first. `search`: in the number
    and in the customer's name.
    """
    statement = queries.invoices_of(tenant)
    if status is not None:
        statement = statement.where(Invoice.status == status)
    if search and search.strip():
        statement = queries.named(statement, search)
    rows, has_more = await fetch(session, statement, Invoice.id, page, "invoice")
    return to_list(rows, has_more, show_invoice)


@router.get("")
@requires("invoice.read")
async def list_invoices(
    owner: Owner, page: Paging, session: DbSession
) -> ListPage[InvoiceResource]:
    """A tenant's invoices and credit notes, newest first."""
    rows, has_more = await fetch(
        session, queries.invoices_of(owner.id), Invoice.id, page, "invoice"
    )
    return to_list(rows, has_more, show_invoice)


@router.post("", status_code=201)
@requires("invoice.write")
async def draft_invoice(
    owner: Owner, body: DraftRequest, request: Request, context: Context, session: DbSession
) -> InvoiceWithLines:
    """Draft a month's invoice from the books, or draft it again. The worker does so when a month ends."""
    year, _, month = body.month.partition("-")
    invoice = await invoices.draft(
        session, request.state.actor, context.settings, owner, date(int(year), int(month), 1)
    )
    return await _whole(session, invoice)


@router.get("/{invoice_id}")
@requires("invoice.read")
async def get_invoice(found: Found, session: DbSession) -> InvoiceWithLines:
    """An invoice with its lines."""
    return await _whole(session, found)


@router.delete("/{invoice_id}", status_code=204)
@requires("invoice.write")
async def delete_draft(found: Found, request: Request, session: DbSession) -> None:
    """Throw a draft away."""
    await invoices.delete_draft(session, request.state.actor, found.id)


@router.post("/{invoice_id}/finalize")
@requires("invoice.write")
async def finalize_invoice(
    found: Found, request: Request, context: Context, session: DbSession
) -> InvoiceWithLines:
    """Compute a draft once more, give it the next number of the series, and freeze it."""
    invoice = await invoices.finalize(session, request.state.actor, context.settings, found.id)
    return await _whole(session, invoice)


@router.post("/{invoice_id}/void")
@requires("invoice.write")
async def void_invoice(
    found: Found, body: VoidRequest, request: Request, context: Context, session: DbSession
) -> InvoiceWithLines:
    """Cancel a tenant's newest final invoice. The answer is the credit note that does so."""
    note = await invoices.void(
        session, request.state.actor, context.settings, found.id, body.reason
    )
    return await _whole(session, note)


async def _document(session: DbSession, invoice: Invoice) -> Document:
    related = await queries.related_number(session, invoice)
    return compose(invoice, await queries.lines_of(session, invoice.id), related_number=related)


@router.get("/{invoice_id}/document.html", response_class=HTMLResponse)
@requires("invoice.read")
async def show_document(found: Found, session: DbSession) -> HTMLResponse:
    """The invoice as a page to read or print."""
    return HTMLResponse(render_html(await _document(session, found)))


@router.get(
    "/{invoice_id}/document.pdf",
    response_class=Response,
    responses={
        200: {"content": {"application/pdf": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
@requires("invoice.read")
async def download_document(found: Found, session: DbSession) -> Response:
    """The invoice as PDF: the same bytes whenever it is asked for."""
    # fpdf, fontTools and HarfBuzz take half a second to load: only who prints waits for them.
    from loraplex_platform.billing.invoice_pdf import render_pdf

    document = await _document(session, found)
    created_at = found.issued_at or found.computed_at
    name = found.number or f"draft-{format_id('invoice', found.id)}"
    return Response(
        await asyncio.to_thread(render_pdf, document, created_at),
        media_type="application/pdf",
        headers={"content-disposition": f'inline; filename="{name.replace("/", "-")}.pdf"'},
    )


@profile_router.get("")
@requires("invoice.read")
async def get_billing_profile(
    owner: Owner, response: Response, session: DbSession
) -> BillingProfileResource:
    """Whom the tenant's invoices are made out to."""
    profile = await profiles.get(session, owner.id)
    set_etag(response, profile.row_version)
    return show_profile(profile)


@profile_router.put("")
@requires("invoice.write")
async def put_billing_profile(
    owner: Owner,
    body: NewBillingProfile,
    if_match: IfMatch,
    request: Request,
    response: Response,
    session: DbSession,
) -> BillingProfileResource:
    """Make or replace it. Invoices that have a number keep what they say."""
    profile = await profiles.put(session, request.state.actor, owner.id, body, if_match)
    set_etag(response, profile.row_version)
    return show_profile(profile)
