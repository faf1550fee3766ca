"""An invoice as one HTML page that needs no script and nothing from outside, and prints well."""

from __future__ import annotations

from html import escape

from loraplex_platform.billing.document import Document, Section

_STYLE = """
:root { color-scheme: light; }
body { font: 10.5pt/1.45 system-ui, "Noto Sans", sans-serif; color: #1a1d21; background: #fff;
  margin: 2.5rem auto; max-width: 56rem; padding: 0 1.5rem; }
header, .parties { display: flex; justify-content: space-between; gap: 2rem; flex-wrap: wrap; }
h1 { font-size: 22pt; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 10.5pt; margin: 1.8rem 0 .4rem; }
h3 { font-size: 8.5pt; font-weight: 600; color: #5b6570; margin: 1.6rem 0 .2rem;
  text-transform: uppercase; letter-spacing: .05em; }
.stamp { border: 2px solid #b3261e; color: #b3261e; border-radius: 4px; padding: .1rem .7rem;
  font-weight: 700; align-self: center; }
.parties > div { flex: 1 1 16rem; }
.parties p, .facts td, .lines td:first-child { overflow-wrap: anywhere; }
.parties p { margin: 0; }
table { border-collapse: collapse; width: 100%; }
.facts { width: auto; margin-top: 1.2rem; }
.facts th { text-align: left; font-weight: 400; color: #5b6570; padding: .1rem 1.4rem .1rem 0;
  white-space: nowrap; vertical-align: top; }
.lines th { font-size: 8.5pt; color: #5b6570; border-bottom: 1px solid #1a1d21; text-align: left;
  padding: .3rem .4rem; }
.lines td { border-bottom: 1px solid #dfe3e8; padding: .35rem .4rem; vertical-align: top; }
.lines .n, .totals td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.lines tr { break-inside: avoid; }
.sum td { font-weight: 600; border-bottom: none; }
.totals { width: auto; margin: 1.6rem 0 0 auto; min-width: 20rem; }
.totals th { text-align: left; font-weight: 400; padding: .15rem 2rem .15rem 0; }
.due th, .due td { font-weight: 700; font-size: 12.5pt; border-top: 1.5px solid #1a1d21;
  padding-top: .4rem; }
.notes { margin-top: 2rem; color: #5b6570; font-size: 9pt; overflow-wrap: anywhere; }
.notes p { margin: .2rem 0; }
@page { size: A4; margin: 18mm; }
@media print { body { margin: 0; max-width: none; padding: 0; } thead { display: table-header-group; } }
"""


def render_html(document: Document) -> str:
    """The page, whole. Every text of somebody's is escaped and isolated in its direction."""
    stamp = "" if document.stamp is None else f'<div class="stamp">{escape(document.stamp)}</div>'
    facts = "".join(
        f"<tr><th>{escape(label)}</th><td>{_text(value)}</td></tr>"
        for label, value in document.facts
    )
    totals = "".join(
        f"<tr><th>{_text(label)}</th><td>{escape(value)}</td></tr>"
        for label, value in document.totals
    )
    label, amount = document.due
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(document.footer)}</title>'
        f"<style>{_STYLE}</style></head><body>"
        f"<header><h1>{escape(document.title)}</h1>{stamp}</header>"
        f'<div class="parties"><div><h3>From</h3>{_paragraphs(document.issuer)}</div>'
        f"<div><h3>To</h3>{_paragraphs(document.customer)}</div></div>"
        f'<table class="facts">{facts}</table>'
        f"{''.join(_section(section, document.currency) for section in document.sections)}"
        f'<table class="totals">{totals}'
        f'<tr class="due"><th>{escape(label)}</th><td>{escape(amount)}</td></tr></table>'
        f'<div class="notes">{_paragraphs(document.notes)}</div></body></html>'
    )


def _section(section: Section, currency: str) -> str:
    rows = "".join(
        f"<tr><td>{_text(line.description)}</td><td>{escape(line.unit)}</td>"
        f'<td class="n">{escape(line.quantity)}</td><td class="n">{escape(line.unit_price)}</td>'
        f'<td class="n">{escape(line.exact)}</td><td class="n">{escape(line.amount)}</td></tr>'
        for line in section.lines
    )
    return (
        f'<h2>{escape(section.heading)}</h2><table class="lines"><thead><tr><th>Description</th>'
        f'<th>Class</th><th class="n">Quantity</th><th class="n">Unit price, {escape(currency)}</th>'
        f'<th class="n">Exact, {escape(currency)}</th><th class="n">Amount, {escape(currency)}</th>'
        f"</tr></thead><tbody>{rows}"
        f'<tr class="sum"><td colspan="5">Sum</td><td class="n">{escape(section.subtotal)}</td></tr>'
        "</tbody></table>"
    )


def _paragraphs(lines: list[str]) -> str:
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _text(text: str) -> str:
    return f'<bdi dir="auto">{escape(text)}</bdi>'
