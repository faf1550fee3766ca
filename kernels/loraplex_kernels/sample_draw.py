"""The draw: argmax over the kept ids of logit / temperature + Gumbel noise; for greedy rows of the logit.

Two kernels. `_sample_draw` splits the vocabulary over programs; each scores its chunk in fp32 and leaves the
best two candidates. Noise is bounded, so a block whose best logit is too far behind gets none. `_sample_pick`
scores all candidates of a row again in fp64, exactly as the host's sampler does, and takes the best, the lower
id of equals. So fp32's rounding decides nothing unless three scores of one chunk lie within it.

Noise is a function of (seed, position, id) and chunks are fixed by id, so a row's token depends on that row
alone. The integers are those of loraplex_engine.sampling.noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.counter_noise import (
    MOST_NOISE,
    gumbel_32,
    gumbel_64,
    random_bits_at,
    random_bits_from,
)
from loraplex_kernels.grid import ceil_div, next_power_of_2
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.sample_keys import order_key
from loraplex_kernels.sample_rows import NUM_FIELDS, POSITION, SEED, TEMPERATURE
from loraplex_kernels.support import Support, dtype_size, triton_type

KERNEL = "sample_draw"
PICK_KERNEL = "sample_pick"

# Candidates that a chunk leaves for the second kernel.
NUM_CANDIDATES = 2
# A row's outcome.
FINE, NOT_FINITE, STUCK = 0, 1, 2

_NUM_CANDIDATES: tl.constexpr = tl.constexpr(NUM_CANDIDATES)
_NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)
_MOST_NOISE: tl.constexpr = tl.constexpr(MOST_NOISE)
_NUM_FIELDS: tl.constexpr = tl.constexpr(NUM_FIELDS)
_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_SEED: tl.constexpr = tl.constexpr(SEED)
_POSITION: tl.constexpr = tl.constexpr(POSITION)
_FINE: tl.constexpr = tl.constexpr(FINE)
_NOT_FINITE: tl.constexpr = tl.constexpr(NOT_FINITE)
_STUCK: tl.constexpr = tl.constexpr(STUCK)


@triton.jit
def _sample_draw(
    logits_ptr,
    rows_ptr,
    cutoff_ptr,
    last_ptr,
    score_ptr,
    id_ptr,
    is_bad_ptr,
    highest_ptr,
    total_ptr,
    logits_stride,
    size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    HAS_BANS: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride
    record = rows_ptr + row * _NUM_FIELDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float64, bitcast=True)
    seed = tl.load(record + _SEED)
    position = tl.load(record + _POSITION)
    is_drawn = temperature > 0.0
    warmth = temperature.to(tl.float32)
    cutoff, last = 0, 0
    if IS_FILTERED:
        cutoff = tl.load(cutoff_ptr + row)
        last = tl.load(last_ptr + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)  # a lane for each id % BLOCK
    best_id = tl.full([BLOCK], _NO_ID, tl.int32)
    is_bad = tl.zeros([BLOCK], tl.int32)
    floor = tl.full([], float("-inf"), tl.float32)  # the best of all lanes so far
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    first = chunk * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, size), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_in_row = ids < size
        x = tl.load(row_ptr + ids, mask=is_in_row, other=float("-inf")).to(tl.float32)
        # NaN is neither: it compares with nothing.
        is_number = tl.abs(x) < float("inf")
        if HAS_BANS:
            is_number = is_number | (x == float("-inf"))
        is_bad |= (is_in_row & (is_number == 0)).to(tl.int32)
        x = tl.where(is_number, x, float("-inf"))
        top = tl.max(x, axis=0)
        if HAS_LOGPROBS:
            new_highest = tl.maximum(highest, top)
            # Of a chunk without a number nothing is subtracted: minus infinity from itself is NaN.
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            total = total * tl.exp(tl.minimum(highest, base) - base)
            total += tl.sum(tl.exp(x - base), axis=0)
        highest = tl.maximum(highest, top)
        if IS_FILTERED:
            key = order_key(x)
            is_kept = (key > cutoff) | ((key == cutoff) & (ids <= last))
            x = tl.where(is_kept, x, float("-inf"))
        if is_drawn:
            # Temperature times the score: no temperature however small makes an infinity of a logit.
            if tl.max(x, axis=0) + warmth * _MOST_NOISE >= floor:
                score = x + warmth * gumbel_32(random_bits_from(seed, position, start, BLOCK))
                best_id = tl.where(score > best, ids, best_id)
                best = tl.maximum(best, score)
                floor = tl.maximum(floor, tl.max(score, axis=0))
        else:
            best_id = tl.where(x > best, ids, best_id)
            best = tl.maximum(best, x)
    place = row * num_chunks + chunk
    for candidate in tl.static_range(_NUM_CANDIDATES):
        score = tl.max(best, axis=0)
        token = tl.min(tl.where(best == score, best_id, _NO_ID), axis=0)
        tl.store(score_ptr + place * _NUM_CANDIDATES + candidate, score)
        tl.store(id_ptr + place * _NUM_CANDIDATES + candidate, token)
        best = tl.where(best_id == token, float("-inf"), best)
    tl.store(is_bad_ptr + place, tl.max(is_bad, axis=0))
    tl.store(highest_ptr + place, highest)
    tl.store(total_ptr + place, total)


@triton.jit
def _sample_pick(
    logits_ptr,
    rows_ptr,
    score_ptr,
    id_ptr,
    is_bad_ptr,
    highest_ptr,
    total_ptr,
    token_ptr,
    status_ptr,
    logprob_ptr,
    logits_stride,
    num_chunks,
    NUM_PADDED: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    record = rows_ptr + row * _NUM_FIELDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float64, bitcast=True)
    place = tl.arange(0, NUM_PADDED)
    is_chunk = place < num_chunks
    is_bad = tl.load(is_bad_ptr + row * num_chunks + place, mask=is_chunk, other=0)
    highest_C = tl.load(highest_ptr + row * num_chunks + place, mask=is_chunk, other=float("-inf"))
    highest = tl.max(highest_C, axis=0)

    place = tl.arange(0, NUM_PADDED * _NUM_CANDIDATES)
    is_candidate = place < num_chunks * _NUM_CANDIDATES
    at = row * num_chunks * _NUM_CANDIDATES + place
    score = tl.load(score_ptr + at, mask=is_candidate, other=float("-inf"))
    ids = tl.load(id_ptr + at, mask=is_candidate, other=_NO_ID)
    is_candidate = score > float("-inf")
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=is_candidate, other=0.0)
    exact = x.to(tl.float64)
    if temperature > 0.0:
        bits = random_bits_at(tl.load(record + _SEED), tl.load(record + _POSITION), ids)
        # As the host writes it, so that both round alike.
        base = tl.where(highest == float("-inf"), 0.0, highest).to(tl.float64)
        exact = (exact - base) / temperature + gumbel_64(bits)
    exact = tl.where(is_candidate, exact, float("-inf"))
    top = tl.max(exact, axis=0)
    token = tl.min(tl.where(is_candidate & (exact == top), ids, _NO_ID), axis=0)

    status = tl.where(token == _NO_ID, _STUCK, _FINE)
    status = tl.where(tl.max(is_bad, axis=0) > 0, _NOT_FINITE, status)
    token = tl.where(status == _FINE, token, 0)
    tl.store(token_ptr + row, token)
    tl.store(status_ptr + row, status)
    if HAS_LOGPROBS:
        total_C = tl.load(
            total_ptr + row * num_chunks + tl.arange(0, NUM_PADDED), mask=is_chunk, other=0.0
        )
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(total_C * tl.exp(tl.minimum(highest_C, base) - base), axis=0)
        chosen = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
        is_fine = status == _FINE
        logprob = tl.where(is_fine, chosen, base) - base - tl.log(tl.where(is_fine, total, 1.0))
        tl.store(logprob_ptr + row, tl.where(is_fine, logprob, 0.0))


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the first kernel leaves for the second: R rows, C chunks, K candidates of each."""

    score_RCK: Tensor  # fp32, temperature times the score; minus infinity: none
    id_RCK: Tensor  # int32
    is_bad_RC: Tensor  # int32, 1: a logit of the chunk is not finite
    highest_RC: Tensor  # fp32, of the chunk's logits before filters
    total_RC: Tensor  # fp32, of exp(logit - highest), where log-probabilities are asked for

    @classmethod
    def empty(cls, num_rows: int, num_chunks: int, device: torch.device) -> Candidates:
        """Room for them."""
        fp32, int32 = torch.float32, torch.int32
        shape = (num_rows, num_chunks)
        return cls(
            torch.empty((*shape, NUM_CANDIDATES), dtype=fp32, device=device),
            torch.empty((*shape, NUM_CANDIDATES), dtype=int32, device=device),
            torch.empty(shape, dtype=int32, device=device),
            torch.empty(shape, dtype=fp32, device=device),
            torch.empty(shape, dtype=fp32, device=device),
        )


def sample_draw(
    logits_RV: Tensor,
    rows_RF: Tensor,
    cutoffs: tuple[Tensor, Tensor] | None,
    plan: Plan,
    *,
    has_bans: bool,
    has_logprobs: bool,
) -> Candidates:
    """The candidates of every chunk; `sample.sample` checks the arguments.

    Args:
        logits_RV: (R, V) bf16, fp16 or fp32, rows contiguous.   rows_RF: (R, F) int64.
        cutoffs: what `sample_cutoff` wrote; None: no row filters.
        has_bans: minus infinity bans an id; without, it is not finite like any other infinity.
    """
    num_rows, size = logits_RV.shape
    num_chunks = ceil_div(size, plan.config["CHUNK"])
    found = Candidates.empty(num_rows, num_chunks, logits_RV.device)
    cutoff_R, last_R = (found.id_RCK, found.id_RCK) if cutoffs is None else cutoffs
    _sample_draw[(num_rows, num_chunks)](
        logits_RV,
        rows_RF,
        cutoff_R,
        last_R,
        found.score_RCK,
        found.id_RCK,
        found.is_bad_RC,
        found.highest_RC,
        found.total_RC,
        logits_RV.stride(0),
        size,
        num_chunks,
        IS_FILTERED=cutoffs is not None,
        HAS_BANS=has_bans,
        HAS_LOGPROBS=has_logprobs,
        **plan.launch(),
    )
    return found


def sample_pick(
    logits_RV: Tensor,
    rows_RF: Tensor,
    found: Candidates,
    token_R: Tensor,
    status_R: Tensor,
    logprob_R: Tensor,
    plan: Plan,
    *,
    has_logprobs: bool,
) -> None:
    """The best of each row's candidates; `sample.sample` checks the arguments.

    Args:
        token_R, status_R: (R,) int32, written: the id (0 if there is none), and `FINE`, `NOT_FINITE` or `STUCK`.
        logprob_R: (R,) fp32, written if asked for: natural logarithm, of the unfiltered distribution at
            temperature 1; 0 where there is no token.
    """
    num_rows, num_chunks = found.is_bad_RC.shape
    _sample_pick[(num_rows,)](
        logits_RV,
        rows_RF,
        found.score_RCK,
        found.id_RCK,
        found.is_bad_RC,
        found.highest_RC,
        found.total_RC,
        token_R,
        status_R,
        logprob_R,
        logits_RV.stride(0),
        num_chunks,
        NUM_PADDED=next_power_of_2(num_chunks),
        HAS_LOGPROBS=has_logprobs,
        **plan.launch(),
    )


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in bf16 with filters and log-probabilities, the last one in fp32 without."""
    yield from _draw_cases(table, support)
    yield from _pick_cases(table, support)


_SIZE = 128_256  # Llama-3.1-8B's vocabulary
_ROWS = 64


def _draw_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    entries = table.entries(KERNEL)
    builds = [(entry, "bf16", True) for entry in entries] + [(entries[-1], "fp32", False)]
    for entry, dtype, is_full in builds:
        pointers = (
            *("logits_ptr", "rows_ptr", "cutoff_ptr", "last_ptr", "score_ptr", "id_ptr"),
            *("is_bad_ptr", "highest_ptr", "total_ptr"),
        )
        yield AotCase(
            kernel=KERNEL,
            fn=_sample_draw,
            signature={
                "logits_ptr": f"*{triton_type(dtype)}",
                "rows_ptr": "*i64",
                **dict.fromkeys(("cutoff_ptr", "last_ptr", "id_ptr", "is_bad_ptr"), "*i32"),
                **dict.fromkeys(("score_ptr", "highest_ptr", "total_ptr"), "*fp32"),
                **dict.fromkeys(("logits_stride", "size", "num_chunks"), "i32"),
            },
            constexprs={
                **entry.plan.config,
                "IS_FILTERED": is_full,
                "HAS_BANS": False,
                "HAS_LOGPROBS": is_full,
            },
            divisible_by_16=(*pointers, "logits_stride", "size"),
            plan=entry.plan,
            arch=support.name,
            dtype=dtype,
            needs=None,
            bytes_moved=_ROWS * _SIZE * dtype_size(dtype),
            # Philox is 80 integer operations for four ids, a logarithm about 15.
            flops=_ROWS * _SIZE * 60,
            shape=f"R={_ROWS} V={_SIZE}",
        )


def _pick_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    num_chunks = ceil_div(_SIZE, table.entries(KERNEL)[-1].plan.config["CHUNK"])
    for entry in table.entries(PICK_KERNEL):
        pointers = (
            *("logits_ptr", "rows_ptr", "score_ptr", "id_ptr", "is_bad_ptr", "highest_ptr"),
            *("total_ptr", "token_ptr", "status_ptr", "logprob_ptr"),
        )
        yield AotCase(
            kernel=PICK_KERNEL,
            fn=_sample_pick,
            signature={
                "logits_ptr": "*bf16",
                "rows_ptr": "*i64",
                **dict.fromkeys(("id_ptr", "is_bad_ptr", "token_ptr", "status_ptr"), "*i32"),
                **dict.fromkeys(("score_ptr", "highest_ptr", "total_ptr", "logprob_ptr"), "*fp32"),
                **dict.fromkeys(("logits_stride", "num_chunks"), "i32"),
            },
            constexprs={
                **entry.plan.config,
                "NUM_PADDED": next_power_of_2(num_chunks),
                "HAS_LOGPROBS": True,
            },
            divisible_by_16=(*pointers, "logits_stride"),
            plan=entry.plan,
            arch=support.name,
            dtype="bf16",
            needs=None,
            bytes_moved=_ROWS * num_chunks * (NUM_CANDIDATES * 8 + 12),
            flops=_ROWS * num_chunks * NUM_CANDIDATES * 200,
            shape=f"R={_ROWS} C={num_chunks}",
            has_vector_loads=False,
        )
