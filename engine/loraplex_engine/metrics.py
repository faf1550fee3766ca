"""Prometheus metrics of one replica: vLLM's names, prefix `loraplex:`.

What is a state is read from the last snapshot at scrape time; what is an event is counted where it
happens. Latencies as a client sees them belong to the gateway; the ones here start when a request
reaches the engine and say so in their names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loraplex_engine.gateway_queues import CutReason
from loraplex_engine.protocol import EngineStats, RejectCode, Usage
from loraplex_engine.queue_meter import WAIT_BUCKETS_S
from loraplex_engine.step_loop import ReplicaFacts
from loraplex_engine.structured.errors import GRAMMAR_ERRORS
from loraplex_engine.structured.meter import COMPILE_BUCKETS_S

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LOAD_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class EngineMetrics:
    """All metrics, in `registry`. Every method may be called from any thread."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._started_at = time.monotonic()
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"loraplex:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return metric.labels(model_name)

        self._step_s = histogram("step_duration_seconds", "One engine step.", _STEP_S)
        self._step_tokens = histogram(
            "iteration_tokens_total", "Tokens computed per engine step.", _TOKENS
        )
        self._first_token_s = histogram(
            "engine_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            _WAIT_S,
        )
        self._request_s = histogram(
            "engine_request_duration_seconds", "From arrival to the terminal event.", _WAIT_S
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens computed per request.", _TOKENS
        )
        self._output_tokens = histogram(
            "request_generation_tokens", "Tokens generated per request.", _TOKENS
        )
        self._commit_s = histogram(
            "journal_commit_seconds", "Writing usage to disk, per group of steps.", _STEP_S
        )
        self._load_s = Histogram(
            "loraplex:adapter_load_seconds",
            "Bringing an adapter to host memory, by where its files came from.",
            ["model_name", "tier"],
            buckets=_LOAD_S,
            registry=self.registry,
        )
        for tier in ("disk", "store"):
            self._load_s.labels(model_name, tier)
        self._rejected = Counter(
            "loraplex:requests_rejected",
            "Requests refused at admission.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._malformed = Counter(
            "loraplex:malformed_frames",
            "Frames that were not of our protocol.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._cut_gateways = Counter(
            "loraplex:gateways_cut_off",
            "Gateways whose requests were ended because they could not be sent to.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for reason in get_args(CutReason):
            self._cut_gateways.labels(model_name, reason)
        self._queued_bytes = Gauge(
            "loraplex:gateway_queued_bytes",
            "What waits for gateways that do not read just now.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._startup_s = Gauge(
            "loraplex:engine_startup_seconds",
            "From process start to ready.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._info = Gauge(
            "loraplex:engine_info",
            "Constant 1; what runs here.",
            ["model_name", "fingerprint", "dtype", "device", "isa", "row_rule_holds"],
            registry=self.registry,
        )

    def watch(
        self,
        latest_stats: Callable[[], EngineStats | None],
        last_step_unix_s: Callable[[], float],
        num_gateways: Callable[[], int],
    ) -> None:
        """Read states from these at each scrape."""
        self.registry.register(
            _StateCollector(self._model_name, latest_stats, last_step_unix_s, num_gateways)
        )

    def note_ready(self, facts: ReplicaFacts) -> None:
        """The engine is built."""
        self._startup_s.set(time.monotonic() - self._started_at)
        self._info.labels(
            self._model_name,
            facts.model_fingerprint,
            facts.dtype,
            facts.device,
            facts.isa,
            str(facts.row_rule_holds).lower(),
        ).set(1)

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        """A step that computed something."""
        self._step_s.observe(seconds)
        self._step_tokens.observe(num_tokens)

    def observe_adapter_load(self, tier: str, seconds: float) -> None:
        """An adapter came to host memory."""
        self._load_s.labels(self._model_name, tier).observe(seconds)

    def count_rejected(self, code: RejectCode) -> None:
        """A request was refused."""
        self._rejected.labels(self._model_name, code).inc()

    def count_malformed(self) -> None:
        """A frame did not parse."""
        self._malformed.inc()

    def count_cut(self, reason: CutReason) -> None:
        """A gateway was cut off."""
        self._cut_gateways.labels(self._model_name, reason).inc()

    def note_queued_bytes(self, num_bytes: int) -> None:
        """So much waits for gateways that do not read just now."""
        self._queued_bytes.set(num_bytes)

    def observe_first_token(self, seconds: float) -> None:
        """A request's first token left."""
        self._first_token_s.observe(seconds)

    def observe_end(self, seconds: float, usage: Usage) -> None:
        """A request ended."""
        self._request_s.observe(seconds)
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._output_tokens.observe(usage.completion_tokens)

    def observe_commit(self, seconds: float) -> None:
        """The journal was synced."""
        self._commit_s.observe(seconds)


class _StateCollector(Collector):
    def __init__(
        self,
        model_name: str,
        latest_stats: Callable[[], EngineStats | None],
        last_step_unix_s: Callable[[], float],
        num_gateways: Callable[[], int],
    ) -> None:
        self._model_name = model_name
        self._latest_stats = latest_stats
        self._last_step_unix_s = last_step_unix_s
        self._num_gateways = num_gateways

    def collect(self) -> Iterator[Metric]:
        yield self._gauge(
            "last_step_timestamp_seconds",
            "Unix time of the last completed step.",
            self._last_step_unix_s(),
        )
        yield self._gauge("num_gateways", "Connected gateways.", self._num_gateways())
        stats = self._latest_stats()
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_usage)
        yield self._gauge("kv_blocks", "KV blocks in all.", stats.kv_blocks_total)
        yield self._gauge("adapter_leases", "Requests holding an adapter.", stats.adapter_leases)
        yield self._gauge(
            "max_adapters_in_step",
            "Most distinct adapters that one step has held.",
            stats.max_adapters_in_step,
        )
        adapters = GaugeMetricFamily(
            "loraplex:adapters", "Adapters in memory, by tier.", labels=["model_name", "tier"]
        )
        adapters.add_metric([self._model_name, "slot"], len(stats.adapters_resident))
        adapters.add_metric([self._model_name, "host"], len(stats.adapters_host))
        adapters.add_metric([self._model_name, "disk"], stats.adapters_disk)
        yield adapters
        sizes = GaugeMetricFamily(
            "loraplex:adapter_bytes", "What they take, by tier.", labels=["model_name", "tier"]
        )
        sizes.add_metric([self._model_name, "host"], stats.adapter_host_bytes)
        sizes.add_metric([self._model_name, "disk"], stats.adapter_disk_bytes)
        yield sizes
        yield self._gauge(
            "adapters_pinned", "Adapters pinned to host memory.", len(stats.adapters_pinned)
        )
        yield self._gauge(
            "adapters_loading", "Adapters loading, or waiting for it.", stats.adapters_loading
        )
        yield self._counter("adapter_loads", "Adapters loaded.", stats.adapter_loads_total)
        yield self._counter(
            "adapter_load_failures", "Adapter loads that failed.", stats.adapter_load_failures_total
        )
        yield self._counter(
            "adapter_evictions", "Adapters evicted from host memory.", stats.adapter_evictions_total
        )
        yield self._counter(
            "prompt_tokens", "Prompt tokens computed or found.", stats.prompt_tokens_total
        )
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens_total)
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache, once per request.",
            stats.prefix_cache_query_tokens_total,
        )
        yield self._counter(
            "prefix_cache_hits",
            "Those of them that were found, and not computed.",
            stats.prefix_cache_hit_tokens_total,
        )
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions_total)
        yield self._counter("steps", "Engine steps.", stats.steps_total)
        yield from self._queue(stats)
        yield from self._speculation(stats)
        yield from self._device(stats)
        yield from self._grammars(stats)
        yield self._counter(
            "mixed_steps",
            "Steps that held two adapters or more, and the base model.",
            stats.mixed_steps_total,
        )
        ended = CounterMetricFamily(
            "loraplex:request_success",
            "Requests that ended, by reason (vLLM's name; errors and aborts included).",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in sorted(stats.requests_finished_total.items()):
            ended.add_metric([self._model_name, reason], count)
        yield ended

    def _queue(self, stats: EngineStats) -> Iterator[Metric]:
        classes = GaugeMetricFamily(
            "loraplex:num_requests_waiting_by_priority",
            "Requests in the queue, by priority.",
            labels=["model_name", "priority"],
        )
        for priority, count in sorted(stats.waiting_by_priority.items()):
            classes.add_metric([self._model_name, str(priority)], count)
        yield classes
        skips = CounterMetricFamily(
            "loraplex:requests_skipped",
            "Blocked requests that others passed, once per step, by what they waited for.",
            labels=["model_name", "reason"],
        )
        for reason, count in sorted(stats.skips_total.items()):
            skips.add_metric([self._model_name, reason], count)
        yield skips
        yield from self._histogram(
            "request_queue_time_seconds",
            "From a request's arrival at the engine to its first step.",
            WAIT_BUCKETS_S,
            stats.queue_time_counts,
            stats.queue_time_seconds_total,
        )
        yield self._gauge(
            "service_gap",
            "Widest gap seen between two waiting tenants' virtual token counters (fair policy).",
            stats.service_gap,
        )
        yield self._gauge(
            "service_gap_promised",
            "Widest gap that the requests admitted so far made possible.",
            stats.service_gap_promised,
        )
        yield self._gauge(
            "service_gap_bound",
            "Widest gap that this replica's limits and the tenants of now make possible; what is not"
            " charged (rejected drafts, recomputed tokens, grammar time) is outside it.",
            stats.service_gap_bound,
        )

    def _device(self, stats: EngineStats) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "loraplex:device_memory_bytes",
            "A GPU's memory, by what it was given to at start.",
            labels=["model_name", "use"],
        )
        for use, size in stats.device_memory_bytes.items():
            memory.add_metric([self._model_name, use], size)
        yield memory
        yield self._gauge("graphs", "Recorded decoding steps.", stats.graphs_captured)
        yield self._gauge(
            "graph_capture_seconds", "What recording them took.", stats.graph_capture_seconds
        )
        yield self._counter(
            "graph_replays", "Steps that replayed a recording.", stats.graph_replays_total
        )
        yield self._counter(
            "eager_steps",
            "Steps on a GPU that did not: prefill, drafts, or more rows than any recording has.",
            stats.eager_steps_total,
        )

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter(
            "spec_decode_num_drafts", "Rows and steps with draft tokens.", stats.spec_drafts_total
        )
        yield self._counter(
            "spec_decode_num_draft_tokens",
            "Draft tokens computed.",
            stats.spec_draft_tokens_total,
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens",
            "Draft tokens that were what was sampled.",
            stats.spec_accepted_tokens_total,
        )
        per_position = CounterMetricFamily(
            "loraplex:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their place among a row's drafts (from 0).",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(stats.spec_accepted_per_position_total):
            per_position.add_metric([self._model_name, str(position)], count)
        yield per_position

    def _grammars(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter(
            "grammar_cache_queries", "Requests with a grammar.", stats.grammar_queries_total
        )
        yield self._counter(
            "grammar_cache_hits",
            "Those of them whose grammar was compiled, or being compiled, or known to fail, already.",
            stats.grammar_cache_hits_total,
        )
        yield from self._histogram(
            "grammar_compile_seconds",
            "Compiling a grammar, from its turn to its end, failed ones included.",
            COMPILE_BUCKETS_S,
            stats.grammar_compile_counts,
            stats.grammar_compile_seconds_total,
        )
        failures = CounterMetricFamily(
            "loraplex:grammar_failures",
            "Requests that their grammar ended with an error, by its code.",
            labels=["model_name", "reason"],
        )
        for reason in GRAMMAR_ERRORS:  # all from the start, so that a rate sees the first one
            count = stats.grammar_failures_total.get(reason, 0)
            failures.add_metric([self._model_name, reason], count)
        yield failures
        yield self._counter("grammar_masks", "Masks computed.", stats.grammar_masks_total)
        yield self._counter(
            "grammar_mask_seconds",
            "CPU time of the step thread that masks and following the output took.",
            stats.grammar_mask_seconds_total,
        )
        yield self._counter(
            "grammar_deferrals",
            "Rows left out of a step, once per step, because masks of their tenant or of all had taken"
            " their part of it.",
            stats.grammar_deferrals_total,
        )

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        counts: Sequence[int],
        total: float,
    ) -> Iterator[HistogramMetricFamily]:
        """One per bucket and one beyond; none: an engine that does not count them."""
        if counts:
            family = HistogramMetricFamily(f"loraplex:{name}", text, labels=["model_name"])
            bounds = [*map(str, buckets), "+Inf"]
            cumulated = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([self._model_name], cumulated, total)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"loraplex:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"loraplex:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
