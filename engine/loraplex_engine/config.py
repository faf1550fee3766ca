"""What an engine process is started with, and the sizes that follow from it.

Owns the settings' ranges and how many blocks the KV cache has; no torch, so that the scheduler's tests and the
command line load it for free. What a block takes is the attention backend's to say; `dtype="auto"` is resolved
where torch is known (the runner).
Units: a block is `block_size` tokens; memory is bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from loraplex_engine.errors import ConfigError

DType = Literal["auto", "bfloat16", "float32"]
KvCacheDType = Literal["auto", "int8", "fp8"]
PolicyName = Literal["fair", "priority", "fcfs"]
Admission = Literal["optimistic", "reserve"]
Speculative = Literal["off", "auto", "ngram"]
DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "torch", "native", "triton"]
OpsBackendName = Literal["auto", "torch", "native"]
LinearBackendName = Literal["auto", "native", "onednn", "torch"]
Quantization = Literal["none", "int8", "int4"]

DEFAULT_KV_MEMORY_BYTES = 512 * 1024**2
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# Where a setting is the device's to decide. A GPU computes many rows in about the time of one, and needs
# thousands of tokens to be busy in prefill.
DEFAULT_BATCHED_TOKENS = 512
DEFAULT_GPU_BATCHED_TOKENS = 8192
DEFAULT_SEQS = 64
DEFAULT_GPU_SEQS = 256
_BY_DEVICE = ("max_num_batched_tokens", "max_num_seqs")
MAX_BLOCK_SIZE = 512
MAX_LORA_RANK = 512
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_SPECULATIVE_TOKENS = 64

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": get_args(DType),
    "kv_cache_dtype": get_args(KvCacheDType),
    "device": get_args(DeviceName),
    "attention_backend": get_args(BackendName),
    "lora_backend": get_args(BackendName),
    "ops_backend": get_args(OpsBackendName),
    "linear_backend": get_args(LinearBackendName),
    "quantization": get_args(Quantization),
    "policy": get_args(PolicyName),
    "admission": get_args(Admission),
    "speculative": get_args(Speculative),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine process, checked when made.

    Raises:
        ConfigError: a value is out of its range or contradicts another; the message names the setting
            and the remedy.
    """

    model_dir: Path  # Hugging Face folder of the base model
    base_model: str  # its public name
    dtype: DType = "auto"  # auto: bfloat16 where the device computes it fast, else float32
    # What keys and values are kept in. auto: the model's dtype. int8, fp8: half of bfloat16's memory and reads, with
    # a scale for every token and head, and not quite the same answers; on a GPU only, fp8 from sm_89 on.
    kv_cache_dtype: KvCacheDType = "auto"
    device: DeviceName = "auto"  # auto: the first GPU that torch sees, else the CPU
    # auto: triton on a GPU; on a CPU native, and torch where that does not compile. Triton on a CPU is
    # Triton's interpreter, for tests.
    attention_backend: BackendName = "auto"
    lora_backend: BackendName = "auto"
    # Norms, rotation, activation: the same, but that with Triton's attention they are Triton's.
    ops_backend: OpsBackendName = "auto"
    # Of a CPU. auto: native, in bf16 with the products that the CPU has in hardware, and what torch has where that does
    # not compile.
    linear_backend: LinearBackendName = "auto"
    # What the linears' weights are rounded to as they are loaded, on a CPU: a quarter or a sixth of fp32's memory
    # and reads, and not quite the same answers. Embeddings stay; lm_head has eight bits in both.
    quantization: Quantization = "none"
    # On a GPU: take the launch plans under which a row's bits do not depend on its neighbours, nor on how its
    # prompt was cut up, found in the cache or computed again, nor on drafts, at some cost in speed. On a
    # CPU they never do.
    batch_invariant: bool = False
    cuda_graphs: bool = True  # on a GPU: decode by replaying recorded launches
    # Of a GPU's memory, what the engine may take in all; None: 0.9, unless the KV cache's size is given.
    gpu_memory_utilization: float | None = None
    block_size: int = 16
    num_blocks: int | None = None  # None: from kv_memory_bytes
    # None: on a CPU 512 MiB, or one whole context where that is more; on a GPU what the rest leaves.
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None  # None: what the model and the KV cache hold
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS  # computed per step, over all rows
    max_num_seqs: int = DEFAULT_SEQS  # rows
    # Names of those of the last two that nobody gave: `for_device` sets them.
    by_device: frozenset[str] = frozenset()
    max_waiting: int = 256  # queued requests; more are refused
    policy: PolicyName = "fair"  # who is served first: `policies`
    aging_s: float = 30.0  # waiting for so long outweighs a step of priority, or earns a turn
    # optimistic: admit what there is room for now, preempt when it runs out; reserve: only what has
    # room for its prompt and max_tokens, so that nobody is preempted.
    admission: Admission = "optimistic"
    long_prefill_token_threshold: int | None = None  # per row and step; None: no bound
    max_partial_prefills: int | None = None  # rows amid a long prefill at once; None: no bound
    waiting_served_ratio: float = 0.0  # admit only while so many wait for each that runs; 0: always
    max_steps_closed: int = 20  # or when this many steps have admitted nobody
    kv_watermark: float = 0.02  # share of blocks kept free for running rows when admitting
    prefix_cache: bool = True  # keep what was computed and find it again, per tenant and adapter
    # Of all blocks, what each tenant's cached ones may take while others need room; None: by weight.
    prefix_cache_tenant_share: float | None = None
    public_prefix_file: Path | None = None  # prefixes that all tenants share: `kv.public_prefix`
    max_loras: int = 16  # adapter slots: most distinct adapters in a step
    max_cpu_loras: int = 64  # adapters kept in host memory, those in slots included
    max_cpu_lora_bytes: int = 1024**3  # memory they may take
    adapter_idle_s: float | None = None  # unused so long, it leaves host memory; None: never
    adapter_cache_bytes: int = 10 * 1024**3  # disk for copies of a remote store's adapters
    pinned_adapters: tuple[str, ...] = ()  # digests, loaded at start and kept in host memory
    max_lora_rank: int = 64
    store_url: str | None = None  # fsspec URL of the adapter store; None: base model only
    num_threads: int | None = None  # None: from the cgroup quota
    grammar_cpu_limit_s: float = 2.0  # to compile one
    grammar_memory_bytes: int = 512 * 1024**2  # to compile one
    grammar_cache_bytes: int = 64 * 1024**2  # compiled ones kept; half of it at most a tenant's
    # Guess tokens from what was said before. auto: when measured to pay; ngram: always. The text is the same.
    speculative: Speculative = "auto"
    num_speculative_tokens: int = 7  # most guesses per row and step
    ngram_min: int = 2  # shortest repetition to guess from, in tokens
    ngram_max: int = 4  # longest that is looked for

    def __post_init__(self) -> None:
        if not self.base_model:
            raise ConfigError("base_model is empty: give the name that clients will use")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                choices = ", ".join(known)
                raise ConfigError(f"{name} is {getattr(self, name)!r}: choose one of {choices}")
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_waiting",
            "max_steps_closed",
            "max_loras",
            "max_cpu_loras",
            "max_cpu_lora_bytes",
            "grammar_memory_bytes",
            "grammar_cache_bytes",
            "adapter_cache_bytes",
            "max_lora_rank",
            "num_speculative_tokens",
            "ngram_min",
        ):
            _require_positive(name, getattr(self, name))
        for name in (
            "num_blocks",
            "kv_memory_bytes",
            "max_model_len",
            "long_prefill_token_threshold",
            "max_partial_prefills",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None:
                _require_positive(name, value)
        if self.block_size > MAX_BLOCK_SIZE or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"block_size is {self.block_size}: use a power of two up to {MAX_BLOCK_SIZE}, such as 16"
            )
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ConfigError(
                "num_blocks and kv_memory_bytes both set the KV cache's size: give one"
            )
        _check_device(self)
        if not self.by_device <= set(_BY_DEVICE):
            raise ConfigError(f"by_device is {set(self.by_device)}: it may name {_BY_DEVICE} only")
        if self.max_num_batched_tokens < self.max_num_seqs and not self.by_device:
            # Fewer tokens than rows would leave the last rows without a token for as long as it lasts.
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs "
                f"{self.max_num_seqs}: each row needs a token per step; raise the first or lower the second"
            )
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, below max_loras {self.max_loras}: "
                "an adapter in a slot is in host memory too; raise the first or lower the second"
            )
        if self.adapter_idle_s is not None and not self.adapter_idle_s > 0:
            raise ConfigError(
                f"adapter_idle_s is {self.adapter_idle_s}: use seconds above 0, or leave it out for never"
            )
        _check_pins(self)
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank is {self.max_lora_rank}: lower it to {MAX_LORA_RANK}")
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}: "
                f"lower it to {MAX_SPECULATIVE_TOKENS}, or use speculative=off for none"
            )
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"ngram_max is {self.ngram_max}, below ngram_min {self.ngram_min}: "
                "raise the first or lower the second"
            )
        share = self.prefix_cache_tenant_share
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                f"prefix_cache_tenant_share is {share}: use a share above 0 and up to 1, or leave it out"
                " for an equal one"
            )
        if self.public_prefix_file is not None and not self.prefix_cache:
            raise ConfigError(
                "public_prefix_file declares what is shared in the prefix cache, which is off: leave"
                " one of the two out"
            )
        if not 0.0 < self.aging_s < float("inf"):
            raise ConfigError(f"aging_s is {self.aging_s}: use seconds above 0, such as 30")
        if not 0.0 <= self.waiting_served_ratio < float("inf"):
            raise ConfigError(
                f"waiting_served_ratio is {self.waiting_served_ratio}: use 0 or more, such as 1.2"
            )
        if not 0.0 < self.grammar_cpu_limit_s <= 60.0:
            raise ConfigError(
                f"grammar_cpu_limit_s is {self.grammar_cpu_limit_s}: use seconds above 0, up to 60"
            )
        if not 0.0 <= self.kv_watermark <= 0.5:
            raise ConfigError(f"kv_watermark is {self.kv_watermark}: use a share between 0 and 0.5")

    def for_device(self, *, is_gpu: bool) -> EngineConfig:
        """These settings with what the device decides decided; the same where nothing is left to it.

        Raises:
            ConfigError: what it decides contradicts another setting.
        """
        if not self.by_device:
            return self
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if "max_num_batched_tokens" in self.by_device:
            tokens = DEFAULT_GPU_BATCHED_TOKENS if is_gpu else DEFAULT_BATCHED_TOKENS
        if "max_num_seqs" in self.by_device:
            seqs = min(DEFAULT_GPU_SEQS if is_gpu else DEFAULT_SEQS, tokens)
        return replace(
            self, max_num_batched_tokens=tokens, max_num_seqs=seqs, by_device=frozenset()
        )

    @property
    def most_seqs(self) -> int:
        """No fewer than `max_num_seqs` will be, whatever the device."""
        return DEFAULT_GPU_SEQS if "max_num_seqs" in self.by_device else self.max_num_seqs

    def longest(self, max_position_embeddings: int) -> int:
        """The longest sequence that is asked for, whatever the KV cache holds.

        Raises:
            ConfigError: max_model_len is more than the model's context.
        """
        wanted_len = self.max_model_len or max_position_embeddings
        if wanted_len > max_position_embeddings:
            raise ConfigError(
                f"max_model_len is {wanted_len}, but the model's context is {max_position_embeddings} "
                "tokens: lower it to that or leave it out"
            )
        return wanted_len

    def sizes(
        self,
        *,
        block_bytes: int,
        max_position_embeddings: int,
        free_bytes: int | None = None,
    ) -> EngineSizes:
        """The KV cache and the longest sequence for a model of this shape.

        The pool always holds at least one sequence of `max_model_len` tokens, so that a request that was
        admitted can finish once it is alone.

        Args:
            block_bytes: what a block takes in all layers together, scales of a quantized cache included.
            free_bytes: of a GPU, what the KV cache may take where no setting says; None: a CPU.

        Raises:
            ConfigError: max_model_len is more than the model's context or than the KV cache holds.
        """
        wanted_len = self.longest(max_position_embeddings)
        if self.num_blocks is not None:
            num_blocks, source = self.num_blocks, f"num_blocks {self.num_blocks}"
        elif self.kv_memory_bytes is not None:
            num_blocks = self.kv_memory_bytes // block_bytes
            source = f"kv_memory_bytes {self.kv_memory_bytes}"
        elif free_bytes is not None:
            num_blocks, source = free_bytes // block_bytes, "what the GPU's memory leaves"
        else:
            num_blocks = max(
                DEFAULT_KV_MEMORY_BYTES // block_bytes, -(-wanted_len // self.block_size)
            )
            source = "the default"
        num_slots = num_blocks * self.block_size
        if num_slots == 0:
            raise ConfigError(
                f"kv_memory_bytes is {self.kv_memory_bytes}, but one block of {self.block_size} tokens "
                f"takes {block_bytes} bytes: raise it"
            )
        if self.max_model_len is not None and num_slots < self.max_model_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but {source} holds {num_slots} tokens: lower it "
                f"to that, or give the KV cache {-(-self.max_model_len // self.block_size) * block_bytes} bytes"
            )
        return EngineSizes(
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            max_model_len=min(wanted_len, num_slots),
        )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What `EngineConfig.sizes` derived."""

    block_bytes: int  # in all layers
    num_blocks: int
    max_model_len: int  # longest prompt plus output, in tokens

    @property
    def kv_bytes(self) -> int:
        """Of the whole KV cache."""
        return self.num_blocks * self.block_bytes


def check_kv_cache_on_cpu(config: EngineConfig) -> None:
    """A CPU's own attention has no quantized cache; Triton's interpreter has.

    Raises:
        ConfigError: one is asked for.
    """
    if config.kv_cache_dtype != "auto" and config.attention_backend != "triton":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, but on a CPU keys and values are kept in the model's"
            " dtype: use kv_cache_dtype auto, or a GPU (--device cuda)"
        )


def _check_device(config: EngineConfig) -> None:
    for name in ("attention_backend", "lora_backend", "ops_backend"):
        backend = getattr(config, name)
        if config.device == "cuda" and backend in ("torch", "native"):
            raise ConfigError(
                f"{name} is {backend!r}, which computes on a CPU, but device is 'cuda': use"
                f" {'auto' if name == 'ops_backend' else 'triton'}"
            )
    if "triton" in (config.attention_backend, config.lora_backend) and config.ops_backend != "auto":
        raise ConfigError(
            f"ops_backend is {config.ops_backend!r}, but with a backend of triton these operations are Triton's"
            " too: use auto"
        )
    _check_linears(config)
    if config.kv_cache_dtype != "auto":
        if config.attention_backend in ("torch", "native"):
            raise ConfigError(
                f"kv_cache_dtype is {config.kv_cache_dtype!r}, but attention_backend {config.attention_backend!r}"
                " keeps keys and values in the model's dtype: use kv_cache_dtype auto, or attention_backend auto on"
                " a GPU"
            )
        if config.device == "cpu":
            check_kv_cache_on_cpu(config)
    share = config.gpu_memory_utilization
    if share is None:
        return
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f"gpu_memory_utilization is {share}: use a share above 0 and up to 1, such as 0.9"
        )
    if config.device == "cpu":
        raise ConfigError(
            "gpu_memory_utilization is given, but device is 'cpu': leave it out, or use kv_memory_bytes"
        )
    if config.num_blocks is not None or config.kv_memory_bytes is not None:
        given = "num_blocks" if config.num_blocks is not None else "kv_memory_bytes"
        raise ConfigError(
            f"gpu_memory_utilization and {given} both set the KV cache's size: give one"
        )


def check_linears_on_gpu(config: EngineConfig) -> None:
    """Raises `ConfigError` where a setting of the CPU's linears is given for a GPU, or for Triton's kernels."""
    for name, usual in (("linear_backend", "auto"), ("quantization", "none")):
        value = getattr(config, name)
        if value != usual:
            raise ConfigError(
                f"{name} is {value!r}, which is of a CPU's linear layers, but here they are a GPU's: use {usual},"
                " or --device cpu without Triton's backends"
            )


def _check_linears(config: EngineConfig) -> None:
    if config.device == "cuda" or "triton" in (config.attention_backend, config.lora_backend):
        check_linears_on_gpu(config)
    if config.quantization != "none" and config.linear_backend in ("onednn", "torch"):
        raise ConfigError(
            f"quantization is {config.quantization!r}, but linear_backend {config.linear_backend!r} keeps weights as"
            " they are: use linear_backend auto, or quantization none"
        )


def _check_pins(config: EngineConfig) -> None:
    for digest in config.pinned_adapters:
        if _DIGEST.fullmatch(digest) is None:
            raise ConfigError(
                f"pinned_adapters has {digest[:80]!r}: use digests, 'sha256:' and 64 hex digits"
            )
    if config.pinned_adapters and config.store_url is None:
        raise ConfigError("pinned_adapters needs store_url: there is nothing to load them from")
    max_pins = config.max_cpu_loras - config.max_loras
    if len(set(config.pinned_adapters)) > max_pins:
        raise ConfigError(
            f"pinned_adapters has {len(set(config.pinned_adapters))} digests, but max_cpu_loras "
            f"{config.max_cpu_loras} less max_loras {config.max_loras} leaves {max_pins} places: "
            "raise max_cpu_loras or pin fewer"
        )


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}: use 1 or more")
