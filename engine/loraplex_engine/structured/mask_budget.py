"""What grammars may take of each step, for which all other rows wait.

A step serves grammars until they have taken `STEP_S` in all or, of one tenant, `TENANT_S`; what goes
beyond, for a mask is not cut short, is a debt that later steps work off. So a step's mean is bounded by
the same figures, and its worst by one mask more. A row that finds its tenant in debt is left out of the
step and samples in a later one.

Nobody starves: a debt shrinks with each step, whoever is served, and who has the least of it is served
first; among equals, who was left out most often.

Seconds are of the step thread's CPU. They are not charged to the tenant's account with the fair policy,
whose promises are about tokens: `policies.fair.max_charge` says why.
"""

from __future__ import annotations

TENANT_S = 0.025  # some sixty masks of an honest schema and 49,152 ids
STEP_S = 0.05


class MaskBudget:
    """All calls come from the step thread."""

    def __init__(self) -> None:
        self._debt_s = 0.0  # of all
        self._debts_s: dict[str, float] = {}  # by tenant; none: 0

    def begin_step(self) -> None:
        """Work debts off."""
        self._debt_s = max(0.0, self._debt_s - STEP_S)
        self._debts_s = {
            tenant_id: debt_s - TENANT_S
            for tenant_id, debt_s in self._debts_s.items()
            if debt_s > TENANT_S
        }

    def forgive(self) -> None:
        """There was nobody else to wait for it."""
        self._debt_s = 0.0
        self._debts_s.clear()

    def debt_s(self, tenant_id: str) -> float:
        """What a tenant has taken and not worked off."""
        return self._debts_s.get(tenant_id, 0.0)

    def is_open(self, tenant_id: str) -> bool:
        """Whether a tenant may take more in this step."""
        return self._debt_s < STEP_S and self.debt_s(tenant_id) < TENANT_S

    def take(self, tenant_id: str, seconds: float) -> None:
        """A tenant's grammar has taken so long."""
        self._debt_s += seconds
        self._debts_s[tenant_id] = self.debt_s(tenant_id) + seconds
