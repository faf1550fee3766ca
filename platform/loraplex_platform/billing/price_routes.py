"""Price books over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Path, Request, Response

from loraplex_platform.billing import price_books, price_queries
from loraplex_platform.billing.money import format_usd
from loraplex_platform.billing.price_schemas import (
    NewPriceBook,
    PreviewReport,
    PreviewRequest,
    PriceBookChanges,
    PriceBookResource,
    PriceBookWithPrices,
    Publication,
    QuoteRequest,
    QuoteResource,
    TenantPreview,
    show_book,
    show_price,
)
from loraplex_platform.control.context import DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import PriceBook
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id
from loraplex_platform.tenancy import service as tenancy

router = admin_router("/price-books", "Prices")

BookId = Annotated[str, Path(description="The book's id, `prb_...`.", max_length=80)]


async def _show(session: DbSession, response: Response, book: PriceBook) -> PriceBookWithPrices:
    detail = await price_books.describe(session, book)
    set_etag(response, book.row_version)
    return PriceBookWithPrices(
        **show_book(book, is_in_force=detail.is_in_force).__dict__,
        prices=[show_price(item) for item in detail.items],
        unpriced_models=detail.unpriced_models,
    )


@router.post("", status_code=201)
@requires("price.write")
async def create_price_book(
    body: NewPriceBook, request: Request, response: Response, session: DbSession
) -> PriceBookWithPrices:
    """Begin a draft. Nothing is charged by it until it is published."""
    book = await price_books.create(session, request.state.actor, body)
    return await _show(session, response, book)


@router.get("")
@requires("price.read")
async def list_price_books(
    page: Paging, session: DbSession, search: Search = None
) -> ListPage[PriceBookResource]:
    """Every book, newest first. `search`: in the name."""
    current = await price_queries.current_book_id(session)
    statement = holding(price_queries.all_books(), search, PriceBook.name)
    rows, has_more = await fetch(session, statement, PriceBook.id, page, "price_book")
    return to_list(rows, has_more, lambda book: show_book(book, is_in_force=book.id == current))


@router.get("/{book_id}")
@requires("price.read")
async def get_price_book(
    book_id: BookId, response: Response, session: DbSession
) -> PriceBookWithPrices:
    """A book with its prices, and the deployments that it has no price for."""
    return await _show(session, response, await price_books.find(session, book_id))


@router.patch("/{book_id}")
@requires("price.write")
async def change_price_book(
    book_id: BookId,
    body: PriceBookChanges,
    if_match: IfMatch,
    request: Request,
    response: Response,
    session: DbSession,
) -> PriceBookWithPrices:
    """Change a draft. A published book never changes: make a new one with `copy_from`."""
    book = await price_books.change(session, request.state.actor, book_id, body, if_match)
    return await _show(session, response, book)


@router.delete("/{book_id}", status_code=204)
@requires("price.write")
async def delete_price_book(
    book_id: BookId, if_match: IfMatch, request: Request, session: DbSession
) -> None:
    """Throw a draft away."""
    await price_books.delete(session, request.state.actor, book_id, if_match)


@router.post("/{book_id}/publish")
@requires("price.write")
async def publish_price_book(
    book_id: BookId,
    body: Publication,
    if_match: IfMatch,
    request: Request,
    response: Response,
    session: DbSession,
) -> PriceBookWithPrices:
    """Let a draft hold from a time on, never a past one. The book in force ends there."""
    begins = (
        None if body.effective_from is None else datetime.fromtimestamp(body.effective_from, UTC)
    )
    book = await price_books.publish(session, request.state.actor, book_id, begins, if_match)
    return await _show(session, response, book)


@router.post("/{book_id}/retire")
@requires("price.write")
async def retire_price_book(
    book_id: BookId, if_match: IfMatch, request: Request, response: Response, session: DbSession
) -> PriceBookWithPrices:
    """Withdraw a published book that has not begun, or file one that has ended."""
    book = await price_books.retire(session, request.state.actor, book_id, if_match)
    return await _show(session, response, book)


@router.post("/{book_id}/preview")
@requires("price.read")
async def preview_price_book(
    book_id: BookId, body: PreviewRequest, session: DbSession
) -> PreviewReport:
    """What each tenant would have paid by this book, also a draft, beside what it did pay.

    Over whole days in each tenant's time zone.
    """
    book = await price_books.find(session, book_id)
    tenant_id = None
    if body.tenant_id is not None:
        try:
            tenant_id = parse_id("tenant", body.tenant_id)
        except MalformedIdError:
            raise NotFoundError("No such tenant.", param="tenant_id") from None
        await tenancy.get_tenant(session, tenant_id)
    costs = await price_books.preview(
        session,
        book,
        datetime.fromtimestamp(body.start_time, UTC),
        datetime.fromtimestamp(body.end_time, UTC),
        tenant_id,
    )
    return PreviewReport(
        price_book_id=format_id("price_book", book.id),
        cost_usd=format_usd(sum(cost.cost_pico for cost in costs)),
        preview_usd=format_usd(sum(cost.preview_pico for cost in costs)),
        unpriced_requests=sum(cost.unpriced_requests for cost in costs),
        data=[
            TenantPreview(
                tenant_id=format_id("tenant", cost.tenant_id),
                tenant=cost.tenant,
                requests=cost.requests,
                cost_usd=format_usd(cost.cost_pico),
                preview_usd=format_usd(cost.preview_pico),
                unpriced_requests=cost.unpriced_requests,
            )
            for cost in costs
        ],
    )


@router.post("/{book_id}/quote")
@requires("price.read")
async def quote_price(book_id: BookId, body: QuoteRequest, session: DbSession) -> QuoteResource:
    """What one request of a shape costs by this book."""
    book = await price_books.find(session, book_id)
    pico = await price_books.quote(session, book, body)
    return QuoteResource(price_book_id=format_id("price_book", book.id), cost_usd=format_usd(pico))
