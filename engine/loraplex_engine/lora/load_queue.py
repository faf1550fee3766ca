"""Which adapter is loaded next: the tenants that ask take turns, each with its own first come first.

A tenant that asks for 200 adapters has 200 in its own line; another's one waits for one load, not for 200.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

# What a tenant may have in line; who still wants more asks again.
MAX_QUEUED: Final = 1024


class LoadQueue:
    """Digests in line. One that several tenants ask for stands in each of their lines, and leaves all."""

    def __init__(self) -> None:
        # By tenant, whose turn it is first.
        self._lines: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return any(digest in line for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[str]:
        """Every digest once, in no useful order."""
        return iter({digest for line in self._lines.values() for digest in line})

    def push(self, tenant_id: str, digest: str) -> None:
        """Put it at the end of the tenant's line, unless it is there or the line is full."""
        line = self._lines.setdefault(tenant_id, OrderedDict())
        if len(line) < MAX_QUEUED:
            line.setdefault(digest)

    def pop(self, is_possible: Callable[[str, str], bool]) -> str | None:
        """The first in the line of the first tenant whose first is possible now; None: nobody's is.

        Args:
            is_possible: of (tenant, digest). That tenant's turn comes again after all others'.
        """
        for tenant_id, line in self._lines.items():
            digest = next(iter(line))
            if is_possible(tenant_id, digest):
                self._lines.move_to_end(tenant_id)
                self.discard(digest)
                return digest
        return None

    def discard(self, digest: str) -> None:
        """Take it out of all lines."""
        for tenant_id in [tenant for tenant, line in self._lines.items() if digest in line]:
            line = self._lines[tenant_id]
            del line[digest]
            if not line:
                del self._lines[tenant_id]
