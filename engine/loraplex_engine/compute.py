"""All that computes, put together for the device at hand: model, attention, adapters, runner.

On a CPU: the CPU's own backends. On a GPU: our Triton kernels, with everything that a step tells the device
staged in one copy, decoding steps recorded, and the KV cache sized by what a trial run leaves of the memory.
The Triton backends on a CPU run in Triton's interpreter, so that tests go the same way without a GPU.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import structlog
import torch
from loraplex_kernels.plans import PlanTable, open_plans
from loraplex_kernels.support import ARCHITECTURES, UnsupportedDeviceError, is_interpreted

from loraplex_engine.artifact import ModelShape, without_login
from loraplex_engine.attention.base import AttentionBackend
from loraplex_engine.attention.setup import AttentionDevice, open_attention
from loraplex_engine.config import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    EngineConfig,
    EngineSizes,
    check_kv_cache_on_cpu,
    check_linears_on_gpu,
)
from loraplex_engine.device.graphs import (
    CudaGraphBackend,
    DecodeGraphs,
    GraphBackend,
    GraphKey,
    row_buckets,
)
from loraplex_engine.device.inputs import StagedInputs
from loraplex_engine.device.memory_profile import (
    CudaMeter,
    MemoryPlan,
    largest_step,
    measure_use,
    plan_memory,
)
from loraplex_engine.device.selection import EngineDevice, select_device
from loraplex_engine.device.staging import Staging
from loraplex_engine.errors import ConfigError
from loraplex_engine.lora.seam import CapturableLora, LoraBackend
from loraplex_engine.lora.setup import Lora, LoraDevice, open_lora
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import load_decoder, resolve_dtype
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits, build_runner, load_model
from loraplex_engine.sampling.setup import open_scan, open_survivors
from loraplex_engine.threads import usable_cpus

if TYPE_CHECKING:
    from loraplex_engine.sampling.triton_sampler import TritonSampler

log = structlog.get_logger(__name__)

# The kernels that the interpreter runs are those of this table.
_INTERPRETED_ARCH: Final = "sm_90"
# Up to so many rows the sampling kernels take one plan, beyond another.
_FEW_ROWS: Final = 64
# The start-up self-check tries steps of so many rows, whatever is served.
_MIN_ROWS: Final = 130

_Stage = Literal[
    "the weights", "the adapter slots", "the largest step", "the KV cache", "the graphs"
]
_OUT_OF_MEMORY: Final[dict[_Stage, str]] = {
    "the weights": "take a smaller model or a larger GPU",
    "the adapter slots": "lower max_loras or max_lora_rank",
    "the largest step": "lower max_num_batched_tokens, max_num_seqs or num_speculative_tokens",
    "the KV cache": "lower gpu_memory_utilization, num_blocks or kv_memory_bytes",
    "the graphs": "lower gpu_memory_utilization, or use --no-cuda-graphs",
}


@dataclass(frozen=True, slots=True)
class Compute:
    """What `open_compute` made."""

    device: EngineDevice
    model: Decoder
    sizes: EngineSizes
    attention: AttentionBackend[Any, Any]
    lora: Lora | None
    runner: ModelRunner
    plans: PlanTable | None  # of Triton kernels; None: the CPU's own backends
    memory: MemoryPlan | None  # of a GPU


def open_compute(
    config: EngineConfig,
    *,
    cache: Path,
    graph_backend: GraphBackend | None = None,
    device: EngineDevice | None = None,
) -> Compute:
    """Load the model and make its surroundings.

    Args:
        cache: folder for compiled kernels and fetched adapters.
        graph_backend: records decoding steps; None: CUDA graphs on a GPU, nothing on a CPU.
        device: None: as `config.device` says.

    Raises:
        ModelError, ConfigError: the model folder or a setting is wrong, or does not fit the device.
    """
    device = device or select_device(config.device)
    config = config.for_device(is_gpu=device.is_cuda)
    _check_backends(config, device)
    if device.is_cuda:
        torch.cuda.set_device(device.torch_device)
    if device.is_cuda or "triton" in (config.attention_backend, config.lora_backend):
        return _TritonAssembly(config, device, cache, graph_backend).build()
    if config.gpu_memory_utilization is not None:
        log.warning("setting_has_no_effect", setting="gpu_memory_utilization", device=device.name)
    model, sizes = load_model(config, cache=cache)
    lora = _open_lora(config, cache, None, dtype=model.dtype)
    attention = open_attention(
        model.attention_shape,
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        cache_dir=cache,
        num_threads=torch.get_num_threads(),
        backend=config.attention_backend,
    )
    runner = build_runner(
        config,
        model,
        sizes,
        attention=attention,
        lora=lora.backend if lora else None,
        slots=lora.pool if lora else None,
        survivors=open_survivors(cache),
        scan=open_scan(cache, torch.get_num_threads()),
    )
    return Compute(device, model, sizes, attention, lora, runner, None, None)


def _check_backends(config: EngineConfig, device: EngineDevice) -> None:
    if device.is_cuda and config.ops_backend != "auto":
        raise ConfigError(
            f"ops_backend is {config.ops_backend!r}, which computes on a CPU, but this engine runs on"
            f" {device.name}: use auto, or --device cpu"
        )
    if device.is_cuda:
        check_linears_on_gpu(config)
    for name in ("attention_backend", "lora_backend"):
        backend = getattr(config, name)
        if device.is_cuda and backend not in ("auto", "triton"):
            raise ConfigError(
                f"{name} is {backend!r}, which computes on a CPU, but this engine runs on {device.name}:"
                " use triton, or --device cpu"
            )
        if not device.is_cuda and backend == "triton" and not is_interpreted():
            raise ConfigError(
                f"{name} is 'triton', which needs a GPU, and the device is a CPU: use auto (for tests there is"
                " Triton's interpreter, TRITON_INTERPRET=1)"
            )
    if not device.is_cuda:
        check_kv_cache_on_cpu(config)
    elif device.support is not None and config.kv_cache_dtype != "auto":
        # Before the weights are loaded; the backend would say it too.
        try:
            device.support.check(config.kv_cache_dtype)
        except UnsupportedDeviceError as error:
            raise ConfigError(
                f"kv_cache_dtype is {config.kv_cache_dtype!r} and this is {device.name}: {error}, or auto"
            ) from error
    if not device.is_cuda and config.lora_backend == "triton" != config.attention_backend:
        raise ConfigError(
            "lora_backend is 'triton' on a CPU, where attention_backend must be 'triton' too"
        )


def _open_lora(
    config: EngineConfig,
    cache: Path,
    on_device: LoraDevice | None,
    *,
    dtype: torch.dtype | None = None,
) -> Lora | None:
    if config.store_url is None:
        return None
    try:
        return open_lora(
            store_url=config.store_url,
            shape=ModelShape.from_config_json(config.model_dir / "config.json"),
            cache_dir=cache,
            max_loras=config.max_loras,
            max_cpu_loras=config.max_cpu_loras,
            max_cpu_lora_bytes=config.max_cpu_lora_bytes,
            max_disk_bytes=config.adapter_cache_bytes,
            idle_s=config.adapter_idle_s,
            max_lora_rank=config.max_lora_rank,
            backend=config.lora_backend,
            dtype=dtype,
            on_device=on_device,
        )
    except ValueError as error:
        raise ConfigError(f"--store-url {without_login(config.store_url)}: {error}") from error


def warm_up(runner: ModelRunner, max_tokens: int, *, lora: LoraBackend | None = None) -> int:
    """Run what requests may ask for, so that none waits for kernels to be compiled.

    Prefill steps of doubling size; rows that are filtered before they are drawn, few and many; decoding steps;
    copies of blocks; and adapters' kernels under each of their plans.

    Writes into the KV cache's first block: to be called before the first request.

    Returns:
        How many prefill steps it ran.
    """
    limits = runner.limits
    longest = min(max_tokens, limits.max_model_len)
    sizes = [2**exponent for exponent in range(1, longest.bit_length()) if 2**exponent < longest]
    for size in (*sizes, longest):
        runner.launch(largest_step(max_tokens=size, max_rows=1, max_len=longest, num_slots=0))
        runner.collect()
    for num_rows in sorted({min(_FEW_ROWS, limits.max_num_seqs), limits.max_num_seqs}):
        runner.launch(
            largest_step(
                max_tokens=num_rows,
                max_rows=num_rows,
                max_len=1,
                num_slots=0,
                sampling=SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9),
            )
        )
        runner.collect()
    if runner.graphs is not None:
        for num_rows in sorted({key.num_rows for key in runner.graphs.keys}):
            runner.forward_pass.run_stand_in(GraphKey(num_rows, 0))
    with torch.inference_mode():
        # Onto themselves. A compiler may tell one from several.
        for num_copies in sorted({1, min(2, limits.num_blocks)}):
            block_C = np.arange(num_copies, dtype=np.int64)
            runner.forward_pass.copy_blocks(np.stack((block_C, block_C), axis=1))
        if isinstance(lora, CapturableLora):
            lora.warm_up(runner.model.config.num_token_ids)
    return len(sizes) + 1


class _TritonAssembly:
    """The steps from settings to a runner on Triton backends, in the order that memory is taken."""

    def __init__(
        self,
        config: EngineConfig,
        device: EngineDevice,
        cache: Path,
        graph_backend: GraphBackend | None,
    ) -> None:
        self._config = config
        self._device = device
        self._cache = cache
        if graph_backend is None and device.is_cuda:
            graph_backend = CudaGraphBackend(device.torch_device)
        self._graph_backend = graph_backend
        self._stage: _Stage = "the weights"
        arch = device.support.name if device.support else _INTERPRETED_ARCH
        assert arch in ARCHITECTURES
        self._plans = open_plans(arch, "invariant" if config.batch_invariant else "fast")

    def build(self) -> Compute:
        """Raises as `open_compute` does."""
        try:
            return self._build()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self._device.name} ran out of memory at {self._stage}: {_OUT_OF_MEMORY[self._stage]}, or"
                " free the GPU of other processes"
            ) from error
        except UnsupportedDeviceError as error:
            raise ConfigError(f"{self._device.name}: {error}; or use --device cpu") from error

    def _build(self) -> Compute:
        config, device = self._config, self._device.torch_device
        torch.set_num_threads(config.num_threads or usable_cpus())
        dtype = resolve_dtype(config.dtype, device)
        model = load_decoder(config.model_dir, dtype, device=device, plans=self._plans)
        meter = CudaMeter(device) if self._device.is_cuda else None
        weights_bytes = meter.allocated() if meter else 0
        max_len = config.longest(model.config.max_position)
        max_rows = max(config.max_num_seqs, _MIN_ROWS)
        max_tokens = model.rows_for(max(config.max_num_batched_tokens, _MIN_ROWS))
        staging = Staging(device)
        inputs = StagedInputs(staging, config.max_num_seqs)
        sampler = self._sampler(staging)
        self._stage = "the adapter slots"
        lora = _open_lora(
            config,
            self._cache,
            LoraDevice(
                device=device,
                dtype=dtype,
                plans=self._plans,
                staging=staging,
                max_tokens=max_tokens,
                max_decode_tokens=config.max_num_seqs,
            ),
        )
        self._stage = "the largest step"
        attention = self._open_attention(
            model,
            AttentionDevice(
                device=device,
                plans=self._plans,
                staging=staging,
                max_tokens=max_tokens,
                max_rows=max_rows,
                max_blocks_per_row=-(-max_len // config.block_size),
            ),
        )
        inputs.reserve_large(max_tokens)
        sampler.reserve_large(max_tokens)
        staging.seal()
        graphs = self._graphs(lora)
        block_bytes = attention.kv_bytes_per_block() * model.config.num_layers
        given = None
        if self._is_size_given() or meter is None:
            given = self._sizes(model, block_bytes, None)
        runner = ModelRunner(
            model,
            attention,
            RunnerLimits(
                num_blocks=1,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_len,
            ),
            lora=lora.backend if lora else None,
            slots=lora.pool if lora else None,
            survivors=open_survivors(self._cache),
            scan=open_scan(self._cache, torch.get_num_threads()),
            inputs=inputs,
            graphs=graphs,
            on_device=sampler,
        )
        memory = None
        if meter is not None:
            use = measure_use(
                meter,
                runner,
                weights_bytes=weights_bytes,
                lora_bytes=lora.device_bytes if lora else 0,
                max_tokens=config.max_num_batched_tokens,
                num_drafts=self._most_drafts(),
                has_graphs=config.cuda_graphs,
            )
            memory = plan_memory(
                device_bytes=meter.device_bytes(),
                utilization=config.gpu_memory_utilization
                or (1.0 if given else DEFAULT_GPU_MEMORY_UTILIZATION),
                use=use,
                needed_kv_bytes=given.kv_bytes if given else block_bytes,
            )
            if given is not None:
                memory = replace(memory, kv_bytes=given.kv_bytes)
        self._stage = "the KV cache"
        sizes = given or self._sizes(model, block_bytes, memory.kv_bytes if memory else None)
        runner.resize(num_blocks=sizes.num_blocks, max_model_len=sizes.max_model_len)
        if self._device.is_cuda:
            warm_up(runner, config.max_num_batched_tokens, lora=lora.backend if lora else None)
        self._stage = "the graphs"
        if graphs is not None and config.cuda_graphs and self._graph_backend is not None:
            self._capture(runner, graphs)
        if memory is not None:
            log.info("device_memory", device=self._device.name, **memory.by_use())
        return Compute(self._device, model, sizes, attention, lora, runner, self._plans, memory)

    def _open_attention(
        self, model: Decoder, on_device: AttentionDevice
    ) -> AttentionBackend[Any, Any]:
        try:
            return open_attention(
                model.attention_shape,
                num_blocks=1,
                block_size=self._config.block_size,
                cache_dir=self._cache,
                num_threads=torch.get_num_threads(),
                backend=self._config.attention_backend,
                kv_cache_dtype=self._config.kv_cache_dtype,
                on_device=on_device,
            )
        except ValueError as error:
            raise ConfigError(
                f"this model's attention does not run on {self._device.name}: {error}; use --device cpu, or"
                " an attention_backend of the CPU there"
            ) from error

    def _sampler(self, staging: Staging) -> TritonSampler:
        # Not at the top: an engine on a CPU needs no Triton.
        from loraplex_engine.sampling.triton_sampler import TritonSampler

        return TritonSampler(staging, self._plans, self._config.max_num_seqs)

    def _graphs(self, lora: Lora | None) -> DecodeGraphs | None:
        """Steps padded to buckets; recorded or not is another question."""
        adapters: tuple[int, ...] = ()
        if lora is not None:
            if not isinstance(lora.backend, CapturableLora):
                return None
            adapters = lora.backend.active_buckets
        return DecodeGraphs(self._graph_backend, row_buckets(self._config.max_num_seqs), adapters)

    def _most_drafts(self) -> int:
        """Of a row in a step. Where the row rule is not promised, `auto` never drafts: see `build`."""
        config = self._config
        may_draft = config.speculative == "ngram" or (
            config.speculative == "auto" and self._plans.column == "invariant"
        )
        return config.num_speculative_tokens if may_draft else 0

    def _is_size_given(self) -> bool:
        return self._config.num_blocks is not None or self._config.kv_memory_bytes is not None

    def _sizes(self, model: Decoder, block_bytes: int, free_bytes: int | None) -> EngineSizes:
        return self._config.sizes(
            block_bytes=block_bytes,
            max_position_embeddings=model.config.max_position,
            free_bytes=free_bytes,
        )

    @staticmethod
    def _capture(runner: ModelRunner, graphs: DecodeGraphs) -> None:
        started = time.perf_counter()
        # Each recording collects garbage; what is there by now is not looked through a hundred times.
        gc.collect()
        gc.freeze()
        try:
            for key in graphs.keys:
                runner.forward_pass.capture(key)
        finally:
            gc.unfreeze()
        log.info(
            "graphs_captured", count=graphs.num_captured, seconds=time.perf_counter() - started
        )
