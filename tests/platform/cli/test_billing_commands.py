"""`loraplex prices`, `credits` and `invoices` against a control API that runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.platform.cli.test_tenancy_commands import Terminal
from tests.platform.control.stand import Stand
from tests.platform.control.test_playground import serving
from tests.support.billing import add_usage, first_of, month_ago
from tests.support.metering import add_customer

pytestmark = pytest.mark.usefixtures("_quiet_server")


@pytest.fixture
async def terminal(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Terminal]:
    names = {"issuer_name": "Host Ltd.", "issuer_address": "1 Lane|Dublin"}
    async with (
        Stand.open(db_url, redis_url, short_tmp_path, **names) as stand,
        serving(stand.app) as url,
    ):
        yield Terminal(stand, url)


async def test_a_book_from_draft_to_published(terminal: Terminal) -> None:
    book = await terminal.done("prices", "draft", "next", "--from", "standard")
    assert book.startswith("prb_")
    await terminal.done("prices", "set", "next", "output", "0.08", "--for", "any_base")
    await terminal.done("prices", "set", "next", "request", "0.5", "--for", "any_base")
    await terminal.done("prices", "set", "next", "cached_input", "none", "--for", "any_base")
    shown = await terminal.done("prices", "show", "next")
    assert "0.080000" in shown
    cost = await terminal.done("prices", "quote", "next", "--prompt", "10", "--completion", "100")
    assert cost == "USD 0.500008200000"
    preview = ("--start", "2026-01-01T00:00Z", "--end", "2026-02-01T00:00Z", "--json")
    report = json.loads(await terminal.done("prices", "preview", "next", *preview))
    assert report["preview_usd"] == "0.000000000000"
    assert "zone" in await terminal.refused("prices", "publish", "next", "--at", "2027-01-01")
    assert "past" in await terminal.refused(
        "prices", "publish", "next", "--at", "2020-01-01T00:00Z"
    )

    assert "holds from" in await terminal.done("prices", "publish", "next")

    rows = {row["name"]: row for row in json.loads(await terminal.done("prices", "list", "--json"))}
    assert rows["next"]["is_in_force"]
    assert "* " in await terminal.done("prices", "list")
    assert "in force" in await terminal.refused("prices", "retire", "next")
    assert "no price book nothing" in await terminal.refused("prices", "show", "nothing")
    other = await terminal.done("prices", "draft", "other")
    assert other in await terminal.done("prices", "delete", "other")


async def test_credits_and_what_is_owed(terminal: Terminal, db_url: str) -> None:
    acme = await add_customer(terminal.stand.db, "acme")
    request = add_usage(db_url, acme, month_ago(1))
    options = ("-t", "acme", "-r", "an outage")

    credit = await terminal.done("credits", "add", "2.5", *options)
    await terminal.done("credits", "add", "1", "--debit", *options)
    await terminal.done("credits", "reverse", credit, *options)
    await terminal.done("credits", "reverse", f"req_{request.hex}", *options)

    found = json.loads(await terminal.done("credits", "list", "-t", "acme", "--json"))
    assert found["balance"]["balance_usd"] == "1.000000000000"
    assert [line["kind"] for line in found["adjustments"]] == [
        "reversal",
        "reversal",
        "debit",
        "credit",
    ]
    assert "owed: USD 1.000000000000" in await terminal.done("credits", "list", "-t", "acme")
    assert "reversed already" in await terminal.refused("credits", "reverse", credit, *options)


async def test_an_invoice_from_draft_to_file(
    terminal: Terminal, db_url: str, tmp_path: Path
) -> None:
    acme = await add_customer(terminal.stand.db, "acme")
    add_usage(db_url, acme, month_ago(1), completion=10**9)
    month = f"{first_of(month_ago(1)):%Y-%m}"
    of = ("-t", "acme")

    draft = await terminal.done("invoices", "draft", month, *of)
    assert await terminal.done("invoices", "finalize", draft, *of) == "INV-000001"

    shown = await terminal.done("invoices", "show", "INV-000001", *of)
    assert "40.000000000000" in shown
    assert "total 40.00" in shown
    for name in ("invoice.pdf", "invoice.html"):
        await terminal.done("invoices", "save", "INV-000001", *of, "--to", str(tmp_path / name))
    assert (tmp_path / "invoice.pdf").read_bytes().startswith(b"%PDF-")
    assert "INV-000001" in (tmp_path / "invoice.html").read_text()
    wrong = ("--to", str(tmp_path / "invoice.txt"))
    assert "neither" in await terminal.refused("invoices", "save", "INV-000001", *of, *wrong)
    note = await terminal.done("invoices", "void", "INV-000001", *of, "-r", "wrong address")
    assert note == "INV-000002"
    listed = json.loads(await terminal.done("invoices", "list", *of, "--json"))
    assert [item["status"] for item in listed] == ["final", "void"]
    again = await terminal.done("invoices", "draft", month, *of)
    assert again in await terminal.done("invoices", "list")
    assert again in await terminal.done("invoices", "delete", again, *of)
    assert "no invoice INV-9" in await terminal.refused("invoices", "show", "INV-9", *of)
