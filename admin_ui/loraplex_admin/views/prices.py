"""Price books: drafted, previewed against what was used, published, retired."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError
from loraplex_admin.components import confirm, forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Row

_CLASSES = ("input", "cached_input", "output", "request", "adapter_hour")
_TARGETS = ("any_base", "any_adapter", "base_model", "adapter", "deployment")
_COLUMNS = ("target_kind", "target_id", "price_class", "price_usd")
_PERIODS = {7: "the last 7 days", 30: "the last 30 days", 90: "the last 90 days"}


def render(api: Api, access: Access) -> None:
    """The books, a form for a draft, then the one that is open."""
    st.title("Prices")
    choices.show_notice()
    books = api.of_platform("price-books")
    can_write = access.may("price.write")
    listing = Listing(
        "prices",
        fetch=books.page,
        columns=Columns(_cells, wide=("name",)),
        empty="There is no price book: nothing can be billed, so nothing is served. Draft one below, then publish it.",
        search_label="Search price books",
    )
    open_id = listing.show()
    if can_write:
        _new_book(api, listing)
    if open_id is None:
        return
    try:
        _book(api, books.get(open_id), listing, can_write=can_write)
    except ApiError as error:
        listing.refuse(error)


def _cells(book: Row) -> dict[str, object]:
    return {
        "name": fmt.cell(book["name"]),
        "status": "in force" if book["is_in_force"] else book["status"],
        "from": fmt.moment(book["effective_from"]),
        "to": fmt.moment(book["effective_to"]) if book["effective_from"] else "–",
        "made": fmt.moment(book["created_at"]),
    }


def _new_book(api: Api, listing: Listing) -> None:
    books = api.of_platform("price-books")
    known = {one["id"]: one["name"] for one in books.page()["data"]}
    with st.expander("New draft", icon=":material/add:", key=choices.fresh("new_book_box")):
        made = forms.create(
            "new_book",
            (
                Field("name", "Name", max_chars=80, placeholder="2027"),
                Field(
                    "copy_from",
                    "Begin with the prices of",
                    "choice",
                    options=(None, *known),
                    labels={None: "none", **known},
                    default=next(iter(known), None),
                    is_optional=True,
                ),
            ),
            submit="Make a draft",
            send=lambda body, once: books.create(body, once=once),
        )
    if made is not None:
        listing.go_to_start()
        listing.open(made["id"])
        choices.rerun_with_notice(
            f"Draft {fmt.code(made['name'])} is there. It changes nothing before it is published."
        )


def _book(api: Api, book: Row, listing: Listing, *, can_write: bool) -> None:
    with st.container(border=True):
        st.subheader(fmt.literal(book["name"]))
        st.caption(f"{fmt.code(book['id'])} · {book['status']} · dollars (USD)")
        if book["unpriced_models"]:
            st.warning(
                "Under this book these would not be served, for want of a price of input or output: "
                + ", ".join(fmt.code(name) for name in book["unpriced_models"])
            )
        is_draft = can_write and book["status"] == "draft"
        if is_draft:
            _edit_prices(api, book)
        else:
            _show_prices(book)
        _preview(api, book)
        if is_draft:
            _publish(api, book)
            _throw_away(api, book, listing)
        elif can_write and book["status"] == "published" and not book["is_in_force"]:
            _retire(api, book)


def _price_rows(book: Row) -> list[dict[str, Any]]:
    return [{name: one[name] for name in _COLUMNS} for one in book["prices"]]


def _show_prices(book: Row) -> None:
    if not book["prices"]:
        st.info("This book has no prices yet.")
        return
    st.dataframe(
        [
            {
                "for": one["target_kind"].replace("_", " "),
                "which": one["target_id"] or "–",
                "what": one["price_class"].replace("_", " "),
                "price": fmt.usd(one["price_usd"]),
                "per": one["per"],
            }
            for one in book["prices"]
        ],
        hide_index=True,
        column_config={"price": st.column_config.TextColumn(alignment="right")},
        key=f"prices_of_{book['id']}",
    )


def _edit_prices(api: Api, book: Row) -> None:
    """The whole list as a table; it is sent as one change with the version that was read."""
    id_, slot = book["id"], f"prices_opened_{book['id']}"
    opened = st.session_state.setdefault(slot, book)
    st.caption(
        "Prices are per 1M tokens, per request or per hour. The most specific target wins. Write dollars as text, such "
        "as 0.25."
    )
    with st.form(f"prices_form_{id_}"):
        edited = st.data_editor(
            pd.DataFrame(_price_rows(opened), columns=list(_COLUMNS)),
            num_rows="dynamic",
            hide_index=True,
            column_config={
                "target_kind": st.column_config.SelectboxColumn(
                    "for", options=list(_TARGETS), required=True
                ),
                "target_id": st.column_config.TextColumn("which (id)", max_chars=80),
                "price_class": st.column_config.SelectboxColumn(
                    "what", options=list(_CLASSES), required=True
                ),
                "price_usd": st.column_config.TextColumn("price in $", max_chars=20, required=True),
            },
            key=f"prices_editor_{id_}_{opened['version']}",
        )
        is_sent = st.form_submit_button("Save prices", type="primary", key=f"prices_save_{id_}")
    if not is_sent:
        return
    prices = [
        {name: _text(line[name]) for name in _COLUMNS if _text(line[name]) is not None}
        for line in edited.to_dict("records")
    ]
    try:
        api.of_platform("price-books").change(id_, {"prices": prices}, version=opened["version"])
    except ApiError as error:
        choices.show_refusal(error)
        if error.is_stale:
            _show_difference(opened, book)
            # The next try is against what is there now, which the reader has seen.
            st.session_state.pop(slot)
        return
    st.session_state.pop(slot)
    choices.rerun_with_notice(f"The prices of {fmt.code(book['name'])} are saved.")


def _text(value: Any) -> str | None:  # noqa: ANN401 (a cell of pandas)
    return None if value is None or pd.isna(value) or not str(value).strip() else str(value).strip()


def _show_difference(opened: Row, now: Row) -> None:
    def by_place(book: Row) -> dict[tuple[Any, ...], str]:
        return {
            (one["target_kind"], one["target_id"], one["price_class"]): one["price_usd"]
            for one in book["prices"]
        }

    before, after = by_place(opened), by_place(now)
    st.warning(
        "Somebody changed these prices while they were open here. The table shows theirs now."
    )
    st.dataframe(
        [
            {
                "for": " ".join(str(part) for part in place if part),
                "when you opened it": before.get(place, "–"),
                "now": after.get(place, "–"),
            }
            for place in sorted(before.keys() | after.keys(), key=str)
            if before.get(place) != after.get(place)
        ],
        hide_index=True,
        key="prices_difference",
    )


def _preview(api: Api, book: Row) -> None:
    with st.expander(
        "What would these prices have cost?",
        icon=":material/calculate:",
        key=f"preview_{book['id']}_box",
    ):
        days = st.selectbox(
            "For what was used in",
            list(_PERIODS),
            index=1,
            format_func=_PERIODS.__getitem__,
            key=f"preview_days_{book['id']}",
        )
        if not st.button("Preview", key=f"preview_{book['id']}"):
            return
        end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        period = {
            "start_time": int((end - timedelta(days=days)).timestamp()),
            "end_time": int(end.timestamp()),
        }
        try:
            report = api.of_platform("price-books").act(book["id"], "preview", period)
        except ApiError as error:
            choices.show_refusal(error)
            return
        left, right, last = st.columns(3)
        left.metric("It cost", fmt.usd(report["cost_usd"]), border=True)
        right.metric("It would have cost", fmt.usd(report["preview_usd"]), border=True)
        last.metric("Requests without a price", fmt.count(report["unpriced_requests"]), border=True)
        if not report["data"]:
            st.info("Nothing was used in that time.")
            return
        st.dataframe(
            [
                {
                    "tenant": one["tenant"],
                    "requests": fmt.count(one["requests"]),
                    "it cost": fmt.usd(one["cost_usd"]),
                    "it would have cost": fmt.usd(one["preview_usd"]),
                    "without a price": fmt.count(one["unpriced_requests"]),
                }
                for one in report["data"]
            ],
            hide_index=True,
            key=f"preview_table_{book['id']}",
        )


def _publish(api: Api, book: Row) -> None:
    if not confirm.by_name(
        "Publish: these prices hold from now on",
        name=book["name"],
        consequence="Every request from now on is billed by this book. Its prices can never change again; what was billed "
        "before stays as it was.",
        button="Publish it",
        key=f"publish_{book['id']}",
    ):
        return
    try:
        api.of_platform("price-books").act(book["id"], "publish", {}, version=book["version"])
    except ApiError as error:
        choices.show_refusal(error)
        return
    choices.rerun_with_notice(f"{fmt.code(book['name'])} is in force.")


def _retire(api: Api, book: Row) -> None:
    if not confirm.by_name(
        "Retire this book",
        name=book["name"],
        consequence="It does not come into force, or is over. Bills made by it stay.",
        button="Retire it",
        key=f"retire_{book['id']}",
    ):
        return
    try:
        api.of_platform("price-books").act(book["id"], "retire", version=book["version"])
    except ApiError as error:
        choices.show_refusal(error)
        return
    choices.rerun_with_notice(f"{fmt.code(book['name'])} is retired.")


def _throw_away(api: Api, book: Row, listing: Listing) -> None:
    if not confirm.by_name(
        "Throw this draft away",
        name=book["name"],
        consequence="Its prices are gone. Nothing was billed by them.",
        button="Throw it away",
        key=f"drop_{book['id']}",
    ):
        return
    try:
        api.of_platform("price-books").remove(book["id"], version=book["version"])
    except ApiError as error:
        choices.show_refusal(error)
        return
    listing.open(None)
    choices.rerun_with_notice(f"Draft {fmt.code(book['name'])} is gone.")
