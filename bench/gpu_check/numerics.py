"""Part `numerics`: every kernel, under every plan column, against its reference in fp64 or fp32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.filters import temperature_of
from loraplex_engine.sampling.sampler import SampleRow
from loraplex_engine.sampling.sampler import sample as sample_on_host
from loraplex_kernels import reference, reference_attention
from loraplex_kernels.gated import gated
from loraplex_kernels.gemm import gemm
from loraplex_kernels.head_norm import head_norm
from loraplex_kernels.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
from loraplex_kernels.paged_decode import Splitting, paged_decode
from loraplex_kernels.paged_prefill import paged_prefill, queries_per_task
from loraplex_kernels.plans import Column, Phase, Plan, PlanTable, open_plans
from loraplex_kernels.rms_norm import rms_norm
from loraplex_kernels.rope_kv import rope_kv
from loraplex_kernels.sample import sample
from loraplex_kernels.sample_rows import NUM_FIELDS, pack_rows
from loraplex_kernels.support import dtype_name
from torch import Tensor

from bench.gpu_check.adapters import PlainLora, SlotPool, random_adapter
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine
from bench.gpu_check.sizes import Sizes, model_config, shape_of

# Of the largest number of a row of the reference; a few units in the last place.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
# What these write was somewhere before.
_MOVING = ("kv_blocks gather", "kv_blocks scatter", "kv_blocks copy")
# What an engine runs; compiling more than this would take longer than the part may.
_CASES: tuple[tuple[Column, torch.dtype], ...] = (
    ("fast", torch.bfloat16),
    ("fast", torch.float32),
    ("invariant", torch.bfloat16),
)


def run(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """Worst error of each kernel in each column and dtype, over sizes and rows; what only moves keeps every bit."""
    for column, dtype in _CASES[:1] if machine.is_rehearsal else _CASES:
        plans = open_plans(machine.support.name, column)
        worst = Worst()
        for width in sizes.widths:
            for name, got, expected in _Checks(machine, plans, dtype, width).all():
                worst.see(name, got, expected)
        # At once: who is stopped later keeps these.
        worst.record(record, f"{column} {dtype_name(dtype)}")
    plans = open_plans(machine.support.name, "fast")
    for name, num_different, count in _sampling(machine, plans):
        record.add(name, num_different, f"of {count} tokens", at_most=0)


class Worst:
    """The worst row of each kernel so far."""

    def __init__(self) -> None:
        self._errors: dict[str, float] = {}
        self._num_moved: dict[str, int] = {}

    def see(
        self, name: str, got: Tensor, expected: Tensor, *, tolerance: float | None = None
    ) -> None:
        """Take one result beside its reference; kernels of `_MOVING` must keep every bit.

        Args:
            tolerance: of a row's largest number; None: what its dtype is held to.
        """
        if name in _MOVING:
            self._num_moved[name] = self._num_moved.get(name, 0) + num_unlike(got, expected)
            return
        error = row_error(got, expected) / (tolerance or TOLERANCES[got.dtype])
        self._errors[name] = max(self._errors.get(name, 0.0), error)

    def record(self, record: Recorder, label: str) -> None:
        """A figure for each kernel."""
        for name, error in self._errors.items():
            record.add(f"{name}, {label}", error, "of tolerance", at_most=1.0)
        for name, count in self._num_moved.items():
            record.add(f"{name}, {label}", count, "numbers differ", at_most=0)


def row_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, of that row's largest number: a row of small numbers is held to as much.

    Rows are what the last dimension holds. Infinite where `got` is not finite.
    """
    got, expected = got.double(), expected.to(got.device).double()
    if not got.isfinite().all():
        return float("inf")
    scale = expected.abs().amax(-1).clamp(min=1e-6)
    return float(((got - expected).abs().amax(-1) / scale).max())


def make_last_stand_out(value: Tensor, length: int) -> None:
    """Scale, in place, the values of a row's last token so that losing it shows: one key of hundreds counts for little."""
    value *= 4 * length**0.5


def num_unlike(got: Tensor, expected: Tensor) -> int:
    """How many numbers differ in any bit."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    one, other = got.contiguous().view(words), expected.to(got.device).contiguous().view(words)
    return int((one != other).sum())


class _Checks:
    """(kernel, result, reference) of one dtype, column and width."""

    def __init__(self, machine: Machine, plans: PlanTable, dtype: torch.dtype, width: int) -> None:
        self._machine = machine
        self._plans = plans
        self._dtype = dtype
        self._width = width
        self._generator = torch.Generator().manual_seed(width)
        self._rows = 3 if machine.is_rehearsal else 70

    def all(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from self._small()
        yield from self._attention()
        yield from self._lora()

    def _draw(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self._dtype).to(self._machine.device)

    def _plan(self, kernel: str, phase: Phase, *, k: int = 0, n: int = 0) -> Plan:
        return self._plans.choose(
            kernel, phase=phase, tokens=self._rows, k=k, n=n, dtype=dtype_name(self._dtype)
        )

    def _small(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        width, rows = self._width, self._rows
        x, weight, residual = self._draw(rows, width), self._draw(width), self._draw(rows, width)
        plan = self._plan("rms_norm", "decode", k=width)
        added, total = residual.clone(), (residual.double() + x.double()).to(self._dtype)
        normed = rms_norm(x, weight, 1e-5, plan, residual_TH=added)
        yield "rms_norm", normed, reference.rms_norm(total, weight, 1e-5)
        yield "rms_norm residual", added, total
        gate_up = self._draw(rows, 2 * width)
        for activation in ("silu", "gelu_tanh"):
            yield (
                "gated",
                gated(gate_up, activation, self._plan("gated", "decode", k=width)),
                reference.gated(gate_up, activation),
            )
        heads = self._draw(rows, 6 * 64)
        q_weight, k_weight = self._draw(64), self._draw(64)
        expected = reference.head_norm(
            heads, q_weight, k_weight, 1e-5, num_q_heads=3, num_kv_heads=2
        )
        head_norm(
            heads,
            q_weight,
            k_weight,
            1e-5,
            self._plan("head_norm", "decode", k=64),
            num_q_heads=3,
            num_kv_heads=2,
        )
        yield "head_norm", heads, expected
        matrix, bias = self._draw(width + 16, width) / width**0.5, self._draw(width + 16)
        for phase in ("decode", "prefill"):
            plan = self._plan("gemm", phase, k=width, n=width + 16)
            yield "gemm", gemm(x, matrix, bias, plan), reference.gemm(x, matrix, bias)

    # -------------------------------------------------------------------------- attention

    def _attention(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        heads, kv_heads, dim, block = 6, 2, 64, 16
        lengths = [3, 18] if self._machine.is_rehearsal else [1, 17, 300, 1000]
        width = -(-max(lengths) // block)
        num_blocks = width * len(lengths) + 1
        kv = self._draw(2, num_blocks, kv_heads, block, dim)
        order = torch.randperm(num_blocks, generator=self._generator)
        table = order[: width * len(lengths)].to(torch.int32)
        tables = list(table.view(len(lengths), width))
        device = self._machine.device

        qkv = self._draw(len(lengths), (heads + 2 * kv_heads) * dim)
        for row, length in enumerate(lengths):
            make_last_stand_out(qkv[row, (heads + kv_heads) * dim :], length)
        angle = torch.randn(len(lengths), dim // 2, generator=self._generator)
        cos = torch.cat((angle.cos(),) * 2, -1).to(self._dtype).to(device)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(self._dtype).to(device)
        slots = torch.tensor(
            [
                int(blocks[(length - 1) // block]) * block + (length - 1) % block
                for blocks, length in zip(tables, lengths, strict=True)
            ],
            dtype=torch.int32,
            device=device,
        )
        expected_qkv, expected_kv = qkv.cpu().clone(), kv.cpu().clone()
        reference_attention.rope_kv(
            expected_qkv, cos.cpu(), sin.cpu(), slots.cpu(), expected_kv, num_heads=heads
        )
        plan = self._plan("rope_kv", "decode", k=dim)
        rope_kv(qkv, cos, sin, slots, kv, plan, num_heads=heads)
        yield "rope_kv q", qkv[:, : heads * dim], expected_qkv[:, : heads * dim]
        yield "rope_kv kv", kv, expected_kv

        entry = torch.tensor(
            [[row, length, row * width, 0] for row, length in enumerate(lengths)],
            dtype=torch.int32,
            device=device,
        )
        plan = self._plan("paged_decode", "decode", k=dim)
        splitting = Splitting.of(plan, max(lengths))
        workspace = torch.full(
            (splitting.workspace_size(len(lengths), heads, dim) + 4,), torch.nan, device=device
        )
        out = torch.full((len(lengths), heads * dim), torch.nan, dtype=self._dtype, device=device)
        paged_decode(
            qkv,
            kv,
            entry,
            table.to(device),
            out,
            workspace,
            plan,
            max_length=max(lengths),
            num_heads=heads,
        )
        expected = reference_attention.paged_attention(
            qkv.cpu(), kv.cpu(), tables, [length - 1 for length in lengths], num_heads=heads
        )
        yield "paged_decode", out, expected

        plan = self._plan("paged_prefill", "prefill", k=dim)
        length, blocks = lengths[-1], tables[-1]
        count = min(queries_per_task(plan, num_heads=heads, num_kv_heads=kv_heads), length, 16)
        q = self._draw(count, heads * dim)
        first = length - count
        task = torch.tensor(
            [[0, count, first, (len(lengths) - 1) * width]], dtype=torch.int32, device=device
        )
        out = torch.full((count, heads * dim), torch.nan, dtype=self._dtype, device=device)
        paged_prefill(q, kv, task, table.to(device), out, plan, num_heads=heads)
        positions = [first + row for row in range(count)]
        expected = reference_attention.paged_attention(
            q.cpu(), kv.cpu(), [blocks] * count, positions, num_heads=heads
        )
        yield "paged_prefill", out, expected

        source = torch.tensor([0, num_blocks - 1], device=device)
        plan = self._plan("kv_blocks", "decode")
        kv[0, 0, 0, 0, 0] = torch.nan  # moved like any other number
        packed = gather_blocks(kv, source, plan)
        yield "kv_blocks gather", packed, kv[:, source]
        target = torch.tensor([1, 2], device=device)
        expected = kv.clone()
        expected[:, target] = packed
        scatter_blocks(packed, kv, target, plan)
        yield "kv_blocks scatter", kv, expected
        expected[:, 1] = expected[:, 0]
        copy_blocks(kv, source[:1], target[:1], plan)
        yield "kv_blocks copy", kv, expected

    # -------------------------------------------------------------------------- adapters

    def _lora(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        # Here: Triton is imported by the backend, which a module of the engine asks for.
        from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes

        width = self._width
        config = model_config(
            vocab=32,
            hidden=width,
            inner=width + 32,
            layers=1,
            heads=width // 16,
            kv_heads=1,
            head_dim=16,
        )
        shape, pool = shape_of(config), SlotPool()
        for slot, rank in enumerate((8,) if self._machine.is_rehearsal else (8, 24, 64)):
            adapter = random_adapter(shape, rank, self._dtype, pin=False, seed=slot)
            pool.put(slot, adapter)
        many = self._rows if self._machine.is_rehearsal else 200
        backend = TritonLora(
            pool,
            shape,
            TritonLoraSizes(len(pool.adapters), 64, many, 32),
            dtype=self._dtype,
            device=self._machine.device,
            plans=self._plans,
        )
        plain = PlainLora(pool, shape)
        linears = shape.linear_shapes()
        inputs, outputs = width, sum(linears[f"self_attn.{name}_proj"][0] for name in "qkv")
        for rows, name in ((2, "few rows"), (min(many, 24), "decode"), (many, "prefill")):
            slot_T = (np.arange(rows, dtype=np.int32) % (len(pool.adapters) + 1)) - 1
            x, y = self._draw(rows, inputs), self._draw(rows, outputs)
            expected = y.float().cpu()
            batch = backend.prepare(slot_T, pool.version)
            assert batch is not None
            backend.add(y, x, 0, "qkv", batch)
            plain.add(expected, x.cpu(), 0, "qkv", slot_T.tolist())
            yield f"lora {name}", y, expected


# ---------------------------------------------------------------------------- sampling


def _sampling(machine: Machine, plans: PlanTable) -> Iterator[tuple[str, int, int]]:
    """Tokens that differ from the host's: (kind, how many, of how many)."""
    # The host takes a millisecond or more for each.
    count, vocab = (2, 67) if machine.is_rehearsal else (128, 128_256)
    kinds = {
        "sample greedy": SamplingParams(max_tokens=1, temperature=0.0),
        "sample temperature": SamplingParams(max_tokens=1, temperature=0.8, seed=2**63 + 3),
        "sample top_p": SamplingParams(max_tokens=1, top_p=0.9, seed=5),
        "sample top_k min_p": SamplingParams(max_tokens=1, top_k=50, min_p=0.02, seed=7),
    }
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn((count, vocab), generator=generator)).to(torch.bfloat16)
    on_device, no_text = logits.to(machine.device), np.zeros(1, np.int64)
    for name, params in kinds.items():
        packed = np.empty((count, NUM_FIELDS), np.int64)
        temperature = 0.0 if params.temperature == 0 else temperature_of(params)
        is_filtered = pack_rows(
            packed,
            temperature_R=[temperature] * count,
            top_k_R=[params.top_k] * count,
            top_p_R=[params.top_p] * count,
            min_p_R=[params.min_p] * count,
            seed_R=np.full(count, params.seed, np.uint64),
            position_R=range(count),
        )
        rows = torch.from_numpy(packed).to(machine.device)
        drawn = sample(on_device, rows, plans, is_filtered=is_filtered)
        host = sample_on_host(
            logits.float().numpy(),
            [SampleRow(params, position, no_text, 1) for position in range(count)],
        )
        num_different = int((drawn.token_R.cpu().numpy() != host.token_ids_R).sum())
        yield name, num_different, count
