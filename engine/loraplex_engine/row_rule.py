"""The start-up self-check of the row rule: a row's bits depend only on its own tokens and position.

Exactness holds per CPU and torch build, because the libraries below choose their inner loops by CPU and
by shape. So each replica tries its own routines once, with the model's own weights and widths: every row
of every row count, not the first row (which hides most failures). Where it fails, the replica still
serves: one warning, a metric and a field of its registry record say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from loraplex_engine.attention.base import AttentionBatch
from loraplex_engine.lora.seam import LoraSite
from loraplex_engine.lora.trial import LoraTrial
from loraplex_engine.model.linear import Linear
from loraplex_engine.runner import ModelRunner

log = structlog.get_logger(__name__)

ROW_COUNTS = (*range(1, 18), 33, 130)
_MAX_ROWS = max(ROW_COUNTS)
# Positions that attention is tried at: both sides of a block of 512 keys, which SDPA walks in.
_MAX_CONTEXT = 600
_ACROSS = "across phases"


@dataclass(frozen=True, slots=True)
class RowRuleReport:
    """What was tried and what failed."""

    failures: tuple[str, ...]  # "routine at M rows", in the order tried
    num_checks: int
    duration_s: float

    @property
    def holds(self) -> bool:
        return not self.failures

    @property
    def holds_within_phases(self) -> bool:
        """Whether nothing failed but what compares decoding with other steps."""
        return all(_ACROSS in failure for failure in self.failures)


def check_row_rule(
    runner: ModelRunner,
    *,
    lora: LoraTrial | None = None,
    max_rows: int = _MAX_ROWS,
    row_counts: tuple[int, ...] = ROW_COUNTS,
) -> RowRuleReport:
    """Try every routine of `runner`; writes into its KV cache, so call it before the first request.

    Logs one warning if the rule fails.

    Args:
        lora: the adapters' side of the engine, if it has one.
        max_rows: the most tokens that a step will have: tried too, when it is beyond `row_counts`.
        row_counts: how many rows are tried.
    """
    counts = row_counts if max_rows <= max(row_counts) else (*row_counts, max_rows)
    started = time.perf_counter()
    failures = []
    num_checks = 0
    with torch.inference_mode():
        for name, is_equal in _checks(runner, lora, counts, row_counts):
            num_checks += 1
            if not is_equal:
                failures.append(name)
    report = RowRuleReport(tuple(failures), num_checks, time.perf_counter() - started)
    if failures:
        log.warning(
            "row_rule_fails",
            failures=failures[:10],
            num_failures=len(failures),
            num_checks=num_checks,
            holds_within_phases=report.holds_within_phases,
            effect="answers may differ in the last bits with the batch they are computed in",
        )
    return report


def _checks(
    runner: ModelRunner,
    lora: LoraTrial | None,
    counts: tuple[int, ...],
    row_counts: tuple[int, ...],
) -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(0)
    device, dtype = runner.model.device, runner.model.dtype

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    yield from _check_linears(runner, draw, counts)
    yield from _check_elementwise(runner, draw, counts)
    if lora is not None:
        yield from _check_lora(lora, draw, counts, max(row_counts))
    yield from _check_attention(runner, draw, row_counts)


def _check_linears(
    runner: ModelRunner, draw: Callable[..., Tensor], counts: tuple[int, ...]
) -> Iterator[tuple[str, bool]]:
    model = runner.model
    first = model.layers[0]
    by_shape: dict[tuple[int, int], Linear] = {}
    for linear in (first.qkv, first.o, first.gate_up, first.down, model.lm_head):
        by_shape.setdefault((linear.in_features, linear.out_features), linear)
    for (num_in, num_out), linear in by_shape.items():
        x_MK = draw(max(counts), num_in)
        name = f"linear {num_in} -> {num_out}"
        yield from _compare_counts(name, _on_rows_of(x_MK, linear), counts)
        if _has_phases(runner):

            def decode(x_MK: Tensor, linear: Linear = linear) -> Tensor:
                return linear(x_MK, "decode")

            yield from _compare_counts(f"{name}, decode,", _on_rows_of(x_MK, decode), counts)
            yield f"{name} {_ACROSS}", _same_bits(linear(x_MK), decode(x_MK))


def _check_elementwise(
    runner: ModelRunner, draw: Callable[..., Tensor], counts: tuple[int, ...]
) -> Iterator[tuple[str, bool]]:
    model = runner.model
    weight = draw(model.config.hidden_size)

    def padded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            rows = x.new_zeros(model.rows_for(x.shape[0]), x.shape[1])
            rows[: x.shape[0]] = x
            return function(rows)[: x.shape[0]]

        return run

    norm = padded(lambda x: model.ops.rms_norm(x, weight, model.config.rms_norm_eps))
    hidden = draw(max(counts), model.config.hidden_size)
    yield from _compare_counts("rms_norm", _on_rows_of(hidden, norm), counts)
    gates = draw(max(counts), 2 * model.config.intermediate_size)
    silu = padded(lambda x: model.ops.gated(x, "prefill"))
    yield from _compare_counts("silu", _on_rows_of(gates, silu), counts)
    if _has_phases(runner):
        decode = padded(lambda x: model.ops.gated(x, "decode"))
        yield from _compare_counts("silu, decode,", _on_rows_of(gates, decode), counts)
        yield f"silu {_ACROSS}", _same_bits(silu(gates), decode(gates))


def _check_lora(
    trial: LoraTrial, draw: Callable[..., Tensor], counts: tuple[int, ...], most_sampled: int
) -> Iterator[tuple[str, bool]]:
    num_rows = max(counts)
    # Rows of every adapter and of none, in no order: what a row's neighbours are changes with the count.
    slot_T = np.random.default_rng(0).integers(-1, trial.num_slots, num_rows).astype(np.int32)
    for layout in trial.layouts:
        x_TK, y_TN = draw(num_rows, layout.num_inputs), draw(num_rows, layout.num_outputs)

        def add(
            rows: slice, x_TK: Tensor = x_TK, y_TN: Tensor = y_TN, site: LoraSite = layout.site
        ) -> Tensor:
            out_TN = y_TN[rows].clone()
            batch = trial.backend.prepare(slot_T[rows], 0)
            if batch is not None:
                trial.backend.add(out_TN, x_TK[rows], 0, site, batch)
            return out_TN

        yield from _compare_counts(f"lora {layout.site}", add, counts)

    token_T = torch.from_numpy(np.random.default_rng(1).integers(0, trial.vocab_size, num_rows))
    x_TH = draw(num_rows, trial.hidden_size)
    token_T = token_T.to(x_TH.device)
    # The head runs on sampled rows only, and its rows are long.
    head_counts = tuple(count for count in counts if count <= most_sampled)
    scores_TV = draw(max(head_counts), trial.vocab_size)

    def embed(rows: slice) -> Tensor:
        out_TH = x_TH[rows].clone()
        batch = trial.backend.prepare(slot_T[rows], 0)
        if batch is not None:
            trial.backend.add_embedding(out_TH, token_T[rows], batch)
        return out_TH

    def score(rows: slice) -> Tensor:
        out_TV = scores_TV[rows].clone()
        batch = trial.backend.prepare(slot_T[rows], 0)
        if batch is not None:
            trial.backend.add_head(out_TV, x_TH[rows], batch)
        return out_TV

    yield from _compare_counts("lora embed_tokens", embed, counts)
    yield from _compare_counts("lora lm_head", score, head_counts)


def _on_rows_of(x_MK: Tensor, function: Callable[[Tensor], Tensor]) -> Callable[[slice], Tensor]:
    return lambda rows: function(x_MK[rows])


def _compare_counts(
    name: str, run: Callable[[slice], Tensor], counts: tuple[int, ...]
) -> Iterator[tuple[str, bool]]:
    """Every row at every count, from the front and from the back, against all rows at once."""
    total = max(counts)
    reference = run(slice(0, total))
    for count in counts:
        is_equal = _same_bits(run(slice(0, count)), reference[:count])
        if is_equal and count > 1:
            # From the back, rows stand at other places of the kernel's tiles; one place is enough at 1.
            is_equal = _same_bits(run(slice(total - count, total)), reference[total - count :])
        yield f"{name} at {count} rows", is_equal


def _check_attention(
    runner: ModelRunner, draw: Callable[..., Tensor], row_counts: tuple[int, ...]
) -> Iterator[tuple[str, bool]]:
    limits, shape = runner.limits, runner.model.attention_shape
    attention, kv = runner.attention, runner.kv_layers[0]
    context = min(_MAX_CONTEXT, limits.num_blocks * limits.block_size, limits.max_model_len)
    num_blocks = -(-context // limits.block_size)
    # One sequence seen from many positions: no check writes, so that all may share its blocks.
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    width = shape.q_size + 2 * shape.kv_size

    def prepare(computed: list[int], scheduled: list[int], num_prompt: int) -> tuple[Any, int]:
        tables = np.broadcast_to(table, (len(computed), num_blocks))
        num_rows = runner.model.rows_for(sum(scheduled))
        runner.inputs.wait()
        plan = attention.prepare(
            AttentionBatch(
                np.asarray(computed, np.int32),
                np.asarray(scheduled, np.int32),
                tables,
                num_rows,
                np.full(len(computed), num_prompt, np.int32),
            )
        )
        runner.inputs.flush()
        return plan, num_rows

    def attend(q_TC: Tensor, computed: list[int], scheduled: list[int], num_prompt: int) -> Tensor:
        plan, num_rows = prepare(computed, scheduled, num_prompt)
        qkv_TC = q_TC.new_zeros(num_rows, width)
        qkv_TC[: len(q_TC), : shape.q_size] = q_TC
        return attention.forward(qkv_TC, kv, plan)[: len(q_TC)]

    count = min(max(row_counts), context)
    # In pieces: a backend has room for no more rows than a step has.
    for start in range(0, context, count):
        plan, num_rows = prepare([start], [min(count, context - start)], context)
        keys_values = draw(num_rows, 2 * shape.kv_size)
        qkv_TC = torch.cat((keys_values.new_zeros(num_rows, shape.q_size), keys_values), dim=1)
        # Unrotated: random keys are as good as rotated random keys.
        cos_T1D = keys_values.new_ones(num_rows, 1, shape.head_dim)
        attention.rotate_and_write(qkv_TC, cos_T1D, torch.zeros_like(cos_T1D), kv, plan)

    first = (context - count) // 2
    q_TC = draw(count, shape.q_size)
    run = list(range(first, first + count))
    spread = np.linspace(0, context - 1, count).astype(int).tolist()
    counts = [rows for rows in row_counts if rows <= count]
    splits = attention.splits_prompts
    across = f" {_ACROSS}" if _has_phases(runner) and not splits else ""
    trials = [("chunk", run, context), ("batch", spread, 0)]
    if splits:
        # Of a prompt one at a time, as where prompts end; and guesses, one sequence's several at once.
        trials += [("batch of prompts", spread, context), ("drafts", run, 0)]
    for name, positions, num_prompt in trials:
        alone = torch.cat(
            [
                attend(q_TC[i : i + 1], [position], [1], num_prompt)
                for i, position in enumerate(positions)
            ]
        )
        is_chunk = positions is run
        whole = attend(q_TC, [first], [count], num_prompt) if across and is_chunk else alone
        for rows in counts:
            if is_chunk:
                out = attend(q_TC[:rows], [first], [rows], num_prompt)
                if across and rows > 1:
                    yield f"attention {name} of {rows}", _same_bits(out, whole[:rows])
                yield f"attention {name} of {rows}{across}", _same_bits(out, alone[:rows])
            else:
                out = attend(q_TC[:rows], positions[:rows], [1] * rows, num_prompt)
                yield f"attention {name} of {rows}", _same_bits(out, alone[:rows])


def _has_phases(runner: ModelRunner) -> bool:
    """Whether decoding takes other launch plans than steps of several tokens a row do."""
    return runner.model.ops.name == "triton"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
