"""Part `model-size`: the kernels as an 8B-shaped model launches them, put to work by the engine's own backends.

Attention over ragged rows, in every configuration that the number of rows decides, with int8 and fp8 caches, windows
and soft caps, prompts of several tasks beside decoding rows; products with wide weights; adapters on every site, with
embedding and head, and beside one that is not a number; and, in the `invariant` column, one row in crowds of
several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.attention.triton_attention import TritonAttention
from loraplex_engine.device.staging import Staging
from loraplex_engine.lora.sites import site_layouts
from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes
from loraplex_engine.model.config import ModelConfig
from loraplex_kernels import reference
from loraplex_kernels.gemm import gemm
from loraplex_kernels.plans import Column, PlanTable, open_plans
from loraplex_kernels.support import dtype_name
from torch import Tensor

from bench.gpu_check.adapters import PlainLora, SlotPool, random_adapter
from bench.gpu_check.attention_step import AttentionStep, StepRows
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine
from bench.gpu_check.numerics import Worst, num_unlike
from bench.gpu_check.sizes import LLAMA_8B, Sizes, model_config, shape_of
from bench.gpu_check.stand import BLOCK_SIZE

_BF16 = torch.bfloat16


def cache_tolerance(kv_dtype: torch.dtype) -> float:
    """What a number in the cache may be off by, of its head's largest.

    It was rounded to bf16 first, where the kernel and the reference may end one unit apart; then to the nearest
    number of the cache's format, half of the widest step between two of them away at most.
    """
    of_model = torch.finfo(_BF16).eps
    if kv_dtype == _BF16:
        return of_model
    if kv_dtype == torch.int8:
        return of_model + 0.5 / torch.iinfo(kv_dtype).max
    kind = torch.finfo(kv_dtype)
    # The largest number's power of two has the widest steps.
    widest_step = kind.eps * 2 ** math.floor(math.log2(kind.max))
    return of_model + 0.5 * widest_step / kind.max


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of it there is."""

    model: ModelConfig  # one layer of it, with a small vocabulary
    columns: tuple[Column, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    decode_rows: tuple[int, ...]
    longest: int
    # (computed, scheduled, of a prompt) of each row of steps with prompts
    prompts: tuple[tuple[tuple[int, int, bool], ...], ...]
    window: int
    products: tuple[tuple[int, int, int], ...]  # rows, outputs, inputs
    lora_rows: tuple[int, ...]
    ranks: tuple[int, ...]
    crowds: tuple[int, ...]  # rows of a step, of which the first is looked at


FULL = Extent(
    model=replace(LLAMA_8B, num_layers=1, vocab_size=2048, num_token_ids=2048),
    columns=("fast", "invariant"),
    kv_dtypes=(_BF16, torch.int8, torch.float8_e4m3fn),
    # The plans have bounds in (row, kv head) pairs, 8 of them a row.
    decode_rows=(2, 4, 8, 16, 32, 40),
    longest=900,
    prompts=(
        ((130, 70, True), (0, 33, True), (400, 1, False), (250, 5, True), (77, 1, True)),
        ((20, 500, True), (300, 77, True), (90, 1, False)),
    ),
    window=100,
    products=((16, 28_672, 4096), (200, 28_672, 4096), (200, 4096, 14_336), (3, 128_256, 4096)),
    lora_rows=(2, 24, 96),
    ranks=(8, 16, 64),
    crowds=(1, 65, 200),
)
REHEARSAL = Extent(
    model=model_config(
        vocab=64, hidden=32, inner=48, layers=1, heads=2, kv_heads=1, head_dim=16, max_position=256
    ),
    columns=("fast",),
    kv_dtypes=(_BF16, torch.int8),
    decode_rows=(2,),
    longest=20,
    prompts=(((5, 9, True), (3, 1, False)),),
    window=6,
    products=((3, 48, 32),),
    lora_rows=(3,),
    ranks=(8, 16),
    crowds=(1, 3),
)


def run(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """All of it, at the extent that the machine allows."""
    del sizes
    extent = REHEARSAL if machine.is_rehearsal else FULL
    with torch.inference_mode():
        for column in extent.columns:
            plans = open_plans(machine.support.name, column)
            attention = _Attention(machine, plans, extent)
            attention.check(record, column)
            _check_lora(machine, plans, extent, record, column)
        plans = open_plans(machine.support.name, "invariant")
        worst = Worst()
        for rows, outputs, inputs in extent.products:
            for got, expected in _product(machine, plans, rows, outputs, inputs):
                worst.see(f"gemm {rows} x {outputs} x {inputs}", got, expected)
        worst.record(record, "invariant bf16")
        _check_crowds(machine, plans, extent, record)


# --------------------------------------------------------------------------- attention


class _Attention:
    """The backend over caches of random numbers, beside the reference in fp64."""

    def __init__(self, machine: Machine, plans: PlanTable, extent: Extent) -> None:
        self._machine = machine
        self._plans = plans
        self._extent = extent
        self._rng = np.random.default_rng(2)
        self._generator = torch.Generator().manual_seed(2)

    def check(self, record: Recorder, column: Column) -> None:
        """A figure for each kind of cache and step."""
        extent = self._extent
        for kv_dtype in extent.kv_dtypes:
            if not self._machine.support.allows(dtype_name(kv_dtype)):
                continue
            worst = Worst()
            name = str(kv_dtype).removeprefix("torch.")
            for count in extent.decode_rows:
                self._see(worst, f"decode, {name} cache", kv_dtype, self.decoding(count))
            for prompts in extent.prompts:
                self._see(worst, f"prompts, {name} cache", kv_dtype, self._prompts(prompts))
            worst.record(record, column)
        worst = Worst()
        for rows in (self.decoding(extent.decode_rows[0]), self._prompts(extent.prompts[0])):
            kind = "prompts" if rows.is_prompt.any() else "decode"
            self._see(worst, f"{kind}, window and soft cap", _BF16, rows, window=extent.window)
        worst.record(record, column)

    def decoding(self, count: int) -> StepRows:
        """Rows of all lengths: one key, whole blocks, the longest."""
        lengths = self._rng.integers(1, self._extent.longest, count)
        lengths[:2] = (self._extent.longest, 1)
        lengths[2:3] = BLOCK_SIZE * 5
        ones = np.ones(count, np.int32)
        return StepRows((lengths - 1).astype(np.int32), ones, ones < 1)

    @staticmethod
    def _prompts(rows: tuple[tuple[int, int, bool], ...]) -> StepRows:
        computed, scheduled, is_prompt = zip(*rows, strict=True)
        return StepRows(
            np.asarray(computed, np.int32), np.asarray(scheduled, np.int32), np.asarray(is_prompt)
        )

    def _see(
        self,
        worst: Worst,
        name: str,
        kv_dtype: torch.dtype,
        rows: StepRows,
        *,
        window: int | None = None,
    ) -> None:
        soft_cap = None if window is None else 2.0
        model = self._extent.model
        shape = AttentionShape(
            model.num_heads, model.num_kv_heads, model.head_dim, _BF16, window, soft_cap
        )
        step = AttentionStep(self._machine, self._plans, shape, kv_dtype, rows, self._generator)
        got_TW = step.run()
        stored, expected = step.stored()
        worst.see(f"{name}: stored", stored, expected, tolerance=cache_tolerance(kv_dtype))
        # Not every query of a long prompt, but each sequence's first and last.
        positions = rows.positions
        ends = np.cumsum(rows.scheduled)
        chosen = sorted({*range(0, len(positions), 13), *(ends - 1), *(ends - rows.scheduled)})
        if rows.scheduled.max() == 1:
            chosen = list(range(len(positions)))
        expected = step.expected(chosen, window=window, soft_cap=soft_cap)
        worst.see(name, got_TW[torch.tensor(chosen, device=got_TW.device)], expected)


# ---------------------------------------------------------------------------- products


def _product(
    machine: Machine, plans: PlanTable, rows: int, outputs: int, inputs: int
) -> Iterator[tuple[Tensor, Tensor]]:
    x, weight = _draw(machine, rows, inputs), _draw(machine, outputs, inputs)
    weight = weight.div_(inputs**0.5)
    expected = reference.gemm(x, weight, None)
    for phase in ("decode", "prefill"):
        plan = plans.choose("gemm", phase=phase, tokens=rows, k=inputs, n=outputs)
        yield gemm(x, weight, None, plan), expected


def _draw(machine: Machine, *shape: int) -> Tensor:
    # Drawn where it is used: hundreds of millions take the host seconds.
    generator = torch.Generator(machine.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=machine.device, dtype=_BF16)


# ---------------------------------------------------------------------------- adapters


def _lora(
    machine: Machine, plans: PlanTable, extent: Extent, pool: SlotPool, max_rows: int, decode: int
) -> TritonLora:
    return TritonLora(
        pool,
        shape_of(extent.model),
        TritonLoraSizes(len(pool.adapters), max(extent.ranks), max_rows, decode),
        dtype=_BF16,
        device=machine.device,
        plans=plans,
    )


def _pool(extent: Extent) -> SlotPool:
    pool = SlotPool()
    for slot, rank in enumerate(extent.ranks):
        shape = shape_of(extent.model)
        pool.put(slot, random_adapter(shape, rank, _BF16, pin=False, seed=slot, has_ends=True))
    return pool


def _check_lora(
    machine: Machine, plans: PlanTable, extent: Extent, record: Recorder, column: Column
) -> None:
    """Every site beside the reference; then the same again with one adapter that is not a number."""
    shape, pool, worst = shape_of(extent.model), _pool(extent), Worst()
    backend = _lora(machine, plans, extent, pool, max(extent.lora_rows), 32)
    plain = PlainLora(pool, shape)
    healthy = {}
    for rows in extent.lora_rows:
        slots = (np.arange(rows, dtype=np.int32) % (len(extent.ranks) + 1)) - 1
        for name, y in _sites(machine, backend, extent, pool, slots):
            worst.see(f"lora {name}", y, _plain_site(machine, plain, extent, name, slots))
            healthy[rows, name] = y
    worst.record(record, f"{column} bf16")
    bad = extent.ranks.index(min(extent.ranks))
    pool.put(
        bad,
        random_adapter(shape, min(extent.ranks), _BF16, pin=False, has_ends=True, fill=torch.nan),
    )
    num_unlike_all, num_bad, num_bad_finite = 0, 0, 0
    for rows in extent.lora_rows:
        slots = (np.arange(rows, dtype=np.int32) % (len(extent.ranks) + 1)) - 1
        victims = torch.from_numpy(slots != bad).to(machine.device)
        for name, y in _sites(machine, backend, extent, pool, slots):
            num_unlike_all += num_unlike(y[victims], healthy[rows, name][victims])
            num_bad += int((~victims).sum())
            num_bad_finite += int(y[~victims].isfinite().any(-1).sum())
    name = f"lora beside an adapter of NaN, {column} bf16"
    record.add(name, num_unlike_all, "numbers differ", at_most=0)
    record.add(f"{name}: its own rows", num_bad_finite, f"finite of {num_bad}", at_most=0)


def _inputs(machine: Machine, extent: Extent, name: str, rows: int) -> tuple[Tensor, Tensor]:
    """(y, x) of a site; of the embedding x are tokens."""
    model = extent.model
    if name == "embedding":
        tokens = torch.arange(rows, device=machine.device) * 7 % model.vocab_size
        return _draw(machine, rows, model.hidden_size), tokens
    if name == "head":
        return _draw(machine, rows, model.vocab_size), _draw(machine, rows, model.hidden_size)
    layout = next(item for item in site_layouts(shape_of(model)) if item.site == name)
    return _draw(machine, rows, layout.num_outputs), _draw(machine, rows, layout.num_inputs)


_NAMES = ("qkv", "o", "gate_up", "down", "embedding", "head")


def _sites(
    machine: Machine, backend: TritonLora, extent: Extent, pool: SlotPool, slots: np.ndarray
) -> Iterator[tuple[str, Tensor]]:
    """(site, y with the deltas)."""
    batch = backend.prepare(slots, pool.version)
    assert batch is not None
    for name in _NAMES:
        y, x = _inputs(machine, extent, name, len(slots))
        _add(backend, name, y, x, batch)
        yield name, y


def _plain_site(
    machine: Machine, plain: PlainLora, extent: Extent, name: str, slots: np.ndarray
) -> Tensor:
    y, x = _inputs(machine, extent, name, len(slots))
    y, x = y.float().cpu(), x.cpu()
    _add(plain, name, y, x, slots.tolist())
    return y


def _add(backend: TritonLora | PlainLora, name: str, y: Tensor, x: Tensor, batch: object) -> None:
    if name == "embedding":
        backend.add_embedding(y, x, batch)  # type: ignore[arg-type]  # each has a batch of its own kind
    elif name == "head":
        backend.add_head(y, x, batch)  # type: ignore[arg-type]
    else:
        backend.add(y, x, 0, name, batch)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------- crowds


def _check_crowds(machine: Machine, plans: PlanTable, extent: Extent, record: Recorder) -> None:
    """The bits of one row alone and in crowds, kernel by kernel."""
    for name, rows in (
        ("gemm", _gemm_in_crowds(machine, plans, extent)),
        ("lora", _lora_in_crowds(machine, plans, extent)),
        ("attention", _attention_in_crowds(machine, plans, extent)),
    ):
        alone, *crowded = rows
        num_different = sum(num_unlike(row, alone) for row in crowded)
        crowds = ", ".join(map(str, extent.crowds))
        record.add(
            f"invariant {name}: a row in steps of {crowds}",
            num_different,
            f"of {alone.numel() * len(crowded)} numbers differ",
            at_most=0,
        )


def _gemm_in_crowds(machine: Machine, plans: PlanTable, extent: Extent) -> Iterator[Tensor]:
    _, outputs, inputs = extent.products[0]
    x, weight = _draw(machine, max(extent.crowds), inputs), _draw(machine, outputs, inputs)
    for count in extent.crowds:
        plan = plans.choose("gemm", phase="decode", tokens=count, k=inputs, n=outputs)
        yield gemm(x[:count], weight, None, plan)[0]


def _lora_in_crowds(machine: Machine, plans: PlanTable, extent: Extent) -> Iterator[Tensor]:
    pool, most = _pool(extent), max(extent.crowds)
    backend = _lora(machine, plans, extent, pool, most, most)
    slots = ((np.arange(most, dtype=np.int32) + 1) % (len(extent.ranks) + 1)) - 1
    names = _NAMES[:1] if machine.is_rehearsal else _NAMES
    given = {name: _inputs(machine, extent, name, most) for name in names}
    for count in extent.crowds:
        batch = backend.prepare(slots[:count], pool.version)
        of_row = []
        for name, (y, x) in given.items():
            added = y[:count].clone()
            _add(backend, name, added, x[:count], batch)
            of_row.append(added[0])
        yield torch.cat(of_row)


def _attention_in_crowds(machine: Machine, plans: PlanTable, extent: Extent) -> Iterator[Tensor]:
    model, most = extent.model, max(extent.crowds)
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, _BF16)
    per_row = -(-extent.longest // BLOCK_SIZE)
    staging = Staging(machine.device)
    backend = TritonAttention(
        shape,
        block_size=BLOCK_SIZE,
        device=machine.device,
        plans=plans,
        staging=staging,
        max_tokens=most,
        max_rows=most,
        max_blocks_per_row=per_row,
    )
    staging.seal()
    kv = backend.allocate_kv(per_row * most)
    kv.numbers.copy_(_draw(machine, *kv.numbers.shape))
    qkv = _draw(machine, most, shape.q_size + 2 * shape.kv_size)
    lengths = np.random.default_rng(4).integers(1, extent.longest, most).astype(np.int32)
    lengths[0] = extent.longest
    table = np.arange(per_row * most, dtype=np.int32).reshape(most, per_row)
    for count in extent.crowds:
        ones = np.ones(count, np.int32)
        batch = AttentionBatch(
            lengths[:count] - ones, ones, table[:count], count, lengths[:count] - ones
        )
        plan = backend.prepare(batch)
        staging.flush()
        yield backend.forward(qkv[:count].clone(), kv, plan)[0]
        machine.synchronize()
