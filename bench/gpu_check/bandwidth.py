"""Part `bandwidth`: what the memory gives when it is only read, and how near attention and LoRA come to it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.attention.setup import AttentionDevice, open_attention
from loraplex_engine.config import KvCacheDType
from loraplex_engine.device.staging import Staging
from loraplex_engine.lora.sites import site_layouts
from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes
from loraplex_kernels.plans import open_plans

from bench.gpu_check.adapters import SlotPool, random_adapter
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine
from bench.gpu_check.sizes import Sizes, shape_of
from bench.gpu_check.stand import BLOCK_SIZE, blocks_for

_ATTENTION_TARGET = 85.0  # % of the measured read bandwidth
_QUANTIZED: tuple[KvCacheDType, ...] = ("int8", "fp8")


@triton.jit
def _read(data_ptr, sums_ptr, per_program, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202 -- jitted
    begin = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros([BLOCK], tl.int32)
    for at in range(0, per_program, BLOCK):
        total += tl.load(data_ptr + begin + at + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read_bandwidth(machine: Machine, sizes: Sizes) -> float:
    """Bytes a second of a kernel that reads a large buffer and adds it up."""
    block = 4096
    words = sizes.read_bytes // 4
    num_programs = 2 if machine.is_rehearsal else 4096
    per_program = words // num_programs // block * block
    data = torch.zeros(words, dtype=torch.int32, device=machine.device)
    sums = torch.empty(num_programs, dtype=torch.int32, device=machine.device)

    def read() -> None:
        _read[(num_programs,)](
            data, sums, per_program, BLOCK=block, num_warps=8, enable_fp_fusion=True
        )

    machine.warm()
    microseconds = machine.time_us(read, sizes.repeats)
    return num_programs * per_program * 4 / microseconds * 1e6


def run(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """Read bandwidth, decode attention, LoRA."""
    bandwidth = read_bandwidth(machine, sizes)
    record.add("read bandwidth", bandwidth / 1e9, "GB/s")
    context = sizes.attention_context
    for batch in sizes.attention_batches:
        microseconds, percent = _attention(machine, sizes, bandwidth, [context] * batch)
        record.add(
            f"decode attention, batch {batch}, {context} keys",
            percent,
            "% of read bandwidth",
            at_least=_ATTENTION_TARGET if context >= 8192 and batch >= 32 else None,
            note=f"{microseconds:.1f} us a layer",
        )
    batch = max(sizes.attention_batches)
    for kind in _QUANTIZED:
        if machine.support.allows(kind):
            # Half of the bytes: at the same percentage it is twice as fast.
            microseconds, percent = _attention(machine, sizes, bandwidth, [context] * batch, kind)
            record.add(
                f"decode attention, batch {batch}, {context} keys, {kind} cache",
                percent,
                "% of read bandwidth",
                note=f"{microseconds:.1f} us a layer",
            )
    # Every other row has ended long before the one that is long.
    long, short = sizes.attention_ragged
    microseconds, percent = _attention(machine, sizes, bandwidth, [short] * (batch - 1) + [long])
    record.add(
        f"decode attention, one row of {long} keys among {batch - 1} of {short}",
        percent,
        "% of read bandwidth",
        note=f"{microseconds:.1f} us a layer",
    )
    for batch, num_adapters in _lora_cases(sizes):
        _lora(machine, sizes, record, bandwidth, batch, num_adapters)


def _attention(
    machine: Machine,
    sizes: Sizes,
    bandwidth: float,
    lengths: list[int],
    kv_cache_dtype: KvCacheDType = "auto",
) -> tuple[float, float]:
    """One layer's decode attention over rows of so many keys: (microseconds, % of `bandwidth`)."""
    model, batch = sizes.speed_model, len(lengths)
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, sizes.speed_dtype)
    per_row = -(-max(lengths) // BLOCK_SIZE)
    num_blocks = sum(blocks_for(1, length) for length in lengths)
    staging = Staging(machine.device)
    backend = open_attention(
        shape,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        cache_dir=Path(),
        num_threads=1,
        backend="triton",
        kv_cache_dtype=kv_cache_dtype,
        on_device=AttentionDevice(
            device=machine.device,
            plans=open_plans(machine.support.name, "fast"),
            staging=staging,
            max_tokens=batch,
            max_rows=batch,
            max_blocks_per_row=per_row,
        ),
    )
    staging.seal()
    kv = backend.allocate_kv(num_blocks)
    qkv = torch.randn(batch, shape.q_size + 2 * shape.kv_size).to(machine.device, shape.dtype)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    table = np.zeros((batch, per_row), np.int32)
    for row, length in enumerate(lengths):
        own, order = np.split(order, [blocks_for(1, length)])
        table[row, : len(own)] = own
    plan = backend.prepare(
        AttentionBatch(np.asarray(lengths, np.int32) - 1, np.ones(batch, np.int32), table, batch)
    )
    staging.flush()
    with torch.inference_mode():
        microseconds = machine.time_us(lambda: backend.forward(qkv, kv, plan), sizes.repeats)
    num_bytes = sum(lengths) * backend.kv_bytes_per_block() // BLOCK_SIZE
    return microseconds, 100 * num_bytes / (microseconds * 1e-6) / bandwidth


def _lora_cases(sizes: Sizes) -> list[tuple[int, int]]:
    """(batch, distinct adapters)"""
    batch = max(size for size in sizes.contexts if size <= 64)
    return [(batch, count) for count in sizes.adapters if count <= min(batch, sizes.num_slots)]


def _lora(
    machine: Machine,
    sizes: Sizes,
    record: Recorder,
    bandwidth: float,
    batch: int,
    num_adapters: int,
) -> None:
    """All sites of all layers; what stays in the GPU's cache from one step to the next says nothing of its memory."""
    shape, dtype = shape_of(sizes.speed_model), sizes.speed_dtype
    pool = SlotPool()
    adapter = random_adapter(shape, sizes.rank, dtype, pin=not machine.is_rehearsal)
    for slot in range(num_adapters):
        pool.put(slot, adapter.again())
    backend = TritonLora(
        pool,
        shape,
        TritonLoraSizes(num_adapters, sizes.rank, batch, batch),
        dtype=dtype,
        device=machine.device,
        plans=open_plans(machine.support.name, "fast"),
    )
    lora_batch = backend.prepare(np.arange(batch, dtype=np.int32) % num_adapters, pool.version)
    assert lora_batch is not None
    layouts = site_layouts(shape)
    x = {layout.site: _zeros(machine, batch, layout.num_inputs, dtype) for layout in layouts}
    y = {layout.site: _zeros(machine, batch, layout.num_outputs, dtype) for layout in layouts}

    def add_all() -> None:
        for layer in range(shape.num_layers):
            for layout in layouts:
                backend.add(y[layout.site], x[layout.site], layer, layout.site, lora_batch)

    with torch.inference_mode():
        microseconds = machine.time_us(add_all, sizes.repeats)
    num_bytes = num_adapters * adapter.packed.image.numel()
    name = f"LoRA, batch {batch}, {num_adapters} x r{sizes.rank}, all layers"
    size = f"the adapters' bytes, {math.ceil(num_bytes / 1e6)} MB"
    if num_bytes < sizes.cache_bytes:
        record.add(name, microseconds / 1e3, "ms", note=f"{size}, stay in the GPU's cache")
        return
    record.add(
        name,
        100 * num_bytes / (microseconds * 1e-6) / bandwidth,
        "% of read bandwidth",
        note=f"{microseconds / 1e3:.3f} ms a step; {size}",
    )


def _zeros(machine: Machine, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(rows, width, dtype=dtype, device=machine.device)
