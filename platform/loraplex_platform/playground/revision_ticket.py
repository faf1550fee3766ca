"""What lets the playground say which revision answers: the control API's word, which a gateway can check.

Which revision answers is never a client's choice. The control API checks who asks and what for, and signs the
revision for one tenant and a minute; nobody else can, whatever keys they hold. Nothing is stored.
"""

from __future__ import annotations

import hmac
import time
from typing import Final
from uuid import UUID

from pydantic import SecretStr

from loraplex_platform.errors import PermissionDeniedError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id

HEADER: Final = "x-loraplex-revision-ticket"
LIFETIME_S: Final = 60
_PURPOSE: Final = "loraplex revision ticket 1"


def sign(
    pepper: SecretStr, tenant_id: UUID, revision_id: UUID, *, now_s: float | None = None
) -> str:
    """The header's value. `now_s`: Unix time, of a clock that the gateway's agrees with to a minute."""
    until = int(time.time() if now_s is None else now_s) + LIFETIME_S
    name = format_id("deployment_revision", revision_id)
    return f"{name}.{until}.{_mac(pepper, tenant_id, name, until)}"


def read(pepper: SecretStr, tenant_id: UUID, ticket: str, *, now_s: float | None = None) -> UUID:
    """The revision that it names.

    Raises:
        PermissionDeniedError: it was not signed for this tenant, or its time is over.
    """
    name, _, rest = ticket.partition(".")
    until, _, mac = rest.partition(".")
    now = time.time() if now_s is None else now_s
    if until.isascii() and until.isdecimal() and len(until) <= len(str(2**53)):
        expected = _mac(pepper, tenant_id, name, int(until))
        if hmac.compare_digest(mac.encode(), expected.encode()) and now <= int(until):
            try:
                return parse_id("deployment_revision", name)
            except MalformedIdError:
                pass  # signed by nobody of ours
    raise PermissionDeniedError(
        f"The header '{HEADER}' is only for the console's playground, and for a minute; leave it out."
    )


def _mac(pepper: SecretStr, tenant_id: UUID, name: str, until: int) -> str:
    said = f"{_PURPOSE}\n{tenant_id.hex}\n{name}\n{until}"
    return hmac.digest(pepper.get_secret_value().encode(), said.encode(), "sha256").hex()
