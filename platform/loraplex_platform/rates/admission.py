"""What a request asks for, what it was granted, and how that is told to its client."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from loraplex_platform.errors import UnavailableError
from loraplex_platform.quotas.errors import MAX_RETRY_AFTER_S, LimitError
from loraplex_platform.quotas.records import EffectiveLimits, RateLimit, RateMetric
from loraplex_platform.quotas.words import amount, limit_name, scope_name
from loraplex_platform.rates import keys
from loraplex_platform.rates.header_fields import ratelimit_fields


@dataclass(frozen=True, slots=True)
class TokenUse:
    """What a request used in the end: prompt tokens (cached ones too) and completion tokens."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request that wants to be admitted.

    Attributes:
        key_version, tenant_version: as they were when the caller was looked up, see `Authenticated`.
        max_completion_tokens: the most that all its choices may generate.
    """

    request_id: UUID
    tenant_id: UUID
    key_id: UUID
    key_version: int
    tenant_version: int
    limits: EffectiveLimits
    prompt_tokens: int
    max_completion_tokens: int

    def amount(self, metric: RateMetric) -> int:
        """What admission takes: one request, one place, or as many tokens as it might use."""
        most = TokenUse(self.prompt_tokens, self.max_completion_tokens)
        return 1 if metric in ("rpm", "concurrency") else _tokens(metric, most)

    def refund(self, metric: RateMetric, used: TokenUse | None) -> int:
        """What goes back in the end. `used` None: it was not run, so all of it."""
        if used is None:
            return self.amount(metric)
        if metric in ("rpm", "concurrency"):
            return 0
        return self.amount(metric) - _tokens(metric, used)

    def shares(self) -> Iterator[Share]:
        """Its limits by whose they are: the tenant's own first, then those shared with others."""
        names = keys.names_of(self.limits.rates)
        for owner in (self.tenant_id, None):
            limits = tuple(
                x for x in self.limits.rates if (x.owner_tenant_id is None) == (not owner)
            )
            if limits or owner is not None:
                yield Share(owner, limits, tuple(names[limit.limit_id] for limit in limits))


def _tokens(metric: RateMetric, use: TokenUse) -> int:
    counted = 0
    if metric in ("tpm_in", "tpm_total"):
        counted += use.prompt_tokens
    if metric in ("tpm_out", "tpm_total"):
        counted += use.completion_tokens
    return counted


@dataclass(frozen=True, slots=True)
class Share:
    """The limits that one script looks at.

    Attributes:
        owner: None: limits that tenants share.
        keys: one for each limit.
    """

    owner: UUID | None
    limits: tuple[RateLimit, ...]
    keys: tuple[str, ...]

    @property
    def tag(self) -> str:
        """The hash tag of its keys."""
        return keys.tag_of(self.owner)

    @property
    def place_keys(self) -> list[str]:
        """Those in which an admitted request holds a place."""
        named = zip(self.limits, self.keys, strict=True)
        return [name for limit, name in named if limit.metric == "concurrency"]


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit as the script saw it.

    Attributes:
        remaining: after this request, if it was admitted.
        reset_us: until nothing of it is used.
        wait_us: until the request fits: 0 now, -1 never.
    """

    limit: RateLimit
    remaining: int
    reset_us: int
    wait_us: int = 0

    @property
    def fraction_left(self) -> float:
        """Of what the limit allows at once."""
        return self.remaining / self.limit.capacity if self.limit.capacity else 0.0


@dataclass(slots=True)
class Admission:
    """An admitted request; hand it back to `RateLimiter.release` when the request is over.

    Attributes:
        shares: what has, or may have, been taken in Redis.
        is_degraded: whether it was decided without Redis.
    """

    claim: Claim
    shares: list[Share] = field(default_factory=list)
    views: list[LimitView] = field(default_factory=list)
    is_degraded: bool = False
    is_released: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """For its answer."""
        is_degraded = self.is_degraded and bool(self.claim.limits.rates)
        return rate_headers(self.views, is_degraded=is_degraded)


def rate_headers(
    views: Iterable[LimitView], *, is_degraded: bool = False, is_refused: bool = False
) -> dict[str, str]:
    """`x-ratelimit-*`: of several limits the tightest one, by what is left of it; and the IETF's fields.

    Limits that tenants share are not shown: how much is left of them is other tenants' business.
    """
    own = [view for view in views if view.limit.owner_tenant_id is not None]
    headers = ratelimit_fields(own, is_refused=is_refused)
    for kind in ("requests", "tokens"):
        of_kind = [view for view in own if _kind(view.limit.metric) == kind]
        if of_kind:
            tightest = min(of_kind, key=lambda view: (view.fraction_left, view.remaining))
            headers[f"x-ratelimit-limit-{kind}"] = str(tightest.limit.value)
            headers[f"x-ratelimit-remaining-{kind}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = go_duration(max(0, tightest.reset_us))
    if is_degraded:
        headers["x-loraplex-rate-limits"] = "degraded"
    return headers


def _kind(metric: RateMetric) -> str | None:
    if metric == "concurrency":
        return None
    return "requests" if metric == "rpm" else "tokens"


def go_duration(microseconds: int) -> str:
    """As Go prints durations and OpenAI shows resets: `120ms`, `1.5s`, `6m0s`; rounded up to 1 ms."""
    total_ms = math.ceil(microseconds / 1000)
    if total_ms < 1000:
        return f"{total_ms}ms" if total_ms else "0s"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


class RateLimitedError(LimitError):
    """A rate or concurrency limit does not allow the request now; nothing was taken for it."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(
        self, claim: Claim, views: Sequence[LimitView], *, is_degraded: bool = False
    ) -> None:
        blocking = [view for view in views if view.wait_us]
        never = [view for view in blocking if view.wait_us < 0]
        # The one that takes longest: any other would only lead to a second refusal.
        self.view = never[0] if never else max(blocking, key=lambda view: view.wait_us)
        self._views = views
        self._is_degraded = is_degraded
        wait_s = self.view.wait_us / 1e6
        may_retry = 0 <= wait_s <= MAX_RETRY_AFTER_S
        super().__init__(
            _explain(claim, self.view),
            limit_id=self.view.limit.limit_id,
            retry_after_s=wait_s if may_retry else None,
        )

    @property
    def headers(self) -> dict[str, str]:
        """When to come back, or that it cannot help; and the limits as they are."""
        shown = rate_headers(self._views, is_degraded=self._is_degraded, is_refused=True)
        if self.retry_after_s is None:
            return shown | {"x-should-retry": "false"}
        # Spread, so that all who were refused together do not come back together.
        wait_s = self.retry_after_s * random.uniform(1.0, 1.2)  # noqa: S311 # not a secret
        return shown | {
            "Retry-After": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(max(1, math.ceil(wait_s * 1000))),
        }


def _explain(claim: Claim, view: LimitView) -> str:
    limit = view.limit
    name = limit_name(limit.metric, "none" if limit.metric == "concurrency" else "minute")
    scope = scope_name(limit.scope_kind)
    needed = claim.amount(limit.metric)
    if limit.value <= 0:
        return f"Rate limit reached: {scope} is closed for now, by a limit of 0 on {name}."
    if limit.owner_tenant_id is None:
        # Its numbers are other tenants' business.
        return (
            f"Rate limit reached: {scope} has reached a limit on {name}, for all its users together."
            " Try again."
        )
    value, used = amount(limit.metric, limit.value), limit.capacity - view.remaining
    if limit.metric == "concurrency":
        return (
            f"Rate limit reached: {scope} may have {value} {name}, and {used} are running. Try again"
            " when one has ended."
        )
    if limit.burst != limit.value:
        value = f"{value} (at most {amount(limit.metric, limit.burst)} at once)"
    if view.wait_us < 0:
        return (
            f"This request needs {amount(limit.metric, needed)}, more than the limit of {scope} on {name}"
            f" ever allows, which is {value}. Send a shorter prompt or ask for fewer tokens or choices."
        )
    return (
        f"Rate limit reached: the limit of {scope} on {name} is {value}, {amount(limit.metric, used)} are"
        f" used and this request needs {amount(limit.metric, needed)}. It fits again in"
        f" {go_duration(view.wait_us)}; all is reset in {go_duration(view.reset_us)}."
    )


class RatesUnavailableError(UnavailableError):
    """A limit that must not be guessed at cannot be checked, since Redis does not answer."""

    code = "rate_limits_unavailable"
