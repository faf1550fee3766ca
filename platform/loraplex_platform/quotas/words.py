"""Limits in words: for errors, explanations and lists."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from loraplex_platform.billing.money import format_usd
from loraplex_platform.quotas.records import QuotaMetric, RateMetric, ScopeKind

_SCOPES: dict[ScopeKind, str] = {
    "platform": "this service",
    "tenant": "your organization",
    "project": "this project",
    "key": "this API key",
    "adapter": "this adapter",
    "deployment": "this model",
}
_METRICS: dict[QuotaMetric | RateMetric, str] = {
    "requests": "requests",
    "tokens_in": "prompt tokens",
    "tokens_out": "completion tokens",
    "tokens_total": "tokens",
    "cost": "spending",
    "rpm": "requests",
    "tpm_in": "prompt tokens",
    "tpm_out": "completion tokens",
    "tpm_total": "tokens",
    "concurrency": "requests at a time",
}
_PERIODS = {"day": "per day", "month": "per month", "total": "in total", "minute": "per minute"}
_HOUR_S, _DAY_S = 3600, 86_400


def scope_name(kind: ScopeKind) -> str:
    """In the tenant's own terms."""
    return _SCOPES[kind]


def limit_name(metric: QuotaMetric | RateMetric, period: str, window_s: int = 0) -> str:
    """ "tokens per day", "spending in any 30 days"."""
    if period == "rolling":
        is_days = window_s % _DAY_S == 0
        count = window_s // (_DAY_S if is_days else _HOUR_S)
        unit = "day" if is_days else "hour"
        return f"{_METRICS[metric]} in any {count} {unit}{'' if count == 1 else 's'}"
    return f"{_METRICS[metric]} {_PERIODS[period]}" if period in _PERIODS else _METRICS[metric]


def amount(metric: QuotaMetric | RateMetric, value: int) -> str:
    """A number of the metric: "1,000", or exact dollars without idle zeros, but with cents."""
    if metric != "cost":
        return f"{value:,}"
    whole, _, fraction = format_usd(value).partition(".")
    return f"{int(whole):,}.{fraction.rstrip('0').ljust(2, '0')} USD"


def moment(unix_s: float, zone: str) -> str:
    """To the second, in a zone, which is named."""
    at = datetime.fromtimestamp(unix_s, UTC).astimezone(ZoneInfo(zone))
    return f"{at:%Y-%m-%d %H:%M:%S} ({zone})"
