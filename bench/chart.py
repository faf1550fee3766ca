"""The bench's result as an SVG for the README: one group of bars per workload, readable on light and dark.

Own writer: no plotting library, no fonts to embed. Text and lines follow the viewer's colour scheme through a
media query, which browsers and GitHub honour in an `<img>`; without one the light colours stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 820
_LABEL_WIDTH = 250
_VALUE_WIDTH = 200
_BAR = 16
_GAP = 6
_GROUP_HEAD = 46
_GROUP_FOOT = 14
_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 15px }
  .note { fill: #59636e; font-size: 12px }
  .ours { fill: #1a7f5a } .peer { fill: #8c959f } .none { fill: #59636e; font-style: italic }
  .axis { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .note, .none { fill: #9198a1 }
    .ours { fill: #3fb984 } .peer { fill: #6e7681 } .axis { stroke: #3d444d }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One contender in one workload."""

    label: str
    value: float | None  # None: there is no figure, `note` says why
    note: str = ""  # beside the value
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """One workload."""

    title: str
    note: str
    unit: str
    bars: Sequence[Bar]


def draw(groups: Sequence[Group], title: str) -> str:
    """The whole picture as SVG text."""
    parts: list[str] = []
    y = 34
    for group in groups:
        parts += _group(group, y)
        y += _GROUP_HEAD + len(group.bars) * (_BAR + _GAP) + _GROUP_FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
        f'viewBox="0 0 {_WIDTH} {y}" role="img" aria-label="{escape(title)}">'
    )
    top = f'<text x="0" y="18" class="title">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", top]) + (
        "\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _group(group: Group, top: int) -> list[str]:
    parts = [
        f'<text x="0" y="{top + 16}" class="title">{escape(group.title)}</text>',
        f'<text x="0" y="{top + 34}" class="note">{escape(group.note)}</text>',
    ]
    largest = max((bar.value for bar in group.bars if bar.value is not None), default=0.0)
    room = _WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    y = top + _GROUP_HEAD
    bottom = y + len(group.bars) * (_BAR + _GAP)
    parts.append(
        f'<line x1="{_LABEL_WIDTH}" x2="{_LABEL_WIDTH}" y1="{y - 2}" y2="{bottom}" class="axis"/>'
    )
    for bar in group.bars:
        middle = y + _BAR - 4
        weight = ' font-weight="600"' if bar.is_ours else ""
        parts.append(
            f'<text x="{_LABEL_WIDTH - 8}" y="{middle}" text-anchor="end"{weight}>'
            f"{escape(bar.label)}</text>"
        )
        if bar.value is None:
            parts.append(
                f'<text x="{_LABEL_WIDTH + 8}" y="{middle}" class="none">{escape(bar.note)}</text>'
            )
        else:
            width = max(1.0, room * bar.value / largest) if largest > 0 else 1.0
            kind = "ours" if bar.is_ours else "peer"
            parts.append(
                f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" '
                f'class="{kind}"/>'
            )
            digits = 0 if bar.value >= 100 else 1 if bar.value >= 1 else 2
            text = f"{bar.value:,.{digits}f} {group.unit}"
            parts.append(
                f'<text x="{_LABEL_WIDTH + width + 8:.1f}" y="{middle}"{weight}>{escape(text)}'
                f'<tspan class="note" dx="6">{escape(bar.note)}</tspan></text>'
            )
        y += _BAR + _GAP
    return parts
