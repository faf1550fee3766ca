"""The fleet and the overview on the wire."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field

from loraplex_platform.control.schemas import Resource, UnixSeconds
from loraplex_platform.db import Gateway
from loraplex_platform.fleet.engines import ReplicaView


class LoadTimesResource(BaseModel):
    """How long adapters took to come to a replica's memory, in seconds."""

    loads_total: int
    last_s: float
    p50_s: float = Field(description="Of the last 256 loads, as is p95_s.")
    p95_s: float


class EngineStatsResource(BaseModel):
    """A replica's counters since its start; the fields of the engine protocol's EngineStats."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_usage: float
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_finished_total: dict[str, int]
    num_preemptions_total: int
    steps_total: int
    adapters_resident: list[str]
    adapters_host: list[str]
    adapters_pinned: list[str] = []  # by the operator: kept in host memory
    adapters_pinned_at_start: list[str] | None = None  # those of the engine's own flag
    adapters_pin_failed: dict[str, str] = {}  # digest -> why it is not in memory
    adapter_leases: int
    adapters_loading: int = 0  # or waiting for a loader
    adapters_disk: int = 0  # copies of a remote store's
    adapter_disk_bytes: int = 0
    adapter_host_bytes: int = 0
    adapter_loads_total: int = 0
    adapter_load_failures_total: int = 0
    adapter_evictions_total: int = 0
    adapter_load_seconds_total: float = 0.0
    adapter_load_times: dict[str, LoadTimesResource] = Field(
        default={},
        description="By where the files came from: `store`, or `disk`, the replica's own copy of a remote store's.",
    )
    max_adapters_in_step: int
    mixed_steps_total: int
    rss_bytes: int
    uptime_s: float


class ReplicaResource(BaseModel):
    """A replica as it announced itself, its statistics and its speed over the last 10 s."""

    replica_id: str
    incarnation: str
    address: str
    curve_public_key: str | None
    base_model: str
    model_fingerprint: str
    kv_format: str
    device: str
    isa: str
    dtype: str
    torch_version: str
    backends: dict[str, str]
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    state: str
    started_at_unix_s: float
    row_rule_holds: bool
    base_revision: str  # the weights; empty: a release that does not say
    tokenizer_sha256: str
    chat_template_sha256: str
    stats: EngineStatsResource | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    requests_per_s: float


class PinOutcomeResource(BaseModel):
    """What one replica answered."""

    replica_id: str
    pinned: list[str] | None  # digests that it keeps now; null: it refused
    refusal: str | None  # why, as a code; "unreachable": it did not answer
    message: str | None


class GatewayResource(Resource):
    """A gateway by its own heartbeat."""

    gateway_id: str
    started_at: UnixSeconds
    last_seen_at: UnixSeconds


class FleetResource(BaseModel):
    """Everything that serves."""

    object: Literal["fleet"] = "fleet"
    replicas: list[ReplicaResource]
    gateways: list[GatewayResource]
    adapters: dict[str, list[str]] = Field(
        description="By digest, of adapters that replicas have: whose version of what it is, `acme/capitals v3`. "
        "Of the first thousand."
    )


class OverviewResource(BaseModel):
    """The numbers of the console's first page."""

    object: Literal["overview"] = "overview"
    requests_per_s: float
    tokens_per_s: float
    running: int
    waiting: int
    kv_usage: float
    resident_adapters: int
    tenants: int
    keys: int
    adapters: int
    deployments: int
    cost_today_usd: str
    recent_requests: int = Field(description="That callers have begun in the last five minutes.")
    recent_failed: int = Field(description="Those of them that failed on our side.")


def show_replica(view: ReplicaView) -> ReplicaResource:
    """The replica as the API shows it."""
    fields: dict[str, Any] = msgspec.to_builtins(view.record)
    stats = None if view.stats is None else msgspec.to_builtins(view.stats)
    return ReplicaResource.model_validate(
        {
            **fields,
            "stats": stats,
            "prompt_tokens_per_s": round(view.rates.prompt_tokens_per_s, 3),
            "generation_tokens_per_s": round(view.rates.generation_tokens_per_s, 3),
            "requests_per_s": round(view.rates.requests_per_s, 3),
        }
    )


def show_gateway(gateway: Gateway) -> GatewayResource:
    """The gateway as the API shows it."""
    return GatewayResource.model_validate(gateway)
