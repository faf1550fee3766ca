"""What a part measured, beside its target; the table and the JSON that show it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_VERDICTS = {True: "pass", False: "FAIL", None: ""}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    part: str
    name: str
    value: float
    unit: str
    target: float | None = None
    bound: Literal[">=", "<="] = ">="  # how the value must stand to the target
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None: there is none. Not a number meets nothing."""
        if self.target is None:
            return None
        return self.value >= self.target if self.bound == ">=" else self.value <= self.target


class Recorder:
    """Where a part puts its figures; each is on disk at once, so that a part that is killed keeps its own."""

    def __init__(self, part: str, path: Path) -> None:
        self._part = part
        self._path = path

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        """Add one figure; one of `at_least` and `at_most` may be given."""
        assert at_least is None or at_most is None
        figure = Figure(
            self._part,
            name,
            float(value),
            unit,
            at_least if at_most is None else at_most,
            ">=" if at_most is None else "<=",
            note,
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")


def read_figures(path: Path) -> list[Figure]:
    """What a `Recorder` wrote; nothing if it never came to it."""
    if not path.exists():
        return []
    return [Figure(**json.loads(line)) for line in path.read_text().splitlines()]


def format_table(figures: Sequence[Figure]) -> str:
    """One line a figure, in order."""
    rows = [("part", "figure", "value", "unit", "target", "", "note")]
    for figure in figures:
        target = "" if figure.target is None else f"{figure.bound} {_number(figure.target)}"
        rows.append(
            (
                figure.part,
                figure.name,
                _number(figure.value),
                figure.unit,
                target,
                _VERDICTS[figure.holds],
                figure.note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column == 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _number(value: float) -> str:
    if value == 0 or 0.01 <= abs(value) < 1e7:
        text = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        return text
    return f"{value:.2e}"
