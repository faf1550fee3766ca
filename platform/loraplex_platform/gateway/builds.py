"""Which engine builds may run a request. A build is what exactly computes: a replica's fingerprint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildRule:
    """Of one revision.

    Attributes:
        only: no other fingerprint; None: any build of the base.
        never: that of a rollout which is under way: it answers those whom the rollout gives it.
        rather_not: of rollouts that were given up: only while nothing else is ready.
    """

    only: str | None = None
    never: str | None = None
    rather_not: tuple[str, ...] = ()

    def allows(self, fingerprint: str) -> bool:
        """Whether that build may run it."""
        return fingerprint != self.never and self.only in (None, fingerprint)

    def unavailable(self, base_model: str) -> str:
        """Why nothing is there that may run it, in words."""
        which = f"No engine for {base_model}"
        if self.only is not None:
            which = f"No engine of the build {self.only} for {base_model}"
        elif self.never is not None:
            which += f" but of the build {self.never}, which is being rolled out,"
        return f"{which} is ready; try again in a few seconds."


ANY_BUILD = BuildRule()
