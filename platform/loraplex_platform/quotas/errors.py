"""What a quota refuses with: which limit, its value, its use, and when it begins anew.

A limit that counts everybody's requests is named without its numbers: they are other tenants' business.
"""

from __future__ import annotations

import time
from typing import ClassVar
from uuid import UUID

from loraplex_platform.errors import InvalidRequestError, PlatformError
from loraplex_platform.quotas.records import Blocking
from loraplex_platform.quotas.words import amount, limit_name, moment, scope_name

# What official clients wait for; a longer wait is nobody's retry.
MAX_RETRY_AFTER_S = 60.0


class LimitError(PlatformError):
    """A limit refused the request. `limit_id`: which, for the log of refusals."""

    def __init__(
        self, message: str, *, limit_id: UUID | None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit_id = limit_id


class QuotaExceededError(LimitError):
    """A hard quota pays not even the least of the request. Until it begins anew retrying is in vain."""

    status: ClassVar[int] = 429
    type: ClassVar[str] = "insufficient_quota"
    code = "insufficient_quota"

    @property
    def headers(self) -> dict[str, str]:
        """Official clients would send it twice more."""
        return super().headers | {"x-should-retry": "false"}


class BudgetTooSmallError(LimitError, InvalidRequestError):
    """The request is larger than the whole of a quota: it would not pass an unused one."""

    code = "request_exceeds_budget"

    @property
    def headers(self) -> dict[str, str]:
        """It can never succeed as it is."""
        return {"x-should-retry": "false"}


def quota_error(
    blocking: Blocking, *, is_too_large: bool, now_s: float | None = None
) -> LimitError:
    """The refusal in words."""
    name = limit_name(blocking.metric, blocking.period, blocking.window_s)
    scope = scope_name(blocking.scope_kind)
    value, asked = (amount(blocking.metric, n) for n in (blocking.value, blocking.asked))
    if is_too_large:
        if blocking.is_shared:
            text = f"This request alone is larger than a limit of {scope} on {name}."
        else:
            text = (
                f"This request needs at least {asked}, more than the whole limit of {scope} on {name},"
                f" which is {value}."
            )
        return BudgetTooSmallError(
            f"{text} Send a shorter prompt or ask for fewer tokens or choices.",
            limit_id=blocking.limit_id,
        )
    reset_s = blocking.resets_at_s
    if reset_s is None:
        when = "It does not begin anew: ask the operator of this service to raise it."
    elif blocking.period == "rolling":
        when = f"It is free again little by little, from {moment(reset_s, blocking.zone)} on."
    else:
        when = f"It begins anew at {moment(reset_s, blocking.zone)}."
    if blocking.is_shared:
        text = f"{scope[0].upper()}{scope[1:]} has used up a limit on {name}, for all its users together."
    else:
        committed, held = (amount(blocking.metric, n) for n in (blocking.committed, blocking.held))
        text = (
            f"The limit of {scope} on {name} does not pay this request: the limit is {value}, {committed}"
            f" used, {held} held by requests in progress, and this one needs at least {asked}."
        )
    wait_s = None if reset_s is None else reset_s - (time.time() if now_s is None else now_s)
    if wait_s is None or wait_s > MAX_RETRY_AFTER_S:
        wait_s = None
    return QuotaExceededError(f"{text} {when}", limit_id=blocking.limit_id, retry_after_s=wait_s)
