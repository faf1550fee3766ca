"""Memory, speed and number of machines for a workload. The formulas are explained in docs/capacity.md.

Sizes come from the engine's own (`loraplex_engine.artifact.sizes`). Speed is the user's measurement, or the
roofline's: what a step must read and multiply, over what the machine can, times a share that engines reach of it.

Units: bytes, tokens, seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from loraplex_engine.artifact import (
    ModelShape,
    adapter_numbers,
    base_memory,
    kv_bytes_per_token,
    parameters,
)
from loraplex_engine.artifact.sizes import BYTES_OF_DTYPE, PROCESS_BYTES, Quantization

_GB: Final = 1e9
_GIB: Final = 1024**3
# Of a GPU's memory what an engine takes (EngineConfig.gpu_memory_utilization); of a CPU's machine what is left
# beside the operating system.
MEMORY_SHARE: Final = 0.9
# Of a step's memory reads and products, what is reached: between what the README's bench reaches of the CPU's
# roofline in `mixed` and what serving engines report on GPUs. A measurement replaces it.
EFFICIENCY: Final = 0.5
# What a GPU's step needs beside weights, adapters and cache (activations, graphs, CUDA itself).
GPU_WORKSPACE_BYTES: Final = 3 * _GIB
# As EngineConfig, which a test compares: max_num_seqs of a CPU and a GPU, max_loras.
DEFAULT_ROWS: Final = {False: 64, True: 256}
DEFAULT_MAX_LORAS: Final = 16


class PlanError(ValueError):
    """A plan cannot be made; the message names the flag and the remedy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one replica runs on."""

    name: str
    memory_bytes: int
    read_gb_s: float  # of its memory
    tflops: float  # dense, in the dtype of the weights
    is_gpu: bool


# From the makers' data sheets: GB, GB/s, dense bf16 TFLOPS.
GPUS: Final = {
    "l4": Machine("l4", 24 * 10**9, 300.0, 121.0, True),
    "l40s": Machine("l40s", 48 * 10**9, 864.0, 362.0, True),
    "a100": Machine("a100", 80 * 10**9, 2039.0, 312.0, True),
    "h100": Machine("h100", 80 * 10**9, 3350.0, 989.0, True),
    "h200": Machine("h200", 141 * 10**9, 4800.0, 989.0, True),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A base model, and how it is kept."""

    shape: ModelShape
    stored_dtype: str
    dtype: str = "bfloat16"
    quantization: Quantization = "none"
    kv_dtype: str | None = None  # None: the dtype


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the fleet at its peak, and on the average."""

    output_tokens_per_s: float  # at the peak, over all tenants
    mean_share: float  # of the peak, over a month
    prompt_tokens: float  # of a request, on the average
    output_tokens: float
    cached_share: float  # of prompt tokens, found in the prefix cache
    adapters: int  # that are asked for at the same time
    registered: int  # in all
    ranks: tuple[int, ...]  # they have, in equal parts
    modules: frozenset[str] | None = None  # they adapt; None: all seven linears

    def check(self) -> None:
        """Raises `PlanError` for what cannot be."""
        positive = {
            "--tokens-per-second": self.output_tokens_per_s,
            "--prompt-tokens": self.prompt_tokens,
            "--output-tokens": self.output_tokens,
        }
        for flag, value in positive.items():
            if not value > 0 or math.isinf(value):
                raise PlanError(f"{flag} is {value:g}: give a number above 0")
        if not 0 < self.mean_share <= 1:
            raise PlanError(
                f"--mean-share is {self.mean_share:g}: give a share above 0 and up to 1"
            )
        if not 0 <= self.cached_share < 1:
            raise PlanError(
                f"--cached-share is {self.cached_share:g}: give a share from 0 to below 1"
            )
        if not 0 <= self.adapters <= self.registered:
            raise PlanError(
                f"--active-adapters is {self.adapters}, of {self.registered} --adapters: give no more than those"
            )
        if self.adapters and (not self.ranks or min(self.ranks) < 1):
            raise PlanError("--ranks must be whole numbers of 1 or more, such as 8,16,64")


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one machine."""

    weights: int
    adapters: int
    workspace: int  # the process, and of a GPU a step's own
    kv_per_token: int
    kv_per_request: int  # at its longest
    kv: int  # for `rows` requests
    rows: int  # requests that one machine runs at once
    available: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.adapters + self.workspace + self.kv


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workload needs."""

    memory: Memory
    adapter_bytes: int  # of one, on the average
    store_bytes: int  # of all registered, on disk
    distinct_adapters: float  # in one step
    step_s: float  # of decoding, all rows in it; estimated
    output_tokens_per_s: float  # of one machine
    is_measured: bool
    machines: int
    spare: int
    utilization: float  # of the machines that are not spare, over a month

    @property
    def total_machines(self) -> int:
        """With the spare ones."""
        return self.machines + self.spare


def plan_capacity(
    model: Model,
    workload: Workload,
    machine: Machine,
    *,
    rows: int | None = None,
    measured_tokens_per_s: float | None = None,
    efficiency: float = EFFICIENCY,
    spare: int = 1,
) -> Capacity:
    """How many such machines the workload needs.

    Args:
        rows: most requests that one runs at once; None: the engine's default. Fewer where memory holds fewer.
        measured_tokens_per_s: output tokens of one machine, at this workload; None: estimated.

    Raises:
        PlanError: a number cannot be, or not even one request fits into the machine.
    """
    workload.check()
    if not 0 < efficiency <= 1:
        raise PlanError(f"--efficiency is {efficiency:g}: give a share above 0 and up to 1")
    if spare < 0:
        raise PlanError(f"--spare is {spare}: give 0 or more")
    if measured_tokens_per_s is not None and not 0 < measured_tokens_per_s < math.inf:
        raise PlanError(
            f"--measured-tokens-per-second is {measured_tokens_per_s:g}: give a number above 0, or leave it out"
        )
    memory, adapter_bytes = _memory(model, workload, machine, rows or DEFAULT_ROWS[machine.is_gpu])
    distinct = _distinct(workload.adapters, memory.rows)
    step_s, estimated = _speed(model, workload, machine, memory, distinct * adapter_bytes)
    speed = estimated * efficiency if measured_tokens_per_s is None else measured_tokens_per_s
    machines = math.ceil(workload.output_tokens_per_s / speed - 1e-9)
    mean = workload.output_tokens_per_s * workload.mean_share
    return Capacity(
        memory=memory,
        adapter_bytes=adapter_bytes,
        store_bytes=adapter_bytes * workload.registered,
        distinct_adapters=distinct,
        step_s=step_s / efficiency,
        output_tokens_per_s=speed,
        is_measured=measured_tokens_per_s is not None,
        machines=machines,
        spare=spare,
        utilization=mean / (machines * speed),
    )


def _memory(model: Model, workload: Workload, machine: Machine, rows: int) -> tuple[Memory, int]:
    shape = model.shape
    base = base_memory(
        shape,
        stored_dtype=model.stored_dtype,
        dtype=model.dtype,
        quantization=model.quantization,
        is_gpu=machine.is_gpu,
    )
    number_bytes = BYTES_OF_DTYPE[model.dtype]
    padded_to = 16 if machine.is_gpu else 1
    sizes = [
        number_bytes * adapter_numbers(shape, rank, workload.modules, multiple=padded_to)
        for rank in workload.ranks
    ]
    adapter_bytes = round(sum(sizes) / len(sizes)) if sizes and workload.adapters else 0
    if machine.is_gpu:
        # Slots are of the largest rank, whatever is in them; how many, a step's distinct adapters say.
        largest = max(workload.ranks, default=1)
        slot = number_bytes * adapter_numbers(shape, largest, multiple=padded_to)
        slots = math.ceil(_distinct(workload.adapters, rows))
        adapters, workspace = slot * slots, GPU_WORKSPACE_BYTES
    else:
        adapters, workspace = adapter_bytes * workload.adapters, PROCESS_BYTES
    per_token = shape.num_layers * kv_bytes_per_token(
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        number_bytes=BYTES_OF_DTYPE[model.kv_dtype or model.dtype],
    )
    per_request = math.ceil(per_token * (workload.prompt_tokens + workload.output_tokens))
    available = int(machine.memory_bytes * MEMORY_SHARE)
    found = Memory(
        weights=base.total,
        adapters=adapters,
        workspace=workspace,
        kv_per_token=per_token,
        kv_per_request=per_request,
        kv=0,
        rows=0,
        available=available,
    )
    fitting = (available - found.total) // per_request
    if fitting < 1:
        raise PlanError(
            f"a {machine.name} has {available / _GIB:,.1f} GiB for an engine, but weights take"
            f" {base.total / _GIB:,.1f}, adapters {adapters / _GIB:,.1f}, the process {workspace / _GIB:,.1f} and one"
            f" request {per_request / _GIB:,.3f}: take a larger --machine, fewer --active-adapters, or (on a CPU)"
            " --quantization int8"
        )
    rows = min(rows, fitting)
    return replace(found, rows=rows, kv=rows * per_request), adapter_bytes


def _distinct(adapters: int, rows: int) -> float:
    """Expected distinct adapters among rows that draw one each, all as likely."""
    if adapters == 0:
        return 0.0
    return float(adapters * (1 - (1 - 1 / adapters) ** rows))


def _speed(
    model: Model, workload: Workload, machine: Machine, memory: Memory, adapter_bytes: float
) -> tuple[float, float]:
    """Seconds of a decoding step with all rows, and output tokens a second with prompts computed between."""
    read_per_s, flops = machine.read_gb_s * _GB, machine.tflops * 1e12
    numbers = parameters(model.shape)
    # Half of an answer is there, on the average, when a token is made.
    kv = memory.rows * memory.kv_per_token * (workload.prompt_tokens + workload.output_tokens / 2)
    step_s = max(
        (memory.weights + adapter_bytes + kv) / read_per_s, 2 * numbers * memory.rows / flops
    )
    prompts_s = 2 * numbers * workload.prompt_tokens * (1 - workload.cached_share) / flops
    request_s = prompts_s + workload.output_tokens * step_s / memory.rows
    return step_s, workload.output_tokens / request_s
