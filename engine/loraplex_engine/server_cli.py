"""The flags of `python -m loraplex_engine.server`, each also an environment variable.

A flag `--max-loras` is read from LORAPLEX_ENGINE_MAX_LORAS when it is not given, and that, where it is not set, from
the file `loraplex_engine_max_loras` of LORAPLEX_SECRETS_DIR: for a Redis's URL, whose password no environment holds.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import structlog

from loraplex_engine.config import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_GPU_BATCHED_TOKENS,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_GPU_SEQS,
    DEFAULT_SEQS,
    Admission,
    BackendName,
    DeviceName,
    EngineConfig,
    KvCacheDType,
    LinearBackendName,
    OpsBackendName,
    PolicyName,
    Quantization,
)
from loraplex_engine.errors import ConfigError, EngineError
from loraplex_engine.gateway_port import GATEWAY_QUEUE_BYTES
from loraplex_engine.numerics_environment import prepare_numerics
from loraplex_engine.server import EXIT_USAGE, EngineServer, ServerOptions
from loraplex_engine.step_loop import Engine

log = structlog.get_logger(__name__)

ENV_PREFIX = "LORAPLEX_ENGINE_"
_LOG_LEVELS = ("debug", "info", "warning", "error")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Names a default only where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, ""):
            return action.help
        return super()._get_help_string(action)


def with_secret_files(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, and what lies in LORAPLEX_SECRETS_DIR for variables that it does not set.

    Raises:
        ConfigError: there is no such folder.
    """
    found = dict(environ)
    folder = environ.get("LORAPLEX_SECRETS_DIR")
    if not folder:
        return found
    if not Path(folder).is_dir():
        raise ConfigError(f"LORAPLEX_SECRETS_DIR is {folder}, and there is no such folder")
    for path in Path(folder).glob(f"{ENV_PREFIX.lower()}*"):
        if path.is_file():
            found.setdefault(path.name.upper(), path.read_text().strip())
    return found


def make_parser(environ: dict[str, str]) -> argparse.ArgumentParser:
    """The flags; defaults come from `environ` where it has them."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex_engine.server",
        description="Serve one base model with many LoRA adapters to gateways, over ZeroMQ.",
        epilog=(
            f"Each flag is also an environment variable: --max-loras is {ENV_PREFIX}MAX_LORAS. "
            "SIGTERM drains and exits 0; exit 2 means wrong settings, 70 that the engine failed."
        ),
        formatter_class=_HelpFormatter,
    )

    def flag(
        group: argparse._ArgumentGroup,
        name: str,
        text: str,
        **how: Any,  # noqa: ANN401 - argparse's own keywords
    ) -> None:
        variable = ENV_PREFIX + name.removeprefix("--").replace("-", "_").upper()
        if variable in environ:
            how.pop("required", None)
            value = environ[variable]
            is_switch = how.get("action") in ("store_true", argparse.BooleanOptionalAction)
            how["default"] = value.lower() in ("1", "true", "yes", "on") if is_switch else value
        group.add_argument(name, help=text, **how)

    model = parser.add_argument_group("model")
    flag(model, "--model-dir", "Hugging Face folder of the base model.", type=Path, required=True)
    flag(model, "--base-model", "Its public name.", default="smollm2-135m")
    flag(
        model,
        "--dtype",
        "auto: bfloat16 where the device computes it fast, else float32.",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
    )
    flag(
        model,
        "--quantization",
        "int8, int4: on a CPU, linear layers in a quarter or a sixth of float32's memory, and not quite the same"
        " answers; the log says how much is lost.",
        default="none",
        choices=get_args(Quantization),
    )
    flag(model, "--max-model-len", "Longest prompt plus output, in tokens.", type=int)
    flag(model, "--image", "Digest of the container image; part of the fingerprint.", default="")

    device = parser.add_argument_group("device")
    flag(
        device,
        "--device",
        "auto: the first GPU that torch sees, else the CPU.",
        default="auto",
        choices=get_args(DeviceName),
    )
    flag(
        device,
        "--attention-backend",
        "auto: triton on a GPU; on a CPU native, or torch where that does not compile.",
        default="auto",
        choices=get_args(BackendName),
    )
    flag(
        device,
        "--lora-backend",
        "The same for adapters.",
        default="auto",
        choices=get_args(BackendName),
    )
    flag(
        device,
        "--ops-backend",
        "The same for norms, rotation and activation, which on a GPU are always Triton's.",
        default="auto",
        choices=get_args(OpsBackendName),
    )
    flag(
        device,
        "--linear-backend",
        "Of a CPU. auto: native, for bfloat16 in the products that the CPU has in hardware, or what torch has where"
        " that does not compile. onednn is kept from the tiles of AMX, where its sums depend on the number of rows: there"
        " bfloat16 prompts take much longer than with native.",
        default="auto",
        choices=get_args(LinearBackendName),
    )
    flag(
        device,
        "--batch-invariant",
        "On a GPU: a row's bits do not depend on its neighbours, nor on how its prompt was cut up, found in"
        " the cache or computed again, nor on guesses, at some cost in speed; on a CPU they never do.",
        action="store_true",
    )
    flag(
        device,
        "--cuda-graphs",
        "On a GPU: decode by replaying recorded launches; start-up takes longer.",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    flag(
        device,
        "--gpu-memory-utilization",
        "Of the GPU's memory, what the engine may take in all, 0 to 1; by default"
        f" {DEFAULT_GPU_MEMORY_UTILIZATION}. What weights, adapters, graphs and a step leave of it is the"
        " KV cache's, unless that one's size is given.",
        type=float,
    )

    wire = parser.add_argument_group("gateways")
    flag(
        wire,
        "--address",
        "Where to listen: ipc:///dir/engine.sock in a folder closed to others, or tcp://host:port"
        " with CURVE keys.",
        required=True,
    )
    flag(wire, "--advertise-address", "What gateways connect to, if it differs.")
    flag(wire, "--replica-id", "Name of this replica, unique in the fleet.", default="engine-0")
    flag(
        wire,
        "--journal-dir",
        "Folder of the usage journal; keep it: bills are settled from it.",
        type=Path,
        required=True,
    )
    flag(wire, "--redis-url", "Where to register; without it, gateways need the address.")
    flag(
        wire,
        "--curve-secret-key-file",
        "File with our secret key, from python -m loraplex_engine.curve.",
        type=Path,
    )
    flag(
        wire,
        "--curve-allowed-keys-file",
        "Public keys of the gateways that may connect, one a line.",
        type=Path,
    )
    flag(
        wire,
        "--gateway-timeout-s",
        "A gateway silent for so long is dead.",
        type=float,
        default=15.0,
    )
    flag(
        wire,
        "--gateway-queue-bytes",
        "A gateway for which more waits than this is too slow: its requests end with an error.",
        type=int,
        default=GATEWAY_QUEUE_BYTES,
    )

    batch = parser.add_argument_group("batching and memory")
    flag(batch, "--block-size", "Tokens per KV block.", type=int, default=16)
    flag(batch, "--num-blocks", "KV blocks, instead of --kv-memory-bytes.", type=int)
    flag(batch, "--kv-memory-bytes", "Memory of the KV cache.", type=int)
    flag(
        batch,
        "--kv-cache-dtype",
        "What keys and values are kept in. auto: the model's dtype; int8, fp8: half of bfloat16's memory and"
        " slightly other answers, on a GPU only, fp8 from compute capability 8.9 on.",
        default="auto",
        choices=get_args(KvCacheDType),
    )
    flag(
        batch,
        "--max-num-batched-tokens",
        f"Tokens per step; by default {DEFAULT_BATCHED_TOKENS} on a CPU, {DEFAULT_GPU_BATCHED_TOKENS} on a"
        " GPU.",
        type=int,
    )
    flag(
        batch,
        "--max-num-seqs",
        f"Requests that run at once; by default {DEFAULT_SEQS} on a CPU, {DEFAULT_GPU_SEQS} on a GPU, and"
        " no more than there are tokens per step.",
        type=int,
    )
    flag(batch, "--max-waiting", "Requests that may queue.", type=int, default=256)
    flag(batch, "--kv-watermark", "Share kept free when admitting.", type=float, default=0.02)

    queue = parser.add_argument_group("scheduling")
    flag(
        queue,
        "--policy",
        "Who is served first. fair: equal shares for tenants, by weight, within priority classes;"
        " priority: urgent first, with aging; fcfs: strictly by priority, then arrival.",
        default="fair",
        choices=get_args(PolicyName),
    )
    flag(
        queue,
        "--aging-s",
        "Seconds of waiting that outweigh a step of priority (priority), or after which a class that"
        " was passed over gets a turn (fair).",
        type=float,
        default=30.0,
    )
    flag(
        queue,
        "--admission",
        "optimistic: admit what there is room for now, preempt the last in line when it runs out;"
        " reserve: only what has room for its prompt and max_tokens, so that nobody is preempted.",
        default="optimistic",
        choices=get_args(Admission),
    )
    flag(
        queue,
        "--long-prefill-token-threshold",
        "Most prompt tokens of one request in a step.",
        type=int,
    )
    flag(
        queue,
        "--max-partial-prefills",
        "Requests amid a prefill that takes several steps; shorter ones pass the rest.",
        type=int,
    )
    flag(
        queue,
        "--waiting-served-ratio",
        "Admit only while so many requests wait for each that runs: fewer steps are slowed down by"
        " prefills, and first tokens come later; 0: admit always.",
        type=float,
        default=0.0,
    )
    flag(
        queue,
        "--max-steps-closed",
        "With that ratio: admit after so many steps in any case.",
        type=int,
        default=20,
    )
    flag(batch, "--num-threads", "CPU threads; by default what the cgroup allows.", type=int)

    cache = parser.add_argument_group("prefix cache")
    flag(
        cache,
        "--no-prefix-cache",
        "Keep nothing that was computed for the next request with the same beginning.",
        action="store_true",
    )
    flag(
        cache,
        "--prefix-cache-tenant-share",
        "Of all KV blocks, what each tenant's cached ones may take while others need room, 0 to 1; by"
        " default a share by its weight.",
        type=float,
    )
    flag(
        cache,
        "--public-prefix-file",
        "JSON list of texts or token-id lists, no secrets, that all tenants share in the cache.",
        type=Path,
    )
    flag(
        cache,
        "--events-address",
        "Publish which blocks are cached, for routers: ipc:///dir/events.sock or tcp://host:port,"
        " protected as --address is.",
    )
    flag(cache, "--advertise-events-address", "What routers connect to, if it differs.")

    lora = parser.add_argument_group("adapters")
    flag(lora, "--store-url", "fsspec URL of the adapter store, file:///path or s3://bucket.")
    flag(lora, "--max-loras", "Adapter slots: most adapters in one step.", type=int, default=16)
    flag(lora, "--max-cpu-loras", "Adapters kept in host memory.", type=int, default=64)
    flag(
        lora,
        "--max-cpu-lora-bytes",
        "Memory that adapters may take; one that needs more is refused.",
        type=int,
        default=1024**3,
    )
    flag(
        lora,
        "--adapter-idle-s",
        "Unused for so long, an adapter leaves host memory; by default never.",
        type=float,
    )
    flag(
        lora,
        "--adapter-cache-bytes",
        "Disk for copies of a remote store's adapters.",
        type=int,
        default=10 * 1024**3,
    )
    flag(
        lora,
        "--pin-adapter",
        "Digest of an adapter to load at start and keep in host memory; again for more, or separated by"
        " commas.",
        action="append",
        default=[],
    )
    flag(lora, "--max-lora-rank", "Highest rank accepted.", type=int, default=64)

    guessing = parser.add_argument_group(
        "speculation",
        "Guess tokens and verify several per step; the text is the same with and without.",
    )
    flag(
        guessing,
        "--speculative",
        "ngram: guess from what was said before, always; auto: when measured to pay; off: never.",
        default="auto",
        choices=("off", "auto", "ngram"),
    )
    flag(
        guessing,
        "--num-speculative-tokens",
        "Most guesses per request and step.",
        type=int,
        default=7,
    )
    flag(guessing, "--ngram-min", "Shortest repetition to guess from.", type=int, default=2)
    flag(guessing, "--ngram-max", "Longest repetition looked for.", type=int, default=4)

    grammars = parser.add_argument_group("structured output")
    flag(
        grammars,
        "--grammar-cpu-limit-s",
        "CPU seconds that compiling one grammar may take.",
        type=float,
        default=2.0,
    )
    flag(
        grammars,
        "--grammar-memory-bytes",
        "Memory that compiling one may take.",
        type=int,
        default=512 * 1024**2,
    )
    flag(
        grammars,
        "--grammar-cache-bytes",
        "Memory of compiled grammars kept; half of it at most is one tenant's.",
        type=int,
        default=64 * 1024**2,
    )

    process = parser.add_argument_group("process")
    flag(process, "--metrics-host", "Bind of /live /ready /metrics.", default="127.0.0.1")
    flag(process, "--metrics-port", "Their port; 0 picks a free one.", type=int, default=0)
    flag(process, "--metrics-port-file", "Write the real port there.", type=Path)
    flag(
        process,
        "--drain-grace-s",
        "On SIGTERM, how long running requests may finish.",
        type=float,
        default=30.0,
    )
    flag(
        process,
        "--stall-limit-s",
        "No step for so long, with work to do: not ready; for twice as long: exit 70.",
        type=float,
        default=60.0,
    )
    flag(process, "--die-with-parent", "Stop when the parent process dies.", action="store_true")
    flag(process, "--log-level", "Least severe message shown.", default="info", choices=_LOG_LEVELS)
    flag(
        process,
        "--log-format",
        "json: one object a line; console: for people.",
        default="json",
        choices=("json", "console"),
    )
    return parser


def read_options(
    arguments: Sequence[str], environ: dict[str, str]
) -> tuple[argparse.Namespace, EngineConfig, ServerOptions]:
    """Parse and check. Raises `ConfigError`; exits 2 on unknown flags."""
    values = make_parser(environ).parse_args(arguments)
    config = EngineConfig(
        model_dir=values.model_dir,
        base_model=values.base_model,
        dtype=values.dtype,
        device=values.device,
        attention_backend=values.attention_backend,
        lora_backend=values.lora_backend,
        ops_backend=values.ops_backend,
        linear_backend=values.linear_backend,
        quantization=values.quantization,
        batch_invariant=values.batch_invariant,
        cuda_graphs=values.cuda_graphs,
        gpu_memory_utilization=values.gpu_memory_utilization,
        block_size=values.block_size,
        num_blocks=values.num_blocks,
        kv_memory_bytes=values.kv_memory_bytes,
        kv_cache_dtype=values.kv_cache_dtype,
        max_model_len=values.max_model_len,
        max_num_batched_tokens=_or_default(values.max_num_batched_tokens, DEFAULT_BATCHED_TOKENS),
        max_num_seqs=_or_default(values.max_num_seqs, DEFAULT_SEQS),
        by_device=frozenset(
            name
            for name in ("max_num_batched_tokens", "max_num_seqs")
            if getattr(values, name) is None
        ),
        max_waiting=values.max_waiting,
        kv_watermark=values.kv_watermark,
        policy=values.policy,
        aging_s=values.aging_s,
        admission=values.admission,
        long_prefill_token_threshold=values.long_prefill_token_threshold,
        max_partial_prefills=values.max_partial_prefills,
        waiting_served_ratio=values.waiting_served_ratio,
        max_steps_closed=values.max_steps_closed,
        prefix_cache=not values.no_prefix_cache,
        prefix_cache_tenant_share=values.prefix_cache_tenant_share,
        public_prefix_file=values.public_prefix_file,
        max_loras=values.max_loras,
        max_cpu_loras=values.max_cpu_loras,
        max_cpu_lora_bytes=values.max_cpu_lora_bytes,
        adapter_idle_s=values.adapter_idle_s,
        adapter_cache_bytes=values.adapter_cache_bytes,
        pinned_adapters=_split_commas(values.pin_adapter),
        max_lora_rank=values.max_lora_rank,
        store_url=values.store_url,
        num_threads=values.num_threads,
        grammar_cpu_limit_s=values.grammar_cpu_limit_s,
        grammar_memory_bytes=values.grammar_memory_bytes,
        grammar_cache_bytes=values.grammar_cache_bytes,
        speculative=values.speculative,
        num_speculative_tokens=values.num_speculative_tokens,
        ngram_min=values.ngram_min,
        ngram_max=values.ngram_max,
    )
    if config.device == "cpu":
        config = config.for_device(is_gpu=False)
    options = ServerOptions(
        address=values.address,
        replica_id=values.replica_id,
        journal_dir=values.journal_dir,
        advertise_address=values.advertise_address,
        redis_url=values.redis_url,
        events_address=values.events_address,
        advertise_events_address=values.advertise_events_address,
        metrics_host=values.metrics_host,
        metrics_port=values.metrics_port,
        metrics_port_file=values.metrics_port_file,
        curve_secret_key_file=values.curve_secret_key_file,
        curve_allowed_keys_file=values.curve_allowed_keys_file,
        gateway_timeout_s=values.gateway_timeout_s,
        gateway_queue_bytes=values.gateway_queue_bytes,
        drain_grace_s=values.drain_grace_s,
        stall_limit_s=values.stall_limit_s,
        die_with_parent=values.die_with_parent,
    )
    return values, config, options


def _or_default(value: int | None, default: int) -> int:
    """0 was given, and is refused as any other wrong number."""
    return default if value is None else value


def _split_commas(values: list[str] | str) -> tuple[str, ...]:
    """A flag given several times, or an environment variable, which is one string."""
    texts = [values] if isinstance(values, str) else values
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


def set_up_logging(level: str, log_format: str) -> None:
    """structlog to stderr: JSON lines, or for people."""
    # Plain tracebacks: pretty ones show local variables, and those hold prompts.
    last: list[structlog.typing.Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if log_format == "console"
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replica; returns the exit code."""
    prepare_numerics()
    try:
        values, config, options = read_options(
            sys.argv[1:] if arguments is None else arguments, with_secret_files(os.environ)
        )
        set_up_logging(values.log_level, values.log_format)

        def build() -> Engine:
            # On the step thread: torch's import takes seconds, and its threads belong to it.
            from loraplex_engine.build import assemble_engine

            return assemble_engine(
                config, image=values.image, publish_block_event=server.publish_block_event
            )

        server = EngineServer(config, options, build)
        code = server.run()
    except EngineError as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_USAGE
    if server.is_step_thread_alive:
        # Unwinding the interpreter under a thread that computes can crash, which would hide `code`.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
