"""What gateways and engine replicas say to each other: msgspec structs in ZeroMQ frames.

Owns the wire format only; no torch, no sockets. `client.py` and `server.py` move the frames.
Every message is one msgpack-encoded tagged union (`type` field), one ZeroMQ frame. A replica sends
at most one `StepFrame` per gateway and step, which carries the events of all of that gateway's
requests, so that the cost of a message does not grow with the batch.

Units: times are seconds; `deadline_unix_s` is wall clock so that it means the same on two machines.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

PROTOCOL_VERSION = 2

MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 16  # n
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3  # of a tenant; the bound on the service gap goes as 1 / weight
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_GRAMMAR_CHARS = 256 * 1024

FinishReason = Literal["stop", "length", "abort", "error"]

GIVEN_UP = "given_up"  # error_code of what was ended for the platform's sake, not the client's


GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text must be. `value`: the schema, the regular expression or the Lark grammar."""

    kind: GrammarKind
    value: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request's tokens are drawn.

    `temperature == 0` is greedy: top_k, top_p and seed then have no effect. `seed` is always set by
    the sender (from the OS's entropy when the user gave none): noise is a pure function of
    (seed, output position, vocabulary id), so a row's draw never depends on its neighbours.
    `top_k == 0`, `top_p == 1.0`, `min_p == 0.0`, the penalties' neutral values and empty collections
    switch a pass off; a pass that is off costs nothing.

    Order, per output position: grammar, allowed and bad words, min_tokens (masks); repetition, presence
    and frequency penalty; logit_bias; temperature; top_k; top_p; min_p; the draw. Log-probabilities are
    those of the model's own distribution, before all of it.

    Choice i of n draws with seed + i (mod 2**64).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # uint64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0  # ids below min_p times the most likely one's probability are dropped
    presence_penalty: float = 0.0  # subtracted once from ids already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides (below 0: multiplies) ids of prompt and output
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # no stop id before so many tokens
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that never appear
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    grammar: Grammar | None = None
    n: int = 1  # choices, over one computed prompt
    logprobs: int | None = None  # None: none; 0: the sampled token's; k: and the k most likely
    # The whole output, told beforehand: position i takes the i-th, whatever else is set, and `logprobs`
    # say how likely the model finds it. Nothing but the last of them ends the request.
    forced_token_ids: tuple[int, ...] = ()


# ---------------------------------------------------------------------------- gateway -> engine


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Run one request. (request_id, attempt) is the identity: a second copy is a no-op."""

    request_id: str  # UUIDv7, hyphenated, made by the gateway
    attempt: int
    lease_token: int
    tenant_id: str
    tenant_salt: bytes  # per tenant, made by the server; never chosen by a client
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter_digest: str | None = None  # "sha256:<64 hex>"; None: the base model
    priority: int = 0  # larger is more urgent
    weight: float = 1.0  # MIN_WEIGHT to MAX_WEIGHT
    # The tenant's share of the KV cache beside those of others, in the same range; None: its weight.
    memory_weight: float | None = None
    max_adapters: int | None = None  # of the tenant's, in step slots at a time; None: any number
    deadline_unix_s: float | None = None  # still waiting then: dropped with `deadline_exceeded`


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop a request in whatever state it is. Unknown or finished: no-op.

    The engine still answers with the terminal event, so that usage is never lost: finish_reason
    "abort" (the client left), "stop" when `as_stop` is set (the gateway saw a stop string complete),
    "error" with code `GIVEN_UP` when `is_platform_fault` is set (a deadline, a shutdown, a lost
    lease: the client is told that nothing is billed, and whoever reads the journal must know it).
    """

    request_id: str
    attempt: int
    index: int | None = None  # of one choice, with `as_stop`; None: the whole request
    as_stop: bool = False
    is_platform_fault: bool = False


class PrefetchAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch_adapter"):
    """Load an adapter from the store to host memory before it is needed; no answer."""

    adapter_digest: str


class PinAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="pin_adapter"):
    """Load an adapter and keep it in host memory, whoever uses it, until `UnpinAdapter` or the replica's
    end: the operator's word, which no tenant's share bounds. Answer: `PinReply`.
    """

    query_id: int
    adapter_digest: str


class UnpinAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unpin_adapter"):
    """Let an adapter be evicted like any other. Not pinned: no-op. Answer: `PinReply`."""

    query_id: int
    adapter_digest: str


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True, tag="usage_query"):
    """Ask what became of (request_id, attempt): the sweeper's question. Answer: `UsageReply`.

    `gateway_id`: whose request it is; whether that gateway is still here is answered too.
    """

    query_id: int
    request_id: str
    attempt: int
    gateway_id: str | None = None


class JournalQuery(msgspec.Struct, frozen=True, kw_only=True, tag="journal_query"):
    """Read journal entries with sequence number > after_seq, oldest first. Answer: `JournalReply`."""

    query_id: int
    after_seq: int
    limit: int = 1000


class StatsQuery(msgspec.Struct, frozen=True, kw_only=True, tag="stats_query"):
    """Ask for a `StatsReply`."""

    query_id: int


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of every connection, repeated as a heartbeat every few seconds.

    A gateway that has been silent for `GATEWAY_TIMEOUT_S` is taken for dead and its requests are
    ended with an error (their usage still goes to the journal). Answer: `Welcome`.
    """

    protocol_version: int
    gateway_id: str


GatewayMessage = (
    Generate
    | Abort
    | PrefetchAdapter
    | PinAdapter
    | UnpinAdapter
    | UsageQuery
    | JournalQuery
    | StatsQuery
    | Hello
)

GATEWAY_TIMEOUT_S = 15.0
HEARTBEAT_S = 3.0


# ---------------------------------------------------------------------------- engine -> gateway


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost the engine. `completion_tokens` counts every token that was sampled."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one output position, from the unfiltered distribution at temperature 1."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of one choice of a request in one step.

    `token_ids` are new tokens in order (possibly none on a last event). A choice's last event has
    `finish_reason`. The request's last, the terminal event, has `usage` too, over all choices; it is
    sent exactly once per (request_id, attempt), after its journal entry is on disk. An error, and an
    abort of the whole request, ends all choices with one terminal event. A stop token that ended the
    choice is included in `token_ids` and in usage; the gateway does not show it.
    """

    request_id: str
    attempt: int
    index: int = 0  # of the choice
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token id when asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    error_code: str | None = None  # with finish_reason "error"
    error_message: str | None = None


class StepFrame(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """All events of one step for one gateway."""

    step_id: int
    events: list[TokenEvent]


RejectCode = Literal[
    "queue_full",  # 503, Retry-After
    "draining",  # 503, Retry-After
    "never_fits",  # 400: prompt + max_tokens can never fit this replica's memory or context
    "invalid_request",  # 400: ids outside the vocabulary, empty prompt, bad sampling values
    "adapter_unavailable",  # 503: the store does not have it or could not be read
    "adapter_invalid",  # 500: digest mismatch, wrong base, rank beyond the cap
]


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """A `Generate` was refused at admission: no work was done, nothing is journaled."""

    request_id: str
    attempt: int
    code: RejectCode
    message: str
    num_waiting: int = 0
    retry_after_s: float | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """A `Generate` was queued."""

    request_id: str
    attempt: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Who answers. `incarnation` is new at each start: requests of an older one are gone."""

    protocol_version: int
    replica_id: str
    incarnation: str
    model_fingerprint: str
    max_model_len: int
    is_ready: bool
    is_draining: bool = False


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Terminal usage of one attempt, as fsynced by the engine before the terminal event was sent."""

    seq: int
    request_id: str
    attempt: int
    lease_token: int
    tenant_id: str
    adapter_digest: str | None
    finish_reason: FinishReason
    usage: Usage
    ended_at_unix_s: float


class UsageReply(msgspec.Struct, frozen=True, kw_only=True, tag="usage_reply"):
    """`running`: still in this engine; `finished`: `entry` is set; `unknown`: never seen or lost.

    `is_gateway_connected`: the gateway that was asked for was heard of in the last `GATEWAY_TIMEOUT_S`.
    """

    query_id: int
    state: Literal["running", "finished", "unknown"]
    entry: JournalEntry | None = None
    is_gateway_connected: bool = False


class JournalReply(msgspec.Struct, frozen=True, kw_only=True, tag="journal_reply"):
    """`journal_id` names the file: sequence numbers start again when it is new."""

    query_id: int
    journal_id: str
    entries: list[JournalEntry]


class AdapterLoadTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long adapters took to come to host memory from a tier, `disk` or `store`."""

    loads_total: int  # since the engine's start
    last_s: float
    p50_s: float  # of the last 256, as is the next
    p95_s: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for consoles and routers; counters are since this incarnation's start."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_usage: float  # 0..1
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_finished_total: dict[str, int]  # by finish reason
    num_preemptions_total: int
    steps_total: int
    adapters_resident: list[str]  # digests in step slots
    adapters_host: list[str]  # digests in host memory (a superset)
    adapter_leases: int
    max_adapters_in_step: int  # most distinct adapters any step held
    mixed_steps_total: int  # steps that held at least two adapters and at least one base row
    rss_bytes: int
    uptime_s: float
    waiting_by_priority: dict[int, int] = {}
    queue_retry_after_s: float = 1.0  # what a request that is refused for a full queue is told
    skips_total: dict[str, int] = {}  # blocked requests passed over, once per step, by reason
    queue_time_counts: list[int] = []  # by wait before the first step: `queue_meter`'s buckets
    queue_time_seconds_total: float = 0.0
    # Fair scheduling; all 0 under another policy. In units of service: `policies.fair`.
    service_gap: float = 0.0  # widest seen between the accounts of two tenants who wait
    service_gap_promised: float = 0.0  # widest that was possible, given what was admitted
    service_gap_bound: float = 0.0  # widest that its limits and the tenants of now allow
    prefix_cache_query_tokens_total: int = 0  # prompt tokens looked up, once per request
    prefix_cache_hit_tokens_total: int = 0
    spec_drafts_total: int = 0  # blocks of draft tokens: rows and steps that had some
    spec_draft_tokens_total: int = 0
    spec_accepted_tokens_total: int = 0
    spec_accepted_per_position_total: list[int] = []  # by the token's place in its block
    adapters_pinned: list[str] = []
    # Those of `--pin-adapter`, which are nobody else's to unpin; None: a release that does not say.
    adapters_pinned_at_start: list[str] | None = None
    # Wanted in memory by the operator, but not there: why the last try failed, by digest.
    adapters_pin_failed: dict[str, str] = {}
    adapters_loading: int = 0  # or waiting for a loader
    adapters_disk: int = 0  # copies of a remote store's
    adapter_disk_bytes: int = 0
    adapter_host_bytes: int = 0
    adapter_loads_total: int = 0
    adapter_load_failures_total: int = 0
    adapter_evictions_total: int = 0
    adapter_load_seconds_total: float = 0.0
    adapter_load_times: dict[str, AdapterLoadTimes] = {}  # by tier, of those that loads came from
    # A GPU's; empty or 0 on a CPU.
    device_memory_bytes: dict[str, int] = {}  # by use, as planned at start: `device.memory_profile`
    graphs_captured: int = 0  # recorded decoding steps
    graph_capture_seconds: float = 0.0
    graph_replays_total: int = 0  # steps that replayed one
    eager_steps_total: int = 0  # and those that did not
    grammar_queries_total: int = 0  # requests that brought a grammar, once each
    grammar_cache_hits_total: int = 0  # those whose grammar was there already, or known to fail
    grammar_compile_counts: list[int] = []  # by time: `structured.meter`'s buckets
    grammar_compile_seconds_total: float = 0.0
    grammar_failures_total: dict[str, int] = {}  # requests that their grammar ended, by error code
    grammar_masks_total: int = 0
    grammar_mask_seconds_total: float = 0.0  # of the step thread's CPU
    grammar_deferrals_total: int = 0  # rows and steps: masks had taken their part of it


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats_reply"):
    """Answer to `StatsQuery`."""

    query_id: int
    stats: EngineStats


PinRefusal = Literal[
    "invalid_digest",
    "no_store",  # the replica serves the base model only
    "too_many_pins",  # or everybody else would have fewer places than slots
    "pins_too_large",  # or everybody else would have less than half of the bytes
    "not_ready",  # it loads its model, or has stopped
    "busy",  # too many of these wait for the step to end: ask again
]


class PinReply(msgspec.Struct, frozen=True, kw_only=True, tag="pin_reply"):
    """Answer to `PinAdapter` and `UnpinAdapter`.

    Without a `refusal` it is done; the load, if one is needed, goes on. One that fails is tried again, and
    an adapter that turns out to be too large is let go: `EngineStats.adapters_pinned` and `adapters_host`
    say what became of it.
    """

    query_id: int
    pinned: list[str] = []  # digests, after this
    refusal: PinRefusal | None = None
    message: str = ""


EngineMessage = (
    StepFrame | Rejected | Accepted | Welcome | UsageReply | JournalReply | StatsReply | PinReply
)


# ---------------------------------------------------------------------------- replica registry


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica publishes in Redis under `REPLICA_KEY_PREFIX + replica_id` (JSON, with a TTL)."""

    replica_id: str
    incarnation: str
    address: str  # ipc://... or tcp://...
    curve_public_key: str | None  # Z85; set exactly when the address is TCP
    base_model: str  # the public name, for example "smollm2-135m"
    model_fingerprint: str
    kv_format: str
    device: str
    isa: str
    dtype: str
    torch_version: str
    backends: dict[str, str]  # {"attention": ..., "lora": ..., "linear": ..., "ops": ...}
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    state: Literal["starting", "ready", "draining"]
    started_at_unix_s: float
    row_rule_holds: bool
    events_address: str | None = None  # where block events are published; None: nowhere
    events_curve_public_key: str | None = None  # Z85; set exactly when that address is TCP
    # What is served, as `artifact.ModelIdentity`; empty: not said, as by replicas of older releases.
    base_revision: str = ""
    tokenizer_sha256: str = ""
    chat_template_sha256: str = ""


REPLICA_KEY_PREFIX = "loraplex:replica:"
REPLICA_TTL_S = 15

_ADAPTER_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_adapter_digest(text: str) -> bool:
    """Whether this is "sha256:" and 64 lower-case hex digits."""
    return _ADAPTER_DIGEST.fullmatch(text) is not None


_gateway_decoder = msgspec.msgpack.Decoder(GatewayMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: GatewayMessage | EngineMessage) -> bytes:
    """One message as one frame."""
    return _encoder.encode(message)


def decode_from_gateway(frame: bytes) -> GatewayMessage:
    """Parse a frame that a gateway sent.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: not a message of this protocol.
    """
    return _gateway_decoder.decode(frame)


def decode_from_engine(frame: bytes) -> EngineMessage:
    """Parse a frame that a replica sent; raises as `decode_from_gateway` does."""
    return _engine_decoder.decode(frame)
