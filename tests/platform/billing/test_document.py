"""Invoices on paper: what a finance person reads, in any script, whatever a customer is called."""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pypdfium2
import pytest
from loraplex_platform.billing.document import Document, compose
from loraplex_platform.billing.fonts import choose, faces
from loraplex_platform.billing.invoice_html import render_html
from loraplex_platform.billing.invoice_pdf import render_pdf
from loraplex_platform.db import Invoice, InvoiceLine
from loraplex_platform.ids import format_id, uuid7

from tests.platform.control.stand import Stand, error_of
from tests.support.billing import ISSUER, add_usage, first_of, month_ago
from tests.support.metering import add_customer

if TYPE_CHECKING:
    from pathlib import Path

ISSUED = datetime(2026, 4, 2, 8, 30, tzinfo=UTC)
HOSTILE = '<script>alert(1)</script>{nb}"&\u202egnp.exe {{7*7}} <img src=x onerror=alert(1)>'
SCRIPTS = {
    "Arabic": "شركة المثال المحدودة",
    "Hebrew": "חברה לדוגמה",
    "Japanese": "株式会社サンプル",
    "Korean": "예시 주식회사",
    "Chinese": "示例科技有限公司",
    "Devanagari": "उदाहरण प्राइवेट लिमिटेड",
    "Thai": "บริษัทตัวอย่าง",
    "Greek": "Παράδειγμα ΑΕ",
    "Cyrillic": "ООО «Пример»",
    "Vietnamese": "Công ty Ví dụ",
}


def line(number: int = 1, **changes: Any) -> InvoiceLine:
    values: dict[str, Any] = {
        "line_no": number,
        "section": "usage",
        "description": "support-bot, support v3 (prices: standard)",
        "price_class": "output",
        "quantity": 1_234_567,
        "unit_price_pico": 40_000,
        "amount_pico": 1_234_567 * 40_000,
        "amount_cents": 5,
    }
    return InvoiceLine(**values | changes)


def invoice(**changes: Any) -> Invoice:
    values: dict[str, Any] = {
        "id": uuid7(),
        "kind": "invoice",
        "status": "final",
        "number": "INV-000042",
        "period_start": datetime(2026, 2, 28, 23, tzinfo=UTC),
        "period_end": datetime(2026, 3, 31, 22, tzinfo=UTC),
        "billing_tz": "Europe/Berlin",
        "currency": "USD",
        "issuer": {
            "name": ISSUER.issuer_name,
            "address": ISSUER.issuer_address,
            "email": ISSUER.issuer_email,
            "tax_id": ISSUER.issuer_tax_id,
            "payment": ISSUER.issuer_payment,
        },
        "customer": {
            "tenant": "acme",
            "name": "Acme GmbH",
            "address": "Hauptstraße 1\n10115 Berlin",
            "email": None,
            "tax_id": "DE123456789",
            "tax_label": "VAT",
            "tax_ppm": 190_000,
            "tax_note": None,
        },
        "exact_pico": 1_234_567 * 40_000,
        "subtotal_cents": 123_456_78,
        "adjustments_cents": -500,
        "tax_cents": 19,
        "total_cents": 123_451_97,
        "brought_forward_cents": 0,
        "carried_forward_cents": 0,
        "due_cents": 123_451_97,
        "issued_at": ISSUED,
        "due_on": date(2026, 5, 2),
    }
    return Invoice(**values | changes)


def document(*lines: InvoiceLine, **changes: Any) -> Document:
    return compose(invoice(**changes), lines or (line(),))


def named(name: str) -> Document:
    customer = invoice().customer
    return document(customer=customer | {"name": name, "address": f"{name}\n{customer['address']}"})


def pages_of(pdf: bytes) -> list[str]:
    reader = pypdfium2.PdfDocument(pdf)
    try:
        return [page.get_textpage().get_text_bounded() for page in reader]
    finally:
        reader.close()


def text_of(document: Document) -> str:
    return "\n".join(pages_of(render_pdf(document, ISSUED)))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_html(document: Document) -> _Reader:
    reader = _Reader()
    reader.feed(render_html(document))
    return reader


def test_all_that_an_invoice_must_say_is_in_both() -> None:
    found = document(
        line(),
        line(2, section="adjustment", price_class=None, quantity=1, description="Credit: outage",
             amount_pico=-5 * 10**12, unit_price_pico=-5 * 10**12, amount_cents=-500),
    )  # fmt: skip
    html = " ".join(" ".join(read_html(found).text).split())
    pdf = " ".join(text_of(found).split())

    for text in (html, pdf):
        for wanted in (
            "Invoice", "INV-000042", "2 April 2026", "2 May 2026",
            "1 March 2026 to 31 March 2026", "Europe/Berlin",
            "Loraplex Hosting Ltd.", "1 Server Lane", "Dublin", "IE1234567X",
            "Acme GmbH", "Hauptstraße 1", "10115 Berlin", "DE123456789", "acme",
            "Output tokens", "1,234,567", "0.04 per 1M tokens", "0.049382680000", "0.05",
            "Credit: outage", "-5.000000000000", "-5.00",
            "Subtotal", "123,456.78", "VAT (19 %)", "0.19", "Total", "123,451.97",
            "Amount due", "USD 123,451.97", "half to even", "IBAN IE00",
        ):  # fmt: skip
            assert wanted in text, wanted
    assert "Page 1 of 1" in pdf


def test_hostile_names_are_text_in_html() -> None:
    found = document(
        line(description=HOSTILE),
        customer=dict.fromkeys(invoice().customer, HOSTILE) | {"tax_ppm": 0},
        issuer=dict.fromkeys(invoice().issuer, HOSTILE),
    )

    reader = read_html(found)

    assert not {"script", "img", "iframe", "a", "svg"} & reader.tags
    assert not {name for name in reader.attributes if name.startswith("on")}
    assert any("<script>alert(1)</script>" in text for text in reader.text)
    assert "\u202e" not in "".join(reader.text)


def test_hostile_names_are_text_in_pdf() -> None:
    text = text_of(named(HOSTILE))

    assert "{nb}" in text  # a placeholder of page numbers elsewhere
    assert "{{7*7}}" in text
    assert "alert(1)" in text
    assert "exe.png" not in text
    assert "Page 1 of 1" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_glyphs(script: str) -> None:
    name = SCRIPTS[script]
    found = named(name)
    typeface = choose(found.texts())

    assert typeface.show(name) == name  # no character is missing
    text = text_of(found)
    assert "\ufffd" not in text
    # What stands below is in its own font again.
    for below in ("Hauptstraße 1", "10115 Berlin", "Tax ID: DE123456789", "Europe/Berlin", "0.05"):
        assert below in text
    if script in ("Arabic", "Hebrew"):
        # Set from right to left; whichever order the reader gives, the letters are all there.
        letters = {c for c in name if c.isalpha()}
        assert letters <= {*_normal(text)}
    elif script not in ("Devanagari", "Thai"):  # whose shaped forms a reader takes apart
        assert name in text


def _normal(text: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFKC", text)


def test_what_no_font_has_is_marked_and_not_fatal() -> None:
    found = named("Acme \U000e0041 𒀀")

    assert choose(found.texts()).show("A𒀀") == "A\ufffd"
    assert "Acme" in text_of(found)
    assert faces()[0].name == "NotoSans"


def test_long_names_stay_on_the_page() -> None:
    pdf = render_pdf(
        document(line(description="x" * 400), line(2, description="word " * 80),
                 customer=invoice().customer | {"name": "W" * 200, "address": "Ä" * 1000}),
        ISSUED,
    )  # fmt: skip
    reader = pypdfium2.PdfDocument(pdf)
    try:
        for page in reader:
            width, _ = page.get_size()
            text_page = page.get_textpage()
            for index in range(text_page.count_rects()):
                left, _bottom, right, _top = text_page.get_rect(index)
                assert left >= 30
                assert right <= width - 30
    finally:
        reader.close()


def test_many_lines_make_many_numbered_pages_with_a_head_on_each() -> None:
    pages = pages_of(render_pdf(document(*(line(number) for number in range(1, 150))), ISSUED))

    assert len(pages) > 3
    for number, page in enumerate(pages, start=1):
        assert f"Page {number} of {len(pages)}" in page
    for page in pages[:-1]:
        assert "Quantity" in page


def test_the_same_invoice_is_the_same_bytes_whenever_it_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = named(" ".join(SCRIPTS.values()))
    now_s = time.time()
    first = render_pdf(found, ISSUED)
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400 * 400)

    assert render_pdf(found, ISSUED) == first
    assert first.startswith(b"%PDF-")
    assert b"20260402" in first


@pytest.mark.parametrize(
    ("status", "kind", "stamp", "title"),
    [
        ("draft", "invoice", "DRAFT", "Invoice"),
        ("void", "invoice", "VOID", "Invoice"),
        ("final", "credit_note", None, "Credit note"),
    ],
)
def test_what_an_invoice_is_cannot_be_overlooked(
    status: str, kind: str, stamp: str | None, title: str
) -> None:
    number = None if status == "draft" else "INV-000042"
    changes = {"issued_at": None, "due_on": None} if status == "draft" else {}
    found = compose(
        invoice(status=status, kind=kind, number=number, void_reason="oops", **changes),
        [line()],
        related_number="INV-000041",
    )

    for text in (" ".join(read_html(found).text), text_of(found)):
        assert title in text
        assert "INV-000041" in text
        assert stamp is None or stamp in text
        if kind == "credit_note":
            assert "Cancels invoice" in text


async def test_over_http_from_draft_to_paper(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    issuer = {name: getattr(ISSUER, name) for name in type(ISSUER).model_fields}
    settings = {name: value for name, value in issuer.items() if name.startswith("issuer_")}
    async with Stand.open(db_url, redis_url, short_tmp_path, **settings) as stand:
        acme = await add_customer(stand.db)
        add_usage(db_url, acme, month_ago(1), completion=10**9)
        tenant = f"/admin/v1/tenants/{format_id('tenant', acme.tenant_id)}"
        missing = await stand.admin.get(f"{tenant}/billing-profile")
        error_of(missing, 404, "not_found")
        profile = {
            "legal_name": SCRIPTS["Japanese"],
            "address": "東京都\n千代田区",
            "tax_label": "消費税",
            "tax_percent": "10.0",
        }
        put = await stand.admin.put(f"{tenant}/billing-profile", json=profile)
        assert put.status_code == 200, put.text
        assert put.json()["tax_percent"] == "10"
        stale = await stand.admin.put(
            f"{tenant}/billing-profile", json=profile, headers={"if-match": '"7"'}
        )
        error_of(stale, 409, "version_conflict")
        for bad, param in (
            ({"tax_percent": "101"}, "tax_percent"),
            ({"address": "\x00"}, "address"),
        ):
            refused = await stand.admin.put(f"{tenant}/billing-profile", json=profile | bad)
            assert error_of(refused, 400, "invalid_request")["param"] == param

        month = f"{first_of(month_ago(1)):%Y-%m}"
        drafted = await stand.admin.post(f"{tenant}/invoices", json={"month": month})
        assert drafted.status_code == 201, drafted.text
        url = f"{tenant}/invoices/{drafted.json()['id']}"
        draft_pdf = await stand.admin.get(f"{url}/document.pdf")
        assert "DRAFT" in "".join(pages_of(draft_pdf.content))
        final = await stand.admin.post(f"{url}/finalize")

        assert final.status_code == 200, final.text
        body = final.json()
        assert (body["number"], body["total_usd"], body["tax_usd"]) == (
            "INV-000001",
            "44.00",
            "4.00",
        )
        assert body["exact_usd"] == "40.000000200000"
        assert {row["exact_usd"] for row in body["lines"]} == {"40.000000000000", "0.000000200000"}
        assert body["customer"]["name"] == SCRIPTS["Japanese"]
        pdf = await stand.admin.get(f"{url}/document.pdf")
        assert pdf.headers["content-type"] == "application/pdf"
        assert 'filename="INV-000001.pdf"' in pdf.headers["content-disposition"]
        assert SCRIPTS["Japanese"] in "".join(pages_of(pdf.content))
        assert (await stand.admin.get(f"{url}/document.pdf")).content == pdf.content
        html = await stand.admin.get(f"{url}/document.html")
        assert html.headers["content-type"] == "text/html; charset=utf-8"
        assert "script" not in html.headers["content-security-policy"]
        assert "INV-000001" in html.text
        voided = await stand.admin.post(f"{url}/void", json={"reason": "Wrong address"})
        assert voided.json()["kind"] == "credit_note"
        listed = (await stand.admin.get("/admin/v1/invoices")).json()["data"]
        assert [item["number"] for item in listed] == ["INV-000002", "INV-000001"]
        assert re.fullmatch(r"-44\.00", listed[0]["total_usd"])
        error_of(await stand.admin.get(f"{tenant}/invoices/inv_1"), 404, "not_found")
        globex = await add_customer(stand.db, "globex")
        theirs = f"/admin/v1/tenants/{format_id('tenant', globex.tenant_id)}/invoices"
        for path in ("", "/document.pdf", "/document.html"):
            error_of(await stand.admin.get(f"{theirs}/{body['id']}{path}"), 404, "not_found")
