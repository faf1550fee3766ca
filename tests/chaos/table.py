"""Runs of cases, and the table of what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.cases import Case
from tests.chaos.world import Verdict, World


async def run_case(world: World, case: Case) -> Verdict:
    """One run, with a tenant of its own."""
    await world.new_customer(case.limit)
    world.speak()
    return await world.judge(
        await case.run(world), case.may_be_billed, may_be_given_away=case.may_be_given_away
    )


@dataclass(slots=True)
class Row:
    """All runs of a case."""

    case: Case
    verdicts: list[Verdict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of what the case says itself

    @property
    def flaws(self) -> list[str]:
        """What was wrong in any run, in words."""
        found = [flaw for verdict in self.verdicts for flaw in verdict.flaws]
        found += [
            f"recovered after {verdict.recovery_s:.1f} s, not {self.case.recovers_s:g}"
            for verdict in self.verdicts
            if verdict.recovery_s > self.case.recovers_s
        ]
        return self.failures + found

    def cells(self) -> list[str]:
        """As `HEADER` names them."""
        overspend = max((verdict.overspend for verdict in self.verdicts), default=0)
        recovery_s = max((verdict.recovery_s for verdict in self.verdicts), default=0.0)
        return [
            self.case.name,
            str(len(self.verdicts) + len(self.failures)),
            "; ".join(sorted(set(self.flaws))) or "hold",
            str(overspend),
            f"{recovery_s:.1f} s",
        ]

    def details(self) -> dict[str, Any]:
        """All that was counted, for a file."""
        return {
            "case": self.case.name,
            "flaws": self.flaws,
            "runs": [asdict(verdict) for verdict in self.verdicts],
        }


# Overspend in tokens beyond the hard limit; recovery from the last client's end until nothing is held.
HEADER = ("case", "runs", "invariants", "worst overspend", "time to recover")


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
