"""Price books on the wire. Money is decimal text, never a JSON number."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from loraplex_platform.billing.money import CURRENCY, PICO_PER_USD, format_usd
from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import PriceBook, PriceItem
from loraplex_platform.ids import PREFIXES, format_id

MAX_ITEMS = 5_000
MAX_TOKENS = 10**12
TOKENS_PER_PRICE = 1_000_000
MAX_UNIX_S = 32_503_680_000  # the year 3000

TargetKind = Literal["any_base", "any_adapter", "base_model", "adapter", "deployment"]
PriceClass = Literal["input", "cached_input", "output", "request", "adapter_hour"]
PER_UNIT: Final[dict[str, Literal["request", "hour"]]] = {
    "request": "request",
    "adapter_hour": "hour",
}
# A price per 1M tokens has 6 places, which makes it whole pico-USD per token; other prices have 12.
UsdPrice = Annotated[
    str,
    Field(
        pattern=r"^[0-9]{1,6}(\.[0-9]{1,12})?$",
        description="Dollars as decimal text: per 1M tokens with at most 6 places, per request or hour with "
        "at most 12.",
        examples=["0.25"],
    ),
]
BookName = Annotated[CleanText, Field(min_length=1, max_length=80)]
TargetId = Annotated[
    str,
    Field(
        max_length=80,
        description="The id of that base model, adapter or deployment; none for any_base and "
        "any_adapter.",
    ),
]


class Price(Body):
    """What a class costs for a target. The most specific target wins, class by class: deployment,
    adapter, base model, any."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"target_kind": "any_base", "price_class": "input", "price_usd": "0.02"},
                {"target_kind": "any_adapter", "price_class": "request", "price_usd": "0.0001"},
            ]
        },
    )

    target_kind: TargetKind
    target_id: TargetId | None = None
    price_class: PriceClass = Field(
        description="cached_input: prompt tokens that were found in the cache, at the price of input if "
        "there is none. adapter_hour: each hour for which a version of the adapter is deployed, under however "
        "many names, from the moment a deployment points at it until none does; only for any_adapter, "
        "base_model and adapter, and nothing is charged where there is no price."
    )
    price_usd: UsdPrice

    @model_validator(mode="after")
    def _fits(self) -> Price:
        is_any = self.target_kind in ("any_base", "any_adapter")
        if is_any and self.target_id is not None:
            raise ValueError(f"target_id: {self.target_kind} has none; remove it.")
        if not is_any and self.target_id is None:
            raise ValueError(f"target_id: name the {self.target_kind}.")
        places = len(self.price_usd.partition(".")[2])
        if self.price_class == "adapter_hour" and self.target_kind in ("any_base", "deployment"):
            raise ValueError(
                "target_kind: adapter_hour is for any_adapter, base_model or adapter, for a version that is "
                "deployed under several names counts once."
            )
        if self.price_class not in PER_UNIT and places > 6:
            raise ValueError("price_usd: a price per 1M tokens has at most 6 places.")
        return self


Prices = Annotated[list[Price], Field(max_length=MAX_ITEMS)]


class NewPriceBook(Body):
    """A draft, empty or with the prices of another book."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "2027",
                    "prices": [
                        {"target_kind": "any_base", "price_class": "input", "price_usd": "0.02"},
                        {"target_kind": "any_base", "price_class": "output", "price_usd": "0.04"},
                    ],
                }
            ]
        },
    )

    name: BookName
    copy_from: str | None = Field(
        default=None, max_length=80, description="The book, `prb_...`, whose prices it begins with."
    )
    prices: Prices = Field(
        default_factory=list, description="On top of what is copied: the same target and class win."
    )


class PriceBookChanges(Body):
    """What a draft is to be; what is not named stays."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "prices": [
                        {"target_kind": "any_base", "price_class": "input", "price_usd": "0.03"}
                    ]
                }
            ]
        },
    )

    name: BookName | None = None
    prices: Prices | None = Field(default=None, description="All of them: others are removed.")


class Publication(Body):
    """When a book takes effect."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"effective_from": 1798761600}]}
    )

    effective_from: int | None = Field(
        default=None,
        ge=0,
        le=MAX_UNIX_S,
        description="Unix seconds, not in the past; at once if not given.",
    )


class PreviewRequest(Body):
    """A past period, to see what it would have cost."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"start_time": 1796083200, "end_time": 1798761600}]},
    )

    start_time: int = Field(ge=0, le=MAX_UNIX_S, description="Unix seconds, inclusive.")
    end_time: int = Field(ge=0, le=MAX_UNIX_S, description="Unix seconds, exclusive.")
    tenant_id: str | None = Field(default=None, max_length=80, description="Only this tenant.")


class QuoteRequest(Body):
    """The shape of one request."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"prompt_tokens": 1200, "cached_tokens": 1000, "completion_tokens": 300}]
        },
    )

    deployment_id: str | None = Field(default=None, max_length=80)
    adapter_version_id: str | None = Field(
        default=None, max_length=80, description="None: the base model answers."
    )
    prompt_tokens: int = Field(ge=0, le=MAX_TOKENS)
    cached_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS, description="Of the prompt.")
    completion_tokens: int = Field(ge=0, le=MAX_TOKENS)


class PriceResource(Resource):
    """What a class costs for a target."""

    target_kind: TargetKind
    target_id: str | None
    price_class: PriceClass
    price_usd: str
    per: Literal["1M tokens", "request", "hour"]


class PriceBookResource(Resource):
    """A price book. `effective_to` null: until another one follows."""

    object: Literal["price_book"] = "price_book"
    id: str
    name: str
    currency: Literal["USD"] = CURRENCY
    status: Literal["draft", "published", "retired"]
    is_in_force: bool
    effective_from: UnixSeconds | None
    effective_to: UnixSeconds | None
    published_at: UnixSeconds | None
    version: int = Field(description="Its ETag, for If-Match.")
    created_at: UnixSeconds


class PriceBookWithPrices(PriceBookResource):
    """A book and its prices."""

    prices: list[PriceResource]
    unpriced_models: list[str] = Field(
        description="Deployments that would not be served under this book, for want of a price of input "
        "or output; a hundred at most."
    )


class TenantPreview(Resource):
    """What a tenant paid, and what it would have paid."""

    tenant_id: str
    tenant: str
    requests: int
    cost_usd: str
    preview_usd: str
    unpriced_requests: int = Field(description="Of these; they are not in `preview_usd`.")


class PreviewReport(Resource):
    """Period and book, tenant by tenant."""

    object: Literal["price_preview"] = "price_preview"
    price_book_id: str
    currency: Literal["USD"] = CURRENCY
    cost_usd: str
    preview_usd: str
    unpriced_requests: int
    data: list[TenantPreview]


class QuoteResource(Resource):
    """What one request of this shape costs."""

    object: Literal["price_quote"] = "price_quote"
    price_book_id: str
    currency: Literal["USD"] = CURRENCY
    cost_usd: str


def price_pico(price: Price) -> int:
    """Pico-USD per token, request or hour."""
    whole, _, fraction = price.price_usd.partition(".")
    pico = int(whole) * PICO_PER_USD + int(fraction.ljust(12, "0"))
    return pico if price.price_class in PER_UNIT else pico // TOKENS_PER_PRICE


def show_price(item: PriceItem) -> PriceResource:
    """The price as the API shows it."""
    per = PER_UNIT.get(item.price_class)
    pico = item.price_pico * (TOKENS_PER_PRICE if per is None else 1)
    has_id = item.target_kind in PREFIXES
    return PriceResource(
        target_kind=item.target_kind,  # type: ignore[arg-type]  # checked by the table
        target_id=format_id(item.target_kind, item.target_id) if has_id else None,
        price_class=item.price_class,  # type: ignore[arg-type]  # checked by the table
        price_usd=format_usd(pico)[:-6] if per is None else format_usd(pico),
        per=per or "1M tokens",
    )


def show_book(book: PriceBook, *, is_in_force: bool) -> PriceBookResource:
    """The book as the API shows it, without its prices."""
    return PriceBookResource(
        id=format_id("price_book", book.id),
        name=book.name,
        status=book.status,  # type: ignore[arg-type]  # checked by the table
        is_in_force=is_in_force,
        effective_from=book.effective_from,
        effective_to=book.effective_to,
        published_at=book.published_at,
        version=book.row_version,
        created_at=book.created_at,
    )
