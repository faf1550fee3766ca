"""Prometheus metrics of the control API; one registry per app, so that tests can make several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class ControlMetrics:
    """Counters by route template, never by path: ids would make one series per object."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "loraplex:control_requests",
            "Requests to the control API.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "loraplex:control_request_seconds",
            "Time to the last byte of the response.",
            ["method", "route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.logins = Counter(
            "loraplex:control_logins",
            "Logins by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.store_up = Gauge(
            "loraplex:control_adapter_store_up",
            "Whether the adapter store could be reached when it was last looked at.",
            registry=self.registry,
        )
        self.uploads = Counter(
            "loraplex:control_adapter_uploads",
            "Adapter uploads by outcome.",
            ["outcome"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
