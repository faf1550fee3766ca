"""What a gateway measures, under vLLM's metric names with our prefix. One registry per app."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class InterTokenTimes(Collector):
    """A histogram by endpoint that is made to be written for every token and read now and then.

    One thread writes; a reader may see an observation's count before its sum.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts: dict[str, list[int]] = {}  # per bucket, not cumulated; the last: beyond all
        self._sums: dict[str, float] = {}

    def observe(self, endpoint: str, seconds: float, count: int = 1) -> None:
        """Note `count` times of so many seconds each."""
        counts = self._counts.get(endpoint)
        if counts is None:
            self._sums[endpoint] = 0.0
            counts = self._counts[endpoint] = [0] * (len(self._bounds) + 1)
        counts[bisect_left(self._bounds, seconds)] += count
        self._sums[endpoint] += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=["endpoint"])
        labels = [*map(floatToGoString, self._bounds), "+Inf"]
        for endpoint, counts in list(self._counts.items()):
            buckets = list(zip(labels, map(float, accumulate(counts)), strict=True))
            family.add_metric([endpoint], buckets, self._sums[endpoint])
        yield family


class GatewayMetrics:
    """A request counts in TTFT once, at its first token; in e2e once, when it is settled."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "loraplex:http_requests",
            "Answers by endpoint and status code.",
            ["endpoint", "code"],
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "loraplex:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            ["endpoint"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = InterTokenTimes(
            "loraplex:inter_token_latency_seconds",
            "Between the arrivals of two tokens of a request.",
            buckets=_STEP_BUCKETS,
        )
        self.registry.register(self.inter_token_latency)
        self.e2e_latency = Histogram(
            "loraplex:e2e_request_latency_seconds",
            "From the arrival of a request to its end, whatever the end.",
            ["endpoint"],
            buckets=_E2E_BUCKETS,
            registry=self.registry,
        )
        self.requests_finished = Counter(
            "loraplex:gateway_requests_finished",
            "Requests by how they ended: stop, length, abort, fault, lost, rejected.",
            ["reason"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "loraplex:gateway_tokens",
            "Tokens by class: prompt, cached, billed, absorbed, discarded.",
            ["token_class"],
            registry=self.registry,
        )
        self.http_in_flight = Gauge(
            "loraplex:gateway_http_in_flight",
            "HTTP requests being answered.",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "loraplex:gateway_requests_in_flight",
            "Requests reserved and not yet settled here.",
            registry=self.registry,
        )
        self.engines_ready = Gauge(
            "loraplex:gateway_engines_ready",
            "Replicas this gateway could send a request to.",
            registry=self.registry,
        )
        self.spool_pending = Gauge(
            "loraplex:gateway_spool_pending",
            "Endings on disk that are not on the books yet.",
            registry=self.registry,
        )
        self.spool_failures = Counter(
            "loraplex:gateway_spool_failures",
            "Times that endings could not be written to disk: the spool was full or its disk failed.",
            registry=self.registry,
        )
        self.spool_replayed = Counter(
            "loraplex:gateway_spool_replayed",
            "Endings read back, by what became of them: settled, voided, overtaken (by the sweeper or an"
            " attempt that came through late), rejected, unreadable, empty (a test of the disk).",
            ["outcome"],
            registry=self.registry,
        )
        self.copies_taken = Counter(
            "loraplex:gateway_rollout_copies_taken",
            "Shadows and scores that were begun for rollouts.",
            ["kind"],
            registry=self.registry,
        )
        self.copies_dropped = Counter(
            "loraplex:gateway_rollout_copies_dropped",
            "Shadows and scores that were wanted and not begun: full (too many waited), busy (engines had"
            " other requests waiting), no_engine, max_adapters (of the tenant); or given up: draining.",
            ["kind", "reason"],
            registry=self.registry,
        )
        self.copies_failed = Counter(
            "loraplex:gateway_rollout_copies_failed",
            "Shadows and scores that ended without a result, by error code.",
            ["kind", "reason"],
            registry=self.registry,
        )
        self.settle_retries = Counter(
            "loraplex:gateway_settle_retries",
            "Settlements that had to be tried again because the database did not answer.",
            registry=self.registry,
        )
