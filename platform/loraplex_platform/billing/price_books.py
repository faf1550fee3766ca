"""Price books from draft to published to retired.

A draft may change in everything. Publishing gives it a time from which it holds, never a past one, and
ends the book before it there; from then on it changes no more, because requests keep the book under which
they were admitted: the one in force, or the one that their revision names, which may have ended. A published
book that has not begun can be withdrawn. Triggers of the database guard all of this; here a caller is told
what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.billing import price_queries as queries
from loraplex_platform.billing.price_schemas import (
    NewPriceBook,
    Price,
    PriceBookChanges,
    QuoteRequest,
    price_pico,
)
from loraplex_platform.billing.prices import prices_of
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import PriceBook, PriceItem
from loraplex_platform.db.billing import ANY_TARGET
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import PREFIXES, MalformedIdError, format_id, parse_id, uuid7

# (target kind, target id, class) -> pico-USD per unit
PriceTable = dict[tuple[str, UUID, str], int]


@dataclass(frozen=True, slots=True)
class BookDetail:
    """A book, its prices, and what it cannot price."""

    book: PriceBook
    items: Sequence[PriceItem]
    is_in_force: bool
    unpriced_models: list[str]


@dataclass(frozen=True, slots=True)
class TenantCost:
    """A tenant's period, as billed and by another book, in pico-USD."""

    tenant_id: UUID
    tenant: str
    requests: int
    cost_pico: int
    preview_pico: int
    unpriced_requests: int


async def find(session: AsyncSession, book_id: str, *, is_locked: bool = False) -> PriceBook:
    """By its public id.

    Raises:
        NotFoundError: no such book.
    """
    try:
        book = await queries.find_book(
            session, parse_id("price_book", book_id), is_locked=is_locked
        )
    except MalformedIdError:
        book = None
    if book is None:
        raise NotFoundError("No such price book.")
    return book


async def describe(session: AsyncSession, book: PriceBook) -> BookDetail:
    """With prices, and the deployments that would not be served."""
    return BookDetail(
        book,
        await queries.items_of(session, book.id),
        await queries.current_book_id(session) == book.id,
        await queries.unpriced_models(session, book.id),
    )


async def create(session: AsyncSession, actor: Actor, new: NewPriceBook) -> PriceBook:
    """A draft.

    Raises:
        NotFoundError: `copy_from` is no book.
        InvalidRequestError: a target is unknown, or priced twice.
    """
    table: PriceTable = {}
    if new.copy_from is not None:
        source = await find(session, new.copy_from)
        table = _table_of(await queries.items_of(session, source.id))
    table |= await _parse(session, new.prices)
    book = PriceBook(id=uuid7(), name=new.name, status="draft")
    session.add(book)
    await session.flush()
    await queries.replace_items(session, book.id, _rows(table))
    await session.refresh(book)
    _record(session, actor, "create", book, after={"name": book.name} | _shown(table))
    return book


async def change(
    session: AsyncSession,
    actor: Actor,
    book_id: str,
    changes: PriceBookChanges,
    if_match: int | None,
) -> PriceBook:
    """Name or prices of a draft.

    Raises:
        NotFoundError: no such book.
        ConflictError: it is published, or not the version of If-Match.
        InvalidRequestError: a target is unknown, or priced twice.
    """
    book = await _draft(session, book_id, if_match)
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    if changes.name is not None and changes.name != book.name:
        before["name"], after["name"] = book.name, changes.name
        book.name = changes.name
    if changes.prices is not None:
        old = _table_of(await queries.items_of(session, book.id))
        new = await _parse(session, changes.prices)
        await queries.replace_items(session, book.id, _rows(new))
        before |= _shown({key: price for key, price in old.items() if new.get(key) != price})
        after |= _shown({key: price for key, price in new.items() if old.get(key) != price})
    book.row_version += 1
    await session.flush()
    _record(session, actor, "update", book, before=before, after=after)
    return book


async def delete(session: AsyncSession, actor: Actor, book_id: str, if_match: int | None) -> None:
    """Throw a draft away.

    Raises:
        NotFoundError: no such book.
        ConflictError: it is published, or not the version of If-Match.
    """
    book = await _draft(session, book_id, if_match)
    _record(session, actor, "delete", book, before={"name": book.name})
    await queries.replace_items(session, book.id, [])
    await session.delete(book)
    await session.flush()


async def publish(
    session: AsyncSession,
    actor: Actor,
    book_id: str,
    effective_from: datetime | None,
    if_match: int | None,
) -> PriceBook:
    """Let a draft hold from a time on; the book before it ends there, the one after it stays.

    Raises:
        NotFoundError: no such book.
        ConflictError: it is published already or has no prices, another one begins at that very time,
            or it is not the version of If-Match.
        InvalidRequestError: the time is past.
    """
    await queries.lock_periods(session)
    book = await _draft(session, book_id, if_match)
    now = await queries.now(session)
    begins = now if effective_from is None else effective_from
    if begins < now:
        raise InvalidRequestError(
            "effective_from: it is past, and what is past has its price; name a later time, or none for "
            "now.",
            param="effective_from",
        )
    items = await queries.items_of(session, book.id)
    if not {"input", "output"} <= {item.price_class for item in items}:
        raise ConflictError(
            "The book has no price of input and output yet, so nothing could be served under it. Add "
            "prices first."
        )
    following = await queries.book_after(session, begins)
    if following is not None and following.effective_from == begins:
        raise ConflictError(
            f"{following.name!r} begins at that very time; name another one, or withdraw it first.",
            param="effective_from",
        )
    previous = await queries.book_before(session, begins)
    if previous is not None and (previous.effective_to is None or previous.effective_to > begins):
        previous.effective_to = begins
        previous.row_version += 1
        await session.flush()  # before ours begins: two must not overlap even for a statement
    book.status = "published"
    book.published_at = now
    book.effective_from = begins
    book.effective_to = None if following is None else following.effective_from
    book.row_version += 1
    await session.flush()
    _record(
        session,
        actor,
        "publish",
        book,
        after={
            "effective_from": begins.isoformat(),
            "ends": None if previous is None else format_id("price_book", previous.id),
        },
    )
    return book


async def retire(
    session: AsyncSession, actor: Actor, book_id: str, if_match: int | None
) -> PriceBook:
    """Withdraw a book that has not begun, so that the one before it goes on; or file one that has ended.

    Raises:
        NotFoundError: no such book.
        ConflictError: it is a draft or in force, or not the version of If-Match.
    """
    await queries.lock_periods(session)
    book = await find(session, book_id, is_locked=True)
    check_version(if_match, book.row_version, {}, {})
    if book.status == "retired":
        return book
    if book.effective_from is None or book.status == "draft":
        raise ConflictError("The book is a draft; delete it instead.")
    now = await queries.now(session)
    if book.effective_from > now:
        ended, book.effective_to = book.effective_to, book.effective_from
        previous = await queries.book_before(session, book.effective_from)
        book.status = "retired"
        await session.flush()
        if previous is not None and previous.effective_to == book.effective_from:
            previous.effective_to = ended
            previous.row_version += 1
    elif book.effective_to is None or book.effective_to > now:
        raise ConflictError(
            "The book is in force: without it nothing could be served. Publish another one, which ends "
            "it."
        )
    book.status = "retired"
    book.row_version += 1
    await session.flush()
    _record(session, actor, "retire", book, after={"status": "retired"})
    return book


async def preview(
    session: AsyncSession, book: PriceBook, start: datetime, end: datetime, tenant_id: UUID | None
) -> list[TenantCost]:
    """What each tenant's days from `start` to before `end` cost, and would have cost by this book.

    Raises:
        InvalidRequestError: the period is empty.
    """
    if start >= end:
        raise InvalidRequestError("start_time must lie before end_time.", param="start_time")
    rows = await queries.preview(
        session,
        book.id,
        start=start,
        end=end,
        # A zone is at most a day away from UTC; the query has each tenant's own days.
        first_day=(start.astimezone(UTC) - timedelta(days=1)).date(),
        last_day=(end.astimezone(UTC) + timedelta(days=1)).date(),
        tenant_id=tenant_id,
    )
    return [
        TenantCost(
            tenant_id=row.tenant_id,
            tenant=row.tenant,
            requests=int(row.requests),
            cost_pico=int(row.cost_pico),
            preview_pico=int(row.preview_pico),
            unpriced_requests=int(row.unpriced),
        )
        for row in rows
    ]


async def quote(session: AsyncSession, book: PriceBook, shape: QuoteRequest) -> int:
    """Pico-USD of one request.

    Raises:
        InvalidRequestError: more cached than prompt tokens, or an id that is none.
        NoPriceError: the book has no price for it.
    """
    if shape.cached_tokens > shape.prompt_tokens:
        raise InvalidRequestError(
            "cached_tokens: they are part of the prompt; at most prompt_tokens.",
            param="cached_tokens",
        )
    prices = await prices_of(
        session,
        book.id,
        adapter_version_id=_optional_id("adapter_version", shape.adapter_version_id),
        deployment_id=_optional_id("deployment", shape.deployment_id),
    )
    return prices.cost_pico(
        prompt_tokens=shape.prompt_tokens,
        cached_tokens=shape.cached_tokens,
        completion_tokens=shape.completion_tokens,
    )


def _optional_id(kind: str, text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        return parse_id(kind, text)
    except MalformedIdError:
        raise InvalidRequestError(
            f"{kind}_id: pass an id, {PREFIXES[kind]}_ and 32 hex digits.", param=f"{kind}_id"
        ) from None


async def _draft(session: AsyncSession, book_id: str, if_match: int | None) -> PriceBook:
    book = await find(session, book_id, is_locked=True)
    if book.status != "draft":
        raise ConflictError(
            "A published price book never changes, for requests were admitted at its prices. Make a new "
            "one with copy_from, and publish that."
        )
    check_version(if_match, book.row_version, {}, {})
    return book


async def _parse(session: AsyncSession, prices: Sequence[Price]) -> PriceTable:
    table: PriceTable = {}
    wanted: dict[str, dict[UUID, int]] = {}
    for index, price in enumerate(prices):
        target_id = ANY_TARGET
        if price.target_id is not None:
            try:
                target_id = parse_id(price.target_kind, price.target_id)
            except MalformedIdError:
                raise _unknown_target(price.target_kind, index) from None
            wanted.setdefault(price.target_kind, {}).setdefault(target_id, index)
        key = (price.target_kind, target_id, price.price_class)
        if key in table:
            raise InvalidRequestError(
                f"prices.{index}: this target and class have a price already; remove one of them.",
                param=f"prices.{index}",
            )
        table[key] = price_pico(price)
    for kind, ids in wanted.items():
        missing = ids.keys() - await queries.existing_ids(session, kind, ids)
        if missing:
            raise _unknown_target(kind, min(ids[target_id] for target_id in missing))
    return table


def _unknown_target(kind: str, index: int) -> InvalidRequestError:
    param = f"prices.{index}.target_id"
    return InvalidRequestError(f"{param}: there is no such {kind.replace('_', ' ')}.", param=param)


def _table_of(items: Sequence[PriceItem]) -> PriceTable:
    return {(item.target_kind, item.target_id, item.price_class): item.price_pico for item in items}


def _rows(table: PriceTable) -> list[dict[str, Any]]:
    return [
        {"target_kind": kind, "target_id": target, "price_class": name, "price_pico": pico}
        for (kind, target, name), pico in table.items()
    ]


def _shown(table: PriceTable) -> dict[str, Any]:
    """As the audit log keeps them: a string per target and class, in pico-USD per unit."""
    return {
        f"{kind} {'' if target == ANY_TARGET else format_id(kind, target)} {name}": str(pico)
        for (kind, target, name), pico in table.items()
    }


def _record(
    session: AsyncSession,
    actor: Actor,
    verb: str,
    book: PriceBook,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        session,
        actor,
        f"price_book.{verb}",
        "price_book",
        format_id("price_book", book.id),
        detail={"name": book.name},
        before=before,
        after=after,
    )
