"""Keyset pages: newest first, by UUIDv7, so that a page costs the same however deep it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar
from uuid import UUID

from fastapi import Depends, Query
from sqlalchemy import ColumnElement, Select, or_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from loraplex_platform.control.schemas import ListPage
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.ids import PREFIXES, MalformedIdError, parse_id

MAX_LIMIT = 100

Row = TypeVar("Row")


class HasId(Protocol):
    """A resource as it is shown."""

    id: str


Shown = TypeVar("Shown", bound=HasId)


@dataclass(frozen=True, slots=True)
class Page:
    """What the caller asked for."""

    limit: int
    after: str | None

    def after_id(self, kind: str) -> UUID | None:
        """The cursor as a UUID.

        Raises:
            InvalidRequestError: it is not an id of this kind.
        """
        if self.after is None:
            return None
        try:
            return parse_id(kind, self.after)
        except MalformedIdError:
            raise InvalidRequestError(
                f"after: pass the last_id of the page before ({PREFIXES[kind]}_...).", param="after"
            ) from None


async def _page(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="How many objects at most.")] = 20,
    after: Annotated[
        str | None,
        Query(max_length=80, description="The `last_id` of the page before; none for the first."),
    ] = None,
) -> Page:
    return Page(limit=limit, after=after)


Paging = Annotated[Page, Depends(_page)]
Search = Annotated[
    str | None,
    Query(
        max_length=80,
        pattern=r"^[^\x00]*$",  # which Postgres refuses
        description="Only those whose name holds this, whatever its capitals.",
    ),
]


def holding(
    statement: Select[Row],
    search: str | None,
    *columns: ColumnElement[str] | InstrumentedAttribute[str],
) -> Select[Row]:
    """Only rows with the text in one of the columns, as it is: `%` and `_` stand for themselves."""
    if not search or not search.strip():
        return statement
    return statement.where(
        or_(*(column.icontains(search.strip(), autoescape=True) for column in columns))
    )


async def fetch(
    session: AsyncSession,
    statement: Select[Row],
    id_column: InstrumentedAttribute[UUID],
    page: Page,
    kind: str,
) -> tuple[list[Row], bool]:
    """The rows of one page and whether more follow."""
    after = page.after_id(kind)
    if after is not None:
        statement = statement.where(id_column < after)
    statement = statement.order_by(id_column.desc()).limit(page.limit + 1)
    rows: Sequence[Any] = (await session.scalars(statement)).all()
    return list(rows[: page.limit]), len(rows) > page.limit


def to_list(rows: Sequence[Row], has_more: bool, show: Callable[[Row], Shown]) -> ListPage[Shown]:
    """The rows as the list envelope."""
    data = [show(row) for row in rows]
    return ListPage(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
    )
