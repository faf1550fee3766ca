"""`loraplex prices`, `credits` and `invoices`: what things cost, what is given, what is owed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_platform.cli.errors import CommandError, CommandGroup
from loraplex_platform.cli.options import (
    AnyTenantOption,
    ControlUrlOption,
    DataDirOption,
    TenantOption,
    open_admin,
)
from loraplex_platform.cli.output import JsonOption, SearchOption, print_json, print_rows, searched

if TYPE_CHECKING:
    from loraplex_platform.admin_client import AdminClient

prices = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Price books: drafts, dates, previews."
)
credits = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Credits, debits, reversals and balances."
)
invoices = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Monthly invoices.")

BookArgument = Annotated[str, typer.Argument(help="The book's id (prb_...) or name.")]
InvoiceArgument = Annotated[str, typer.Argument(help="The invoice's id (inv_...) or number.")]
ReasonOption = Annotated[str, typer.Option("--reason", "-r", help="Shown on the invoice.")]
TargetOption = Annotated[
    str,
    typer.Option(
        "--for", help="any_base, any_adapter, or the id of a base model, adapter or deployment."
    ),
]
_KINDS = {"bas": "base_model", "adp": "adapter", "dep": "deployment"}


# ---------------------------------------------------------------------------- prices


@prices.command("list")
def list_books(
    search: SearchOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show all price books, newest first; `*` marks the one in force.

    Example:

      loraplex prices list
    """
    with open_admin(data_dir, control_url) as admin:
        books = admin.price_books(**searched(search))
    if as_json:
        print_json(books)
        return
    header = ("", "ID", "NAME", "STATUS", "FROM", "TO")
    print_rows(
        [
            header,
            *(
                (
                    "*" if book["is_in_force"] else "",
                    book["id"],
                    book["name"],
                    book["status"],
                    _time(book["effective_from"]),
                    _time(book["effective_to"]),
                )
                for book in books
            ),
        ]
    )


@prices.command("show")
def show_book(
    book: BookArgument,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show a book's prices, and the models that it has none for.

    Example:

      loraplex prices show standard
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.price_book(_book_id(admin, book))
    if as_json:
        print_json(found)
        return
    typer.echo(f"{found['id']} {found['name']}: {found['status']}, in {found['currency']}")
    header = ("FOR", "CLASS", "PRICE", "PER")
    print_rows(
        [
            header,
            *(
                (
                    price["target_id"] or price["target_kind"],
                    price["price_class"],
                    price["price_usd"],
                    price["per"],
                )
                for price in found["prices"]
            ),
        ]
    )
    if found["unpriced_models"]:
        typer.echo(f"not servable by it: {', '.join(found['unpriced_models'])}")


@prices.command("draft")
def draft_book(
    name: Annotated[str, typer.Argument(help="What the book is called.")],
    copy_from: Annotated[
        str | None, typer.Option("--from", help="Begin with the prices of this book.")
    ] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Begin a draft and print its id. Nothing is charged by it until it is published.

    Example:

      loraplex prices draft 2027 --from standard
    """
    with open_admin(data_dir, control_url) as admin:
        body: dict[str, Any] = {"name": name}
        if copy_from is not None:
            body["copy_from"] = _book_id(admin, copy_from)
        book = admin.create_price_book(body)
    typer.echo(book["id"])


@prices.command("set")
def set_price(
    book: BookArgument,
    price_class: Annotated[
        str,
        typer.Argument(
            help="input, cached_input, output (per 1M tokens), request or adapter_hour."
        ),
    ],
    usd: Annotated[str, typer.Argument(help="Dollars as a decimal; 'none' takes the price away.")],
    target: TargetOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Set one price of a draft. The most specific target wins, class by class.

    Examples:

      loraplex prices set 2027 output 0.08 --for any_adapter

      loraplex prices set 2027 request 0.0001 --for dep_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f

      loraplex prices set 2027 adapter_hour 0.01 --for any_adapter
    """
    kind = target if target.startswith("any_") else _KINDS.get(target.partition("_")[0])
    if kind is None:
        raise CommandError("--for: any_base, any_adapter, or an id bas_..., adp_... or dep_...")
    target_id = None if target.startswith("any_") else target
    with open_admin(data_dir, control_url) as admin:
        found = admin.price_book(_book_id(admin, book))
        kept = [
            {name: price[name] for name in ("target_kind", "target_id", "price_class", "price_usd")}
            for price in found["prices"]
            if (price["target_kind"], price["target_id"], price["price_class"])
            != (kind, target_id, price_class)
        ]
        if usd != "none":
            kept.append(
                {
                    "target_kind": kind,
                    "target_id": target_id,
                    "price_class": price_class,
                    "price_usd": usd,
                }
            )
        admin.change_price_book(found["id"], {"prices": kept})
    typer.echo(f"{found['name']}: {price_class} for {target} is {usd}")


@prices.command("publish")
def publish_book(
    book: BookArgument,
    at: Annotated[
        str | None,
        typer.Option(
            help="When it takes effect, ISO 8601 with a zone; never a past time.",
            show_default="now",
        ),
    ] = None,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Publish a draft. It never changes again, and ends the book before it.

    Example:

      loraplex prices publish 2027 --at 2027-01-01T00:00:00Z
    """
    body = {} if at is None else {"effective_from": _parse_time("--at", at)}
    with open_admin(data_dir, control_url) as admin:
        found = admin.price_book_action(_book_id(admin, book), "publish", body)
    typer.echo(f"{found['name']} holds from {_time(found['effective_from'])}")
    if found["unpriced_models"]:
        typer.echo(f"not servable by it: {', '.join(found['unpriced_models'])}", err=True)


@prices.command("retire")
def retire_book(
    book: BookArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Withdraw a published book that has not begun, or file one that has ended.

    Example:

      loraplex prices retire 2027
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.price_book_action(_book_id(admin, book), "retire", {})
    typer.echo(f"retired {found['id']} ({found['name']})")


@prices.command("delete")
def delete_book(
    book: BookArgument,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Throw a draft away.

    Example:

      loraplex prices delete 2027
    """
    with open_admin(data_dir, control_url) as admin:
        book_id = _book_id(admin, book)
        admin.delete_price_book(book_id)
    typer.echo(f"deleted {book_id}")


@prices.command("preview")
def preview_book(
    book: BookArgument,
    start: Annotated[str, typer.Option(help="ISO 8601 with a zone, inclusive.")],
    end: Annotated[str, typer.Option(help="ISO 8601 with a zone, exclusive.")],
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show what each tenant would have paid by a book, also a draft, beside what it did pay.

    Example:

      loraplex prices preview 2027 --start 2026-10-01T00:00Z --end 2026-11-01T00:00Z
    """
    body = {"start_time": _parse_time("--start", start), "end_time": _parse_time("--end", end)}
    with open_admin(data_dir, control_url) as admin:
        report = admin.price_book_action(_book_id(admin, book), "preview", body)
    if as_json:
        print_json(report)
        return
    rows = [(row["tenant"], row) for row in report["data"]] + [("all", report)]
    header = ("TENANT", "PAID", "WOULD HAVE PAID", "REQUESTS WITHOUT A PRICE")
    print_rows(
        [
            header,
            *(
                (name, row["cost_usd"], row["preview_usd"], row["unpriced_requests"])
                for name, row in rows
            ),
        ]
    )


@prices.command("quote")
def quote(
    book: BookArgument,
    prompt: Annotated[int, typer.Option(min=0, help="Prompt tokens.")],
    completion: Annotated[int, typer.Option(min=0, help="Output tokens.")],
    cached: Annotated[int, typer.Option(min=0, help="Of the prompt, found in the cache.")] = 0,
    version: Annotated[
        str | None, typer.Option(help="Adapter version, ver_...", show_default="the base")
    ] = None,
    deployment: Annotated[str | None, typer.Option(help="Deployment, dep_...")] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Print what one request of a shape costs by a book.

    Example:

      loraplex prices quote standard --prompt 1200 --completion 300
    """
    body = {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "adapter_version_id": version,
        "deployment_id": deployment,
    }
    with open_admin(data_dir, control_url) as admin:
        found = admin.price_book_action(_book_id(admin, book), "quote", body)
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found['currency']} {found['cost_usd']}")


# ---------------------------------------------------------------------------- credits


@credits.command("add")
def add_credit(
    amount: Annotated[str, typer.Argument(help="Dollars as a decimal.")],
    tenant: TenantOption,
    reason: ReasonOption,
    debit: Annotated[bool, typer.Option("--debit", help="The tenant owes it instead.")] = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Credit or debit a tenant, and print the line's id.

    Example:

      loraplex credits add 25.00 --tenant acme --reason "Outage of 3 May"
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        line = admin.add_adjustment(tenant_id, "debit" if debit else "credit", amount, reason)
    typer.echo(line["id"])


@credits.command("reverse")
def reverse(
    entry: Annotated[str, typer.Argument(help="A request (req_...), credit or debit (adj_...).")],
    tenant: TenantOption,
    reason: ReasonOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Take a charge, a credit or a debit back, once, and print the line's id.

    Example:

      loraplex credits reverse req_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f -t acme -r "Wrong model"
    """
    with open_admin(data_dir, control_url) as admin:
        line = admin.reverse(str(admin.tenant(tenant)["id"]), entry, reason)
    typer.echo(line["id"])


@credits.command("list")
def list_credits(
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show a tenant's credits, debits and reversals, and what it owes.

    Example:

      loraplex credits list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        lines, balance = admin.adjustments(tenant_id), admin.balance(tenant_id)
    if as_json:
        print_json({"adjustments": lines, "balance": balance})
        return
    header = ("ID", "KIND", "AMOUNT", "WHEN", "REASON")
    print_rows(
        [
            header,
            *(
                (
                    line["id"],
                    line["kind"],
                    line["amount_usd"],
                    _time(line["created_at"]),
                    line["reason"],
                )
                for line in lines
            ),
        ]
    )
    typer.echo(
        f"owed: {balance['currency']} {balance['balance_usd']} (usage {balance['usage_usd']}, "
        f"adjustments {balance['adjustments_usd']})"
    )


# ---------------------------------------------------------------------------- invoices


@invoices.command("list")
def list_invoices(
    tenant: AnyTenantOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show invoices and credit notes, newest first.

    Example:

      loraplex invoices list --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.invoices(None if tenant is None else str(admin.tenant(tenant)["id"]))
    if as_json:
        print_json(found)
        return
    header = ("ID", "NUMBER", "KIND", "STATUS", "MONTH", "TOTAL", "DUE", "DUE ON")
    print_rows(
        [
            header,
            *(
                (
                    item["id"],
                    item["number"] or "",
                    item["kind"],
                    item["status"],
                    item["month"],
                    item["total_usd"],
                    item["due_usd"],
                    item["due_on"] or "",
                )
                for item in found
            ),
        ]
    )


@invoices.command("draft")
def draft_invoice(
    month: Annotated[str, typer.Argument(help="YYYY-MM, in the tenant's time zone.")],
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Draft a month's invoice from the books, or draft it again, and print its id.

    Example:

      loraplex invoices draft 2026-11 --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        found = admin.draft_invoice(str(admin.tenant(tenant)["id"]), month)
    typer.echo(found["id"])


@invoices.command("show")
def show_invoice(
    invoice: InvoiceArgument,
    tenant: TenantOption,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show an invoice line by line.

    Example:

      loraplex invoices show INV-000001 --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        found = admin.invoice(tenant_id, _invoice_id(admin, tenant_id, invoice))
    if as_json:
        print_json(found)
        return
    typer.echo(f"{found['kind']} {found['number'] or '(no number)'} of {found['month']}")
    header = ("DESCRIPTION", "CLASS", "QUANTITY", "EXACT", "AMOUNT")
    print_rows(
        [
            header,
            *(
                (
                    line["description"],
                    line["price_class"] or "",
                    line["quantity"],
                    line["exact_usd"],
                    line["amount_usd"],
                )
                for line in found["lines"]
            ),
        ]
    )
    typer.echo(f"tax {found['tax_usd']}, total {found['total_usd']}, due {found['due_usd']}")


@invoices.command("finalize")
def finalize_invoice(
    invoice: InvoiceArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Give a draft its number and freeze it; print the number.

    Example:

      loraplex invoices finalize inv_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        invoice_id = _invoice_id(admin, tenant_id, invoice)
        found = admin.invoice_action(tenant_id, invoice_id, "finalize", {})
    typer.echo(found["number"])


@invoices.command("void")
def void_invoice(
    invoice: InvoiceArgument,
    tenant: TenantOption,
    reason: ReasonOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Cancel a tenant's newest final invoice; print the number of the credit note.

    Example:

      loraplex invoices void INV-000001 --tenant acme --reason "Wrong address"
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        invoice_id = _invoice_id(admin, tenant_id, invoice)
        note = admin.invoice_action(tenant_id, invoice_id, "void", {"reason": reason})
    typer.echo(note["number"])


@invoices.command("delete")
def delete_invoice(
    invoice: InvoiceArgument,
    tenant: TenantOption,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Throw a draft away.

    Example:

      loraplex invoices delete inv_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f --tenant acme
    """
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        invoice_id = _invoice_id(admin, tenant_id, invoice)
        admin.delete_invoice(tenant_id, invoice_id)
    typer.echo(f"deleted {invoice_id}")


@invoices.command("save")
def save_invoice(
    invoice: InvoiceArgument,
    tenant: TenantOption,
    to: Annotated[Path, typer.Option(help="A file whose name ends in .pdf or .html.")],
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Write an invoice to a file, as PDF or HTML.

    Example:

      loraplex invoices save INV-000001 --tenant acme --to invoice.pdf
    """
    kind = to.suffix.removeprefix(".")
    if kind not in ("pdf", "html"):
        raise CommandError(f"--to: {to} ends neither in .pdf nor in .html")
    with open_admin(data_dir, control_url) as admin:
        tenant_id = str(admin.tenant(tenant)["id"])
        content = admin.invoice_document(tenant_id, _invoice_id(admin, tenant_id, invoice), kind)
    to.write_bytes(content)
    typer.echo(f"{to}: {len(content)} bytes")


@invoices.command("recipient")
def recipient(
    tenant: TenantOption,
    legal_name: Annotated[
        str | None, typer.Option(show_default="as it is", help="Who is billed.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(show_default="as it is", help="Lines, separated by '|'.")
    ] = None,
    email: Annotated[
        str | None, typer.Option(show_default="as it is", help="Whom to write to about it.")
    ] = None,
    tax_id: Annotated[str | None, typer.Option(show_default="as it is", help="Theirs.")] = None,
    tax_label: Annotated[
        str | None, typer.Option(show_default="as it is", help="Such as VAT.")
    ] = None,
    tax_percent: Annotated[
        str | None, typer.Option(show_default="as it is", help="Such as 19 or 7.7.")
    ] = None,
    tax_note: Annotated[
        str | None, typer.Option(show_default="as it is", help="Below the sum.")
    ] = None,
    payment_days: Annotated[
        int | None, typer.Option(min=0, show_default="as it is", help="Until it is due.")
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = Path(".loraplex"),
    control_url: ControlUrlOption = None,
) -> None:
    """Show whom a tenant's invoices are made out to, or change it, from the next draft on.

    Examples:

      loraplex invoices recipient --tenant acme

      loraplex invoices recipient --tenant acme --legal-name "Acme GmbH" --tax-percent 19
    """
    given = {
        "legal_name": legal_name,
        "address": None if address is None else address.replace("|", "\n"),
        "email": email,
        "tax_id": tax_id,
        "tax_label": tax_label,
        "tax_percent": tax_percent,
        "tax_note": tax_note,
        "payment_days": payment_days,
    }
    from loraplex_platform.admin_client import AdminApiError

    changes = {field: value for field, value in given.items() if value is not None}
    with open_admin(data_dir, control_url) as admin:
        path = f"/tenants/{admin.tenant(tenant)['id']}/billing-profile"
        now: dict[str, Any] = {}
        etag = None
        try:
            now, etag = admin.read(path)
        except AdminApiError as error:
            if error.status != 404 or not changes:
                raise
        if changes:
            kept = {field: now[field] for field in given if field in now}
            now = admin.change("PUT", path, kept | changes, etag)
    if as_json:
        print_json(now)
        return
    print_rows([(field.replace("_", " "), now[field]) for field in given])


def _book_id(admin: AdminClient, book: str) -> str:
    if book.startswith("prb_"):
        return book
    found = [item["id"] for item in admin.price_books() if item["name"] == book]
    if len(found) != 1:
        raise CommandError(
            f"there is no price book {book}"
            if not found
            else f"{len(found)} price books are called {book}; name one by its id: {', '.join(found)}"
        )
    return str(found[0])


def _invoice_id(admin: AdminClient, tenant_id: str, invoice: str) -> str:
    if invoice.startswith("inv_"):
        return invoice
    for item in admin.invoices(tenant_id):
        if item["number"] == invoice:
            return str(item["id"])
    raise CommandError(f"the tenant has no invoice {invoice}")


def _parse_time(flag: str, text: str) -> int:
    from datetime import datetime

    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise CommandError(f"{flag}: write ISO 8601 with a zone, such as 2027-01-01T00:00:00Z")
    return int(found.timestamp())


def _time(unix_s: int | None) -> str:
    from datetime import UTC, datetime

    return "" if unix_s is None else f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%SZ}"
