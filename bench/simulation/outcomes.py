"""What a replay saw of each tenant's requests: counts, time to first token, inter-token latency, goodput."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

ALL_TENANTS = "all"


@dataclass(slots=True)
class _Samples:
    num_sent: int = 0
    num_refused: int = 0
    num_expired: int = 0
    num_served: int = 0
    num_good: int = 0
    output_tokens: int = 0
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    inter_token_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class TenantReport:
    """Seconds unless said otherwise; nan where nothing was served."""

    tenant: str
    sent: int
    refused: int
    expired: int
    served: int
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    output_tokens_per_s: float
    goodput_per_s: float  # requests that met both objectives

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What makes a request good: its first token, and the mean gap between its tokens, within these."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class _Progress:
    tenant: str
    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


class Recorder:
    """Takes what happens, in any order of requests, each request's own events in order of time."""

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._samples: dict[str, _Samples] = {}
        self._open: dict[int, _Progress] = {}
        self.num_tokens = 0

    def sent(self, key: int, tenant: str, at_s: float) -> None:
        self._of(tenant).num_sent += 1
        self._open[key] = _Progress(tenant, at_s)

    def refused(self, key: int) -> None:
        self._of(self._open.pop(key).tenant).num_refused += 1

    def expired(self, key: int) -> None:
        self._of(self._open.pop(key).tenant).num_expired += 1

    def token(self, key: int, at_s: float, *, is_last: bool) -> None:
        """One more token of a request."""
        progress = self._open[key]
        samples = self._of(progress.tenant)
        self.num_tokens += 1
        if progress.num_tokens == 0:
            progress.first_s = at_s
            samples.first_token_s.append(at_s - progress.arrived_s)
        else:
            samples.inter_token_s.append(at_s - progress.last_s)
        progress.last_s = at_s
        progress.num_tokens += 1
        samples.output_tokens += 1
        if is_last:
            del self._open[key]
            samples.num_served += 1
            gaps = max(1, progress.num_tokens - 1)
            samples.num_good += (
                progress.first_s - progress.arrived_s <= self._objectives.ttft_s
                and (progress.last_s - progress.first_s) / gaps <= self._objectives.itl_s
            )

    def reports(self, elapsed_s: float) -> list[TenantReport]:
        """One per tenant, by name, and one over all."""
        assert not self._open, "a request never ended"
        reports = [_report(name, self._samples[name], elapsed_s) for name in sorted(self._samples)]
        total = _Samples()
        for samples in self._samples.values():
            total.num_sent += samples.num_sent
            total.num_refused += samples.num_refused
            total.num_expired += samples.num_expired
            total.num_served += samples.num_served
            total.num_good += samples.num_good
            total.output_tokens += samples.output_tokens
            total.first_token_s.extend(samples.first_token_s)
            total.inter_token_s.extend(samples.inter_token_s)
        return [*reports, _report(ALL_TENANTS, total, elapsed_s)]

    def _of(self, tenant: str) -> _Samples:
        return self._samples.setdefault(tenant, _Samples())


def _report(tenant: str, samples: _Samples, elapsed_s: float) -> TenantReport:
    return TenantReport(
        tenant=tenant,
        sent=samples.num_sent,
        refused=samples.num_refused,
        expired=samples.num_expired,
        served=samples.num_served,
        ttft_p50_s=_percentile(samples.first_token_s, 50),
        ttft_p95_s=_percentile(samples.first_token_s, 95),
        itl_p50_s=_percentile(samples.inter_token_s, 50),
        itl_p95_s=_percentile(samples.inter_token_s, 95),
        output_tokens_per_s=samples.output_tokens / elapsed_s,
        goodput_per_s=samples.num_good / elapsed_s,
    )


def _percentile(values: array[float], percent: float) -> float:
    return float(np.percentile(np.frombuffer(values), percent)) if values else float("nan")
