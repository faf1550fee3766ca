"""What a replayed trace measured: numbers of requests in, figures and a verdict out. Pure.

Units: milliseconds; tokens a second over the replay's whole time. Quantiles are of all requests (time to
first token) or all gaps between tokens; several tokens that came at once share their gap evenly.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loraplex_platform.evals.suites import PerformanceThresholds


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the replay; without a first token if it was aborted before."""

    ttft_ms: float | None
    gaps_ms: Sequence[float]
    completion_tokens: int
    is_aborted: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a replay. KV occupancy is a share of all replicas' blocks, 0 to 1; None where none was sampled."""

    num_requests: int
    num_aborted: int
    abort_rate: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    output_tokens: int
    output_tokens_per_s: float
    elapsed_s: float
    concurrency: int
    max_in_flight: int
    kv_usage_mean: float | None
    kv_usage_max: float | None

    def to_json(self) -> dict[str, Any]:
        """As a run's summary keeps it."""
        return asdict(self)


def gaps_of(arrivals_ms: Sequence[tuple[float, int]]) -> list[float]:
    """Milliseconds between tokens, from (time, tokens) of each event; the first token has no gap."""
    gaps: list[float] = []
    for (before, _), (at, count) in itertools.pairwise(arrivals_ms):
        gaps += [(at - before) / count] * count
    return gaps


def figures(
    samples: Sequence[Sample],
    *,
    elapsed_s: float,
    concurrency: int,
    max_in_flight: int,
    kv_usage: Sequence[float],
) -> Figures:
    """Sum a replay up."""
    firsts = [sample.ttft_ms for sample in samples if sample.ttft_ms is not None]
    gaps = [gap for sample in samples for gap in sample.gaps_ms]
    tokens = sum(sample.completion_tokens for sample in samples)
    aborted = sum(sample.is_aborted for sample in samples)
    return Figures(
        num_requests=len(samples),
        num_aborted=aborted,
        abort_rate=aborted / len(samples) if samples else 0.0,
        ttft_p50_ms=quantile(firsts, 0.5),
        ttft_p95_ms=quantile(firsts, 0.95),
        itl_p50_ms=quantile(gaps, 0.5),
        itl_p95_ms=quantile(gaps, 0.95),
        output_tokens=tokens,
        output_tokens_per_s=tokens / elapsed_s if elapsed_s > 0 else 0.0,
        elapsed_s=elapsed_s,
        concurrency=concurrency,
        max_in_flight=max_in_flight,
        kv_usage_mean=math.fsum(kv_usage) / len(kv_usage) if kv_usage else None,
        kv_usage_max=max(kv_usage, default=None),
    )


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that a share of `q` does not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def misses(found: Figures, wanted: PerformanceThresholds) -> list[str]:
    """What the replay does not hold, in words; a figure that could not be measured does not hold."""
    said = []
    for name, limit, is_least in (
        ("ttft_p95_ms", wanted.ttft_p95_ms, False),
        ("itl_p95_ms", wanted.itl_p95_ms, False),
        ("output_tokens_per_s", wanted.output_tokens_per_s, True),
        ("abort_rate", wanted.abort_rate, False),
    ):
        if limit is None:
            continue
        value = getattr(found, name)
        if value is None:
            said.append(f"{name} could not be measured, wanted {limit:g}")
        elif (value < limit) if is_least else (value > limit):
            said.append(
                f"{name} is {value:g}, wanted {limit:g} or {'more' if is_least else 'less'}"
            )
    return said


def synthetic_prompt(length: int, seed: int, usable_ids: Sequence[int]) -> list[int]:
    """Token ids of a prompt of that length: the same for the same seed, and no two seeds share a prefix.

    Args:
        usable_ids: ids of plain text; none that ends or steers a conversation.
    """
    ids: list[int] = []
    block = 0
    while len(ids) < length:
        stream = hashlib.sha256(f"loraplex trace:{seed}:{block}".encode()).digest()
        ids += [
            usable_ids[int.from_bytes(stream[i : i + 4], "big") % len(usable_ids)]
            for i in range(0, 32, 4)
        ]
        block += 1
    return ids[:length]
