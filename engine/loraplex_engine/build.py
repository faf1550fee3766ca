"""Puts an engine together from its parts: model, runner, adapters, core.

`assemble_engine` is what the server runs; `build_engine` gives tests and benchmarks the bare core.
Call either on the thread that will step the engine: torch's threads are set for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog
import torch

from loraplex_engine.artifact import ModelShape, without_login
from loraplex_engine.block_events import BlockEvent
from loraplex_engine.compute import Compute, open_compute
from loraplex_engine.config import EngineConfig
from loraplex_engine.convert import cache_dir
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.device.memory_profile import MemoryPlan
from loraplex_engine.device.selection import select_device
from loraplex_engine.errors import AdapterUnavailableError, ConfigError, PinRefusedError
from loraplex_engine.fingerprint import fingerprint_model, hash_model, identify_base
from loraplex_engine.heap import give_back_freed_memory
from loraplex_engine.kv.setup import open_prefix_cache
from loraplex_engine.lora.setup import Lora
from loraplex_engine.lora.trial import make_trial
from loraplex_engine.protocol import EngineStats
from loraplex_engine.request import BlockReason
from loraplex_engine.row_rule import check_row_rule
from loraplex_engine.row_rule_verdict import recall_or_check
from loraplex_engine.runner import ModelRunner
from loraplex_engine.step import AdapterPool
from loraplex_engine.step_loop import ReplicaFacts
from loraplex_engine.structured.compiler import GrammarCompiler
from loraplex_engine.structured.setup import open_grammars

log = structlog.get_logger(__name__)

_MAX_REFUSALS_KNOWN = 64


class NoAdapters:
    """The adapter pool of an engine without a store: base model only."""

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        """Nothing to load from."""

    def lease(self, digest: str, tenant_id: str = "") -> int | None:
        """Raises `AdapterUnavailableError`, always."""
        raise AdapterUnavailableError(
            "this replica has no adapter store; start it with --store-url"
        )

    def is_loaded(self, digest: str) -> bool:
        """False: nothing is."""
        return False

    def why_refused(self, digest: str, tenant_id: str = "") -> BlockReason:
        """Never called: `lease` raises."""
        raise AssertionError("no lease was refused for now")

    def release(self, digest: str, tenant_id: str = "") -> None:
        """Never called: nothing is leased."""

    @property
    def num_leases(self) -> int:
        """0, always."""
        return 0


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """`step_loop.Engine`: the core and what it works with."""

    core: EngineCore
    facts: ReplicaFacts
    runner: ModelRunner
    lora: Lora | None
    grammars: GrammarCompiler | None = None
    memory: MemoryPlan | None = None  # of a GPU
    pinned_at_start: tuple[str, ...] = ()
    refused_pins: dict[str, str] = field(default_factory=dict)  # digest -> why, of the last tries

    def attach(self, wake: Callable[[], None], observe_load: Callable[[str, float], None]) -> None:
        """Whom to tell of adapter loads: see `step_loop.Engine`."""
        if self.lora is not None:
            self.lora.pool.loader.on_loaded = wake
            self.lora.pool.observe_load = observe_load

    def prefetch(self, digest: str) -> None:
        """Start loading an adapter."""
        if self.lora is not None:
            self.lora.pool.prefetch(digest)

    def pin(self, digest: str) -> None:
        """Keep an adapter in host memory. Raises `PinRefusedError`."""
        if self.lora is None:
            raise PinRefusedError("no_store", "there is no adapter store: start with --store-url")
        try:
            self.lora.pool.pin(digest)
        except PinRefusedError as error:
            self.refused_pins.pop(digest, None)
            self.refused_pins[digest] = str(error)
            if len(self.refused_pins) > _MAX_REFUSALS_KNOWN:
                self.refused_pins.pop(next(iter(self.refused_pins)))
            raise
        self.refused_pins.pop(digest, None)

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted like any other."""
        self.refused_pins.pop(digest, None)
        if self.lora is not None:
            self.lora.pool.unpin(digest)

    @property
    def pinned(self) -> frozenset[str]:
        """Digests that are kept."""
        return self.lora.pool.pinned if self.lora is not None else frozenset()

    def tidy(self) -> None:
        """Let idle adapters go."""
        if self.lora is not None:
            self.lora.pool.tidy()

    def stats(self) -> EngineStats:
        """The core's, with the device and the adapter tiers."""
        stats = self.core.stats()
        if self.memory is not None:
            stats = msgspec.structs.replace(stats, device_memory_bytes=self.memory.by_use())
        graphs = self.runner.graphs
        if graphs is not None:
            stats = msgspec.structs.replace(
                stats,
                graphs_captured=graphs.num_captured,
                graph_capture_seconds=graphs.capture_s,
                graph_replays_total=graphs.replays_total,
                eager_steps_total=graphs.eager_total,
            )
        if self.lora is None:
            return stats
        self.lora.pool.tidy()
        pool = self.lora.pool.stats()
        return msgspec.structs.replace(
            stats,
            adapters_resident=list(pool.resident),
            adapters_host=list(pool.host),
            adapter_host_bytes=pool.host_bytes,
            adapters_pinned=list(pool.pinned),
            adapters_pinned_at_start=list(self.pinned_at_start),
            adapters_pin_failed={**self.refused_pins, **pool.pin_failures},
            adapters_loading=len(pool.loading) + pool.queued,
            adapters_disk=pool.disk_adapters,
            adapter_disk_bytes=pool.disk_bytes,
            adapter_loads_total=pool.loads_total,
            adapter_load_failures_total=pool.load_failures_total,
            adapter_evictions_total=pool.evictions_total,
            adapter_load_seconds_total=pool.load_seconds_total,
            adapter_load_times=pool.load_times,
        )

    def close(self) -> None:
        """Stop the adapter loaders and the grammar compiler."""
        if self.lora is not None:
            self.lora.pool.close()
        if self.grammars is not None:
            self.grammars.close()


def assemble_engine(
    config: EngineConfig,
    *,
    image: str = "",
    cache: Path | None = None,
    publish_block_event: Callable[[BlockEvent], None] | None = None,
) -> AssembledEngine:
    """Load the model and make everything ready for the first request.

    Args:
        image: digest of the container image, if any: part of the fingerprint.
        cache: for compiled kernels and fetched adapters; None: LORAPLEX_CACHE_DIR.
        publish_block_event: is told of every change in the prefix cache, on the step's thread.

    Raises:
        ModelError, ConfigError: the model folder or a setting is wrong.
    """
    cache = cache or cache_dir()
    device = select_device(config.device)
    config = config.for_device(is_gpu=device.is_cuda)
    compute = open_compute(config, cache=cache, device=device)
    model, sizes, attention = compute.model, compute.sizes, compute.attention
    lora, runner = compute.lora, compute.runner
    if lora is not None:
        try:
            for digest in config.pinned_adapters:
                lora.pool.pin(digest)
        except PinRefusedError as error:
            raise ConfigError(
                f"--store-url {without_login(config.store_url or '')}: {error}"
            ) from error
    adapters: AdapterPool = lora.pool if lora else NoAdapters()
    dtype = str(model.dtype).removeprefix("torch.")
    digests = hash_model(config.model_dir)
    fingerprint = fingerprint_model(
        digests,
        dtype=dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        image=image,
    )
    # What a block holds does not depend on how many ranks share it. The backend's name says what it is kept in, and
    # by which arithmetic it attends.
    block_format = f"{attention.name}/block{config.block_size}/{dtype}"
    eos_token_ids = frozenset(model.config.eos_token_ids)
    grammars = open_grammars(config, model.config.num_token_ids, eos_token_ids)
    core = build_core(
        config,
        sizes,
        runner,
        adapters,
        vocab_size=model.config.num_token_ids,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        prefix_cache=open_prefix_cache(
            config,
            sizes,
            model_fingerprint=fingerprint,
            # Keys and values have the bits of all who computed them: others' blocks are no substitute.
            kv_format="/".join(
                (block_format, model.linear_name, lora.name if lora else "none", model.ops.name)
            ),
            vocab_size=model.config.num_token_ids,
            publish=publish_block_event,
        ),
    )
    backends = {
        "attention": attention.name,
        "lora": lora.name if lora else "none",
        "linear": model.linear_name,
        "ops": model.ops.name,
        "quantization": config.quantization,
        "kv_cache": dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
    }
    if compute.plans is not None:
        backends["plans"] = compute.plans.column
    row_rule_holds = _does_row_rule_hold(config, compute, cache, fingerprint, backends)
    if config.speculative == "auto" and not row_rule_holds:
        # Tokens of one row computed together may then be other tokens than one by one.
        core.stop_drafting()
    facts = ReplicaFacts(
        model_fingerprint=fingerprint,
        kv_format=f"{block_format}/tp1",
        device=compute.device.name,
        isa=compute.device.isa,
        dtype=dtype,
        torch_version=str(torch.__version__),
        backends=backends,
        max_model_len=sizes.max_model_len,
        row_rule_holds=row_rule_holds,
        identity=identify_base(config.model_dir, digests),
    )
    # Loading and the self-check took more than serving does.
    give_back_freed_memory()
    log.info(
        "engine_assembled",
        num_blocks=sizes.num_blocks,
        kv_bytes=sizes.kv_bytes,
        kv_cache_dtype=backends["kv_cache"],
        num_threads=torch.get_num_threads(),
    )
    return AssembledEngine(
        core, facts, runner, lora, grammars, compute.memory, tuple(config.pinned_adapters)
    )


_MOST_GPU_ROWS = 1024


def _does_row_rule_hold(
    config: EngineConfig,
    compute: Compute,
    cache: Path,
    fingerprint: str,
    backends: dict[str, str],
) -> bool:
    if compute.plans is not None and not (
        compute.device.is_cuda and compute.plans.column == "invariant"
    ):
        # `fast` plans do not promise it, and what the interpreter computes no user sees.
        log.info("row_rule_not_promised", plans=compute.plans.column, device=compute.device.name)
        return False
    shape = ModelShape.from_config_json(config.model_dir / "config.json")
    max_rows = config.max_num_batched_tokens
    if compute.device.is_cuda:
        # The KV cache has left little memory, and beyond some tiles a kernel of one plan does nothing new.
        max_rows = min(max_rows, _MOST_GPU_ROWS)
    return recall_or_check(
        cache / "row_rule",
        {
            "model": fingerprint,
            "backends": backends,
            "device": [compute.device.name, compute.device.isa],
            "block_size": config.block_size,
            "max_rows": max_rows,
        },
        lambda: (
            check_row_rule(
                compute.runner,
                lora=make_trial(compute.lora, shape) if compute.lora else None,
                max_rows=max_rows,
            ).holds
        ),
    )


def build_engine(config: EngineConfig) -> EngineCore:
    """A core ready to `add` and `step`; same errors as `assemble_engine`."""
    return assemble_engine(config).core
