"""Runs of cases, and the table of what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.cases import Case
from tests.chaos.world import Verdict, World


async def run_case(world: World, case: Case) -> Verdict:
    """One run, with a tenant of its own."""
    await world.new_customer(case.limit)
    world.speak()
    return await world.judge(await case.run(world), case.may_be_billed)


@dataclass(slots=True)
class Row:
    """All runs of a case."""

    case: Case
    verdicts: list[Verdict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of what the case says itself

    @property
    def is_right(self) -> bool:
        """Every run was, and in time."""
        in_time = all(verdict.recovery_s <= self.case.recovers_s for verdict in self.verdicts)
        return in_time and not self.failures and all(v.is_right for v in self.verdicts)

    def cells(self) -> list[str]:
        """As `HEADER` names them."""
        verdicts = self.verdicts
        broken = {name for verdict in verdicts for name in verdict.broken_invariants}
        return [
            self.case.name,
            str(len(verdicts) + len(self.failures)),
            _sum(verdicts, "num_requests"),
            _sum(verdicts, "num_whole"),
            _sum(verdicts, "num_refused"),
            _sum(verdicts, "num_broken"),
            _sum(verdicts, "num_billed"),
            _sum(verdicts, "num_lost"),
            _sum(verdicts, "num_unearned"),
            "hold" if not broken else "; ".join(sorted(broken)),
            str(max((verdict.overspend for verdict in verdicts), default=0)),
            f"{max((verdict.recovery_s for verdict in verdicts), default=0):.1f} s",
            f"{max((verdict.slowest_s for verdict in verdicts), default=0):.1f} s",
            "right" if self.is_right else "; ".join(self.failures) or "WRONG",
        ]


HEADER = (
    "case",
    "runs",
    "requests",
    "whole",
    "refused",
    "broken off",
    "billed",
    "lost",
    "unearned",
    "invariants",
    "worst overspend",
    "recovered in",
    "slowest",
    "verdict",
)


def _sum(verdicts: Sequence[Verdict], name: str) -> str:
    return str(sum(getattr(verdict, name) for verdict in verdicts))


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
