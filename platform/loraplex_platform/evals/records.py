"""What the service, the worker and the routes hand each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Self
from uuid import UUID

from loraplex_platform.gateway.builds import ANY_BUILD, BuildRule

# Below every tenant's (-100 to 100): an eval takes what nobody else wants.
PRIORITY: Final = -1_000
MAX_CONCURRENCY: Final = 64


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is carried out; times in seconds."""

    concurrency: int = 4
    case_timeout_s: float = 60.0
    run_timeout_s: float = 1_800.0

    def to_json(self) -> dict[str, Any]:
        """As the run's row keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """From the run's row."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Target:
    """An immutable revision, with all that asking it needs. `builds`: which engine builds answer for it."""

    revision_id: UUID
    deployment_id: UUID
    number: int
    model: str
    base_model: str
    adapter_version_id: UUID | None
    adapter_digest: str | None
    params: dict[str, Any]
    builds: BuildRule = ANY_BUILD
