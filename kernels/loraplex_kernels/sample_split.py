"""A row's cutoff found by several programs: where rows are few, one program a row leaves the GPU idle.

The border key is read digit by digit, four bits a launch, from the top. In a launch each program of a row sums, over
its share of the ids, what lies at or above each of 16 probes; at the start of the next one every program of the row
adds up those sums, in order, and settles the digit. Launches are the only barrier: no program waits for another,
and sums of integers are the same however they are shared out. So the outcome is that of `sample_cutoff`, bit for bit.

    stage 0                    the extremes of the row
    stages 1 to D              a digit of top-k's key each: counts
    stage D + 1                the probability that top-k leaves
    stages D + 2 to 2 D + 1    a digit of top-p's key each: probability
    stage 2 D + 2              ids at the final key, by share
    stage 2 D + 3              cutoff and last id are written

D is 4 for bf16, whose keys have 16 bits, 5 for fp16, 8 for fp32. What a row does not ask for it leaves out; a row
without filters leaves every launch at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div
from loraplex_kernels.plans import Plan, PlanEntry
from loraplex_kernels.sample_keys import (
    LEAST,
    MOST,
    is_all_numbers,
    load_keys,
    min_p_key,
    nth_at,
    num_needed,
    top_p_target,
    value_of,
    weight_of,
)
from loraplex_kernels.sample_rows import MIN_P_LOG, NUM_FIELDS, TEMPERATURE, TOP_K, TOP_P
from loraplex_kernels.support import Support, dtype_size, triton_type

KERNEL = "sample_split"

_DIGIT_BITS: tl.constexpr = tl.constexpr(4)
# The upper 16, 19 or 32 bits of a key differ from one number of the dtype to another; those below are all alike.
_NUM_DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}

_PROBES: tl.constexpr = tl.constexpr(2**4)
_QUARTER: tl.constexpr = tl.constexpr(2**4 // 4)
# What a row's programs know, int64: the extremes' keys, cutoff and how many ids at it are kept, the digits so far,
# what is above them, and what is searched for.
_NUM_STATES: tl.constexpr = tl.constexpr(8)
_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_TOP_K: tl.constexpr = tl.constexpr(TOP_K)
_TOP_P: tl.constexpr = tl.constexpr(TOP_P)
_MIN_P_LOG: tl.constexpr = tl.constexpr(MIN_P_LOG)
_NUM_FIELDS: tl.constexpr = tl.constexpr(NUM_FIELDS)


@triton.jit
def _lane(values, at: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, _PROBES) == at, values, 0), axis=0)


@triton.jit
def _key_of(prefix, shift):
    """The key whose digits are known; the bits below are zeros in positive numbers' keys, ones in negative ones'."""
    return tl.where(prefix < 0, prefix + ((tl.full([], 1, tl.int64) << shift) - 1), prefix)


@triton.jit
def _sums_from(key, weight, base, step, low):
    """Sums of the weights at or above a quarter of the probes: all 16 at once would spill."""
    probes = (base + tl.arange(0, _QUARTER) * step).to(tl.int32)
    is_in = key[:, None] >= tl.maximum(probes, low)[None, :]
    return tl.sum(tl.where(is_in, weight[:, None], 0), axis=0)


@triton.jit(do_not_specialize=["num_splits", "stage", "shift", "num_digits"])
def _sample_split(
    logits_ptr,
    rows_ptr,
    cutoff_ptr,
    last_ptr,
    state_ptr,
    part_ptr,
    logits_stride,
    size,
    share,
    num_splits,
    stage,
    shift,
    num_digits,
    BLOCK: tl.constexpr,
):
    num_rows = tl.num_programs(0).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    record = rows_ptr + row * _NUM_FIELDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float64, bitcast=True)
    top_k = tl.load(record + _TOP_K)
    top_p = tl.load(record + _TOP_P).to(tl.float64, bitcast=True)
    min_p_log = tl.load(record + _MIN_P_LOG).to(tl.float64, bitcast=True)
    has_top_k = (top_k > 0) & (top_k < size)
    has_top_p = top_p < 1.0
    has_min_p = min_p_log > float("-inf")
    mass_stage = num_digits + 1
    count_stage = 2 * num_digits + 2
    last_stage = count_stage + 1
    is_last = stage == last_stage
    if (temperature <= 0.0) | ((has_top_k | has_top_p | has_min_p) == 0):
        if is_last & (split == 0):
            tl.store(cutoff_ptr + row, LEAST)
            tl.store(last_ptr + row, size - 1)
        return

    # What the launches before have found; even and odd ones write to different places.
    before, after = ((stage + 1) & 1).to(tl.int64), (stage & 1).to(tl.int64)
    state_in = state_ptr + (before * num_rows + row) * _NUM_STATES
    is_known = stage > 1
    high = tl.load(state_in, mask=is_known, other=0).to(tl.int32)
    low = tl.load(state_in + 1, mask=is_known, other=0).to(tl.int32)
    cutoff = tl.load(state_in + 2, mask=is_known, other=0).to(tl.int32)
    num_kept = tl.load(state_in + 3, mask=is_known, other=0)
    prefix = tl.load(state_in + 4, mask=is_known, other=0)
    above = tl.load(state_in + 5, mask=is_known, other=0)
    target = tl.load(state_in + 6, mask=is_known, other=0)
    part_in = part_ptr + (before * num_rows + row) * num_splits * _PROBES
    part_out = part_ptr + ((after * num_rows + row) * num_splits + split) * _PROBES
    probe = tl.arange(0, _PROBES)
    first = split * share
    end = tl.minimum(first + share, size)
    row_ptr = logits_ptr + row * logits_stride

    if stage == 0:
        highs = tl.full([BLOCK], LEAST, tl.int32)
        lows = tl.full([BLOCK], MOST, tl.int32)
        for start in range(first, end, BLOCK):
            key = load_keys(row_ptr, start, end, BLOCK)
            highs = tl.maximum(highs, key)
            lows = tl.minimum(lows, tl.where(key == LEAST, MOST, key))
        extremes = tl.where(probe == 0, tl.max(highs, axis=0), tl.min(lows, axis=0))
        tl.store(part_out + probe, extremes.to(tl.int64))
        return

    nothing = tl.full([], 0, tl.int64)
    if stage == 1:
        high, low = tl.full([], LEAST, tl.int32), tl.full([], MOST, tl.int32)
        for other in range(0, num_splits):
            high = tl.maximum(high, tl.load(part_in + other * _PROBES).to(tl.int32))
            low = tl.minimum(low, tl.load(part_in + other * _PROBES + 1).to(tl.int32))
        cutoff = tl.minimum(low, high)
        num_kept = nothing + size
        prefix = nothing + LEAST
        above = nothing
        target = top_k
    # A row that is not all numbers keeps everything and is refused later.
    if is_all_numbers(low, high) == 0:
        if split == 0:
            state_out = state_ptr + (after * num_rows + row) * _NUM_STATES
            tl.store(state_out, high.to(tl.int64))
            tl.store(state_out + 1, low.to(tl.int64))
            if is_last:
                tl.store(cutoff_ptr + row, LEAST)
                tl.store(last_ptr + row, size - 1)
        return
    highest = value_of(high)
    inverse = 1.0 / temperature.to(tl.float32)

    is_top_k_digit = (stage > 1) & (stage <= mass_stage) & has_top_k
    is_top_p_digit = (stage > mass_stage + 1) & (stage <= count_stage) & has_top_p
    is_total = (stage == mass_stage + 1) & has_top_p
    if is_top_k_digit | is_top_p_digit | is_total:
        sums = tl.zeros([_PROBES], tl.int64)
        for other in range(0, num_splits):
            sums += tl.load(part_in + other * _PROBES + probe)
        if is_total:
            total = _lane(sums, 0)
            if has_top_k:  # of the ids at its key it may have left some out
                total = _lane(sums, 1) + num_kept * weight_of(cutoff, highest, inverse)
            target = top_p_target(top_p, total)
            prefix = nothing + LEAST
            above = nothing
        else:
            # `shift` is this launch's; the sums are those of the digit before it.
            past = tl.where(
                (stage == mass_stage) | (stage == count_stage), shift, shift + _DIGIT_BITS
            )
            # The sums fall from probe to probe, and the first one, of the digits so far, reaches the target.
            is_reached = sums >= target
            digit = tl.sum(is_reached.to(tl.int64), axis=0) - 1
            above = tl.maximum(above, tl.max(tl.where(is_reached, 0, sums), axis=0))
            prefix += digit << past
            if stage == mass_stage:
                cutoff = _key_of(prefix, past).to(tl.int32)
                num_kept = top_k - above
            if stage == count_stage:
                under_p = _key_of(prefix, past).to(tl.int32)
                enough = num_needed(target - above, weight_of(under_p, highest, inverse))
                # As long as the key is that of top-k, some of the ids there may be out already.
                num_kept = tl.where(under_p > cutoff, enough, tl.minimum(num_kept, enough))
                cutoff = under_p
    if (stage == count_stage) & has_min_p:
        least = min_p_key(highest, min_p_log)
        if least > cutoff:
            cutoff = least
            num_kept = nothing + size

    if is_last:
        owner, seen_there = 0, nothing
        if num_kept < size:
            seen = nothing
            for other in range(0, num_splits):
                at = part_in + other * _PROBES
                here = tl.load(at) - tl.load(at + 1)
                if (seen < num_kept) & (seen + here >= num_kept):
                    owner = other
                    seen_there = seen
                seen += here
        if split == owner:
            last = tl.full([], 0, tl.int32) + (size - 1)
            if num_kept < size:
                count = (num_kept - seen_there).to(tl.int32)
                last = nth_at(row_ptr, first, end, cutoff, count, BLOCK)
            tl.store(cutoff_ptr + row, cutoff)
            tl.store(last_ptr + row, last)
        return

    if split == 0:
        state_out = state_ptr + (after * num_rows + row) * _NUM_STATES
        tl.store(state_out, high.to(tl.int64))
        tl.store(state_out + 1, low.to(tl.int64))
        tl.store(state_out + 2, cutoff.to(tl.int64))
        tl.store(state_out + 3, num_kept)
        tl.store(state_out + 4, prefix)
        tl.store(state_out + 5, above)
        tl.store(state_out + 6, target)
    is_mass = (stage >= mass_stage) & (stage < count_stage)
    is_needed = tl.where(is_mass, has_top_p, (stage == count_stage) | has_top_k)
    if is_needed:
        # Of 16 probes, of a digit each, or of the cutoff and the key above it, whose followers are not looked at.
        is_key = (stage == mass_stage) | (stage == count_stage)
        base = tl.where(is_key, cutoff.to(tl.int64), prefix)
        step = (nothing + 1) << tl.where(is_key, 0, shift)
        sums0 = tl.zeros([_QUARTER], tl.int64)
        sums1 = tl.zeros([_QUARTER], tl.int64)
        sums2 = tl.zeros([_QUARTER], tl.int64)
        sums3 = tl.zeros([_QUARTER], tl.int64)
        for start in range(first, end, BLOCK):
            key = load_keys(row_ptr, start, end, BLOCK)
            weight = tl.full([BLOCK], 1, tl.int64)
            if is_mass:
                weight = weight_of(tl.maximum(key, low), highest, inverse)
            sums0 += _sums_from(key, weight, base, step, low)
            sums1 += _sums_from(key, weight, base + _QUARTER * step, step, low)
            sums2 += _sums_from(key, weight, base + 2 * _QUARTER * step, step, low)
            sums3 += _sums_from(key, weight, base + 3 * _QUARTER * step, step, low)
        out = part_out + tl.arange(0, _QUARTER)
        tl.store(out, sums0)
        tl.store(out + _QUARTER, sums1)
        tl.store(out + 2 * _QUARTER, sums2)
        tl.store(out + 3 * _QUARTER, sums3)


def num_shares(size: int, plan: Plan) -> int:
    """Programs that a row of `size` ids is shared out to: whole blocks each, so a short row has few."""
    return ceil_div(size, _share(size, plan))


def sample_split(
    logits_RV: Tensor, rows_RF: Tensor, cutoff_R: Tensor, last_R: Tensor, plan: Plan
) -> None:
    """What `sample_cutoff` does, by `plan.config["NUM_SPLITS"]` programs a row at most; 12 to 20 launches.

    `sample_cutoff.sample_cutoff` chooses between the two; arguments are its own.
    """
    num_rows, size = logits_RV.shape
    num_splits, device = num_shares(size, plan), logits_RV.device
    num_digits = _NUM_DIGITS[logits_RV.dtype]
    state = torch.empty(2 * num_rows * _NUM_STATES.value, dtype=torch.int64, device=device)
    part = torch.empty(2 * num_rows * num_splits * _PROBES.value, dtype=torch.int64, device=device)
    shifts = [32 - _DIGIT_BITS.value * digit for digit in range(1, num_digits + 1)]
    for stage, shift in enumerate([0, *shifts, shifts[-1], *shifts, shifts[-1], 0]):
        _sample_split[(num_rows, num_splits)](
            logits_RV,
            rows_RF,
            cutoff_R,
            last_R,
            state,
            part,
            logits_RV.stride(0),
            size,
            _share(size, plan),
            num_splits,
            stage,
            shift,
            num_digits,
            BLOCK=plan.config["BLOCK"],
            **plan.options(),
        )


def split_case(entry: PlanEntry, support: Support, dtype: str) -> AotCase:
    """The build of an entry of `sample_cutoff`'s table that splits rows; counted is one launch, of a digit."""
    num_rows, size = entry.when.max_tokens or 64, 128_256
    pointers = ("logits_ptr", "rows_ptr", "cutoff_ptr", "last_ptr", "state_ptr", "part_ptr")
    return AotCase(
        kernel=KERNEL,
        fn=_sample_split,
        signature={
            "logits_ptr": f"*{triton_type(dtype)}",
            **dict.fromkeys(("rows_ptr", "state_ptr", "part_ptr"), "*i64"),
            **dict.fromkeys(("cutoff_ptr", "last_ptr"), "*i32"),
            **dict.fromkeys(("logits_stride", "size", "share", "num_splits"), "i32"),
            **dict.fromkeys(("stage", "shift", "num_digits"), "i32"),
        },
        constexprs={"BLOCK": entry.plan.config["BLOCK"]},
        divisible_by_16=(*pointers, "logits_stride", "size", "share"),
        plan=entry.plan,
        arch=support.name,
        dtype=dtype,
        needs=None,
        # From L2 in all launches but the first.
        bytes_moved=num_rows * size * dtype_size(dtype),
        # 16 comparisons, selections and additions of 64 bits an id, and a probability.
        flops=num_rows * size * (16 * 4 + 16),
        shape=f"R={num_rows} V={size} S={entry.plan.config['NUM_SPLITS']}",
    )


def _share(size: int, plan: Plan) -> int:
    """Ids of a program, a multiple of its block."""
    block = plan.config["BLOCK"]
    return block * ceil_div(ceil_div(size, plan.config["NUM_SPLITS"]), block)
