"""An invoice as PDF, byte for byte the same whenever it is rendered: nothing needs to be stored.

fpdf2 sets it (pure Python); HarfBuzz shapes scripts whose letters join or reorder, and Unicode's
bidirectional algorithm orders lines that mix directions.
"""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fpdf import FPDF
from fpdf.enums import MethodReturnValue, TableBordersLayout, VAlign, XPos, YPos
from fpdf.fonts import FontFace, TTFFont

from loraplex_platform.billing import fonts
from loraplex_platform.billing.document import Document, Section

_FAMILY = "noto"
_INK: Final = (26, 29, 33)
_QUIET: Final = (91, 101, 112)
_RED: Final = (179, 38, 30)
_RULE: Final = (223, 227, 232)
_MARGIN_MM = 18.0
_FOOTER_MM = 14.0
# Of the width between the margins: description, class, quantity, unit price, exact, amount.
_COLUMNS: Final = (48.0, 22.0, 23.0, 27.0, 34.0, 20.0)


def render_pdf(document: Document, created_at: datetime) -> bytes:
    """The pages, A4.

    Args:
        created_at: stated in the file; when the invoice was issued, not when it is rendered.
    """
    typeface = fonts.choose(document.texts())
    with tempfile.TemporaryDirectory(prefix="loraplex-fonts-") as folder:
        files = _write_fonts(document, typeface, Path(folder))
        # Twice, as the first page names the number of the last. A placeholder in the text would be
        # replaced in a customer's name as well.
        first = _set(document, created_at, typeface, files, num_pages=0)
        second = _set(document, created_at, typeface, files, num_pages=first.page)
        content = bytes(second.output())
        first.close_fonts()
        second.close_fonts()
        return content


def _write_fonts(document: Document, typeface: fonts.Typeface, folder: Path) -> dict[str, Path]:
    """The files that are set in: by style of the main face, by name of the others."""
    text = {c for part in document.texts() for c in part}
    contents = {
        "": fonts.cut_main(typeface.main, fonts.REGULAR, text),
        "B": fonts.cut_main(typeface.main, fonts.BOLD, text),
    } | {face.name: fonts.cut(face, fonts.REGULAR, text) for face in typeface.fallbacks}
    paths = {name: folder / f"{name or 'regular'}.ttf" for name in contents}
    for name, path in paths.items():
        path.write_bytes(contents[name])
    return paths


def _set(
    document: Document,
    created_at: datetime,
    typeface: fonts.Typeface,
    files: dict[str, Path],
    *,
    num_pages: int,
) -> _Pages:
    pages = _Pages(document, typeface, files, num_pages)
    pages.set_creation_date(created_at)
    pages.set_title(document.footer)
    pages.set_lang("en")
    pages.set_producer("Loraplex")
    pages.add_page()
    pages.draw_head()
    for section in document.sections:
        pages.draw_section(section)
    pages.draw_totals()
    pages.draw_notes()
    return pages


class _Pages(FPDF):
    def __init__(
        self,
        document: Document,
        typeface: fonts.Typeface,
        files: dict[str, Path],
        num_pages: int,
    ) -> None:
        super().__init__(format="A4", unit="mm")
        self._document = document
        self._typeface = typeface
        self._num_pages = num_pages
        self.alias_nb_pages("")  # no placeholder
        self.set_margins(_MARGIN_MM, _MARGIN_MM, _MARGIN_MM)
        self.set_auto_page_break(auto=True, margin=_MARGIN_MM + _FOOTER_MM)
        for style in ("", "B"):
            self.add_font(_FAMILY, style, files[style])
        for face in typeface.fallbacks:
            self.add_font(face.name, "", files[face.name])
        self.set_fallback_fonts([face.name for face in typeface.fallbacks], exact_match=False)
        self.set_text_shaping(use_shaping_engine=True)
        self._use(9)

    def _render_styled_text_line(self, *args: Any, **options: Any) -> bool:  # noqa: ANN401 # fpdf's own
        # fpdf 2.8 sets the font within a line's own context where the line begins in a fallback font,
        # and takes it for set after that: the lines below would be drawn in another font's glyphs.
        if (
            not self.current_font_is_set_on_page
            and not options.get("prevent_font_change", False)
            and self.current_font is not None
        ):
            self._out(self._set_font_for_page(self.current_font, self.font_size_pt))
        return super()._render_styled_text_line(*args, **options)

    def close_fonts(self) -> None:
        """fpdf leaves its font files open."""
        for font in self.fonts.values():
            if isinstance(font, TTFFont):
                font.ttfont.close()

    def _use(self, size_pt: float, style: str = "", colour: tuple[int, int, int] = _INK) -> None:
        self.set_font(_FAMILY, style, size_pt)
        self.set_text_color(*colour)

    def _say(self, text: str, width_mm: float, height_mm: float, align: str = "L") -> None:
        self.multi_cell(
            width_mm,
            height_mm,
            self._typeface.show(text),
            align=align,
            new_x=XPos.LEFT,
            new_y=YPos.NEXT,
        )

    def footer(self) -> None:
        """On every page, as fpdf calls it."""
        self.set_y(-_FOOTER_MM)
        self._use(7.5, colour=_QUIET)
        text = self._typeface.show(self._document.footer)
        self.cell(self.epw - 30, 4, self._shortened(text, self.epw - 32))
        self.cell(30, 4, f"Page {self.page} of {self._num_pages}", align="R")

    def _shortened(self, text: str, width_mm: float) -> str:
        while self.get_string_width(text) > width_mm:
            text = text[:-2] + "."
        return text

    def draw_head(self) -> None:
        """Title, parties, numbers and dates."""
        document = self._document
        self._use(20, "B")
        self.cell(self.epw / 2, 10, document.title)
        if document.stamp is not None:
            self._use(14, "B", _RED)
            self.cell(self.epw / 2, 10, document.stamp, align="R")
        self.ln(14)
        top, half = self.get_y(), self.epw / 2
        bottoms = []
        for index, (label, lines) in enumerate(
            (("From", document.issuer), ("To", document.customer))
        ):
            self.set_xy(_MARGIN_MM + index * half, top)
            self._use(8, "B", _QUIET)
            self._say(label, half - 6, 5)
            for number, line in enumerate(lines):
                self._use(9.5, "B" if number == 0 else "")
                self._say(line, half - 6, 4.8)
            bottoms.append(self.get_y())
        self.set_xy(_MARGIN_MM, max(bottoms) + 6)
        for label, value in document.facts:
            self._use(9, colour=_QUIET)
            self.cell(46, 5, label)
            self._use(9)
            self._say(value, self.epw - 46, 5)
            self.set_x(_MARGIN_MM)
        self.ln(4)

    def draw_section(self, section: Section) -> None:
        """Heading, table, sum. The table's head is repeated on every page."""
        if self.will_page_break(30):
            self.add_page()
        self._use(10, "B")
        self._say(section.heading, self.epw, 6)
        self.ln(1)
        currency = self._document.currency
        self.set_draw_color(*_RULE)
        self._use(7.5)
        with self.table(
            col_widths=_COLUMNS,
            text_align=("L", "L", "R", "R", "R", "R"),
            v_align=VAlign.T,
            borders_layout=TableBordersLayout.HORIZONTAL_LINES,
            line_height=4.2,
            padding=(1.2, 1),
            headings_style=FontFace(emphasis="B", color=_QUIET, size_pt=7.5),
        ) as table:
            table.row(
                (
                    "Description",
                    "Class",
                    "Quantity",
                    f"Unit price, {currency}",
                    f"Exact, {currency}",
                    "Amount",
                )
            )
            for line in section.lines:
                cells = (
                    line.description,
                    line.unit,
                    line.quantity,
                    line.unit_price,
                    line.exact,
                    line.amount,
                )
                table.row([self._typeface.show(cell) for cell in cells])
            total = table.row(style=FontFace(emphasis="B"))
            total.cell("Sum", colspan=5)
            total.cell(section.subtotal)
        self.ln(5)

    def draw_totals(self) -> None:
        """Sums on the right, what is due below them."""
        rows = self._document.totals
        if self.will_page_break(5.5 * len(rows) + 12):
            self.add_page()
        left, label_mm, amount_mm = self.w - _MARGIN_MM - 88, 52, 36
        for label, amount in rows:
            is_total = label == "Total"
            self._use(9, "B" if is_total else "")
            self._pair(left, label, amount, label_mm, amount_mm, 5.5)
        self.set_draw_color(*_INK)
        self.line(left, self.get_y() + 0.5, self.w - _MARGIN_MM, self.get_y() + 0.5)
        self.ln(1.5)
        self._use(11, "B")
        self._pair(left, *self._document.due, label_mm, amount_mm, 7)
        self.ln(5)

    def _pair(
        self,
        left_mm: float,
        label: str,
        amount: str,
        label_mm: float,
        amount_mm: float,
        height_mm: float,
    ) -> None:
        top = self.get_y()
        self.set_x(left_mm)
        self._say(label, label_mm, height_mm)
        bottom = self.get_y()
        self.set_xy(left_mm + label_mm, top)
        self._say(amount, amount_mm, height_mm, "R")
        self.set_xy(_MARGIN_MM, bottom)

    def draw_notes(self) -> None:
        """What a reader may want to know, small."""
        self._use(8, colour=_QUIET)
        for note in self._document.notes:
            height = self.multi_cell(
                self.epw,
                4.2,
                self._typeface.show(note),
                dry_run=True,
                output=MethodReturnValue.HEIGHT,
            )
            if self.will_page_break(float(height)):  # type: ignore[arg-type]  # what was asked for
                self.add_page()
                self._use(8, colour=_QUIET)
            self._say(note, self.epw, 4.2)
            self.ln(1)
