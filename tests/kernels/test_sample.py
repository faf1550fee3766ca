"""Sampling on the device: the host's integers, the host's kept sets, the host's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.filters import kept_ids, temperature_of
from loraplex_engine.sampling.noise import gumbel, random_bits
from loraplex_engine.sampling.sampler import SampleRow, token_logprobs
from loraplex_engine.sampling.sampler import sample as sample_on_host
from loraplex_kernels.counter_noise import (
    gumbel_32,
    gumbel_64,
    random_bits_at,
    random_bits_from,
)
from loraplex_kernels.plans import COLUMNS, Column, Plan, PlanTable, open_plans
from loraplex_kernels.sample import Drawn, sample
from loraplex_kernels.sample_cutoff import sample_cutoff
from loraplex_kernels.sample_draw import FINE, NOT_FINITE, STUCK
from loraplex_kernels.sample_rows import NUM_FIELDS, pack_rows
from loraplex_kernels.sample_split import num_shares
from loraplex_kernels.support import ARCHITECTURES

PLANS = open_plans("sm_90", "fast")


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)


GREEDY = params(temperature=0.0)
SEEDED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "seed": 2**63 + 5},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0, "temperature": 2.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.01, "temperature": 1.7},
]
ALL = [GREEDY, *(params(**{"seed": 7, **fields}) for fields in SEEDED)]


def logits_of(num_rows: int, size: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((num_rows, size)) * scale).astype(np.float32)


def pack(rows: Sequence[SamplingParams], positions: Sequence[int]) -> tuple[np.ndarray, bool]:
    packed = np.full((len(rows), NUM_FIELDS), -1, np.int64)
    is_filtered = pack_rows(
        packed,
        temperature_R=[0.0 if row.temperature == 0 else temperature_of(row) for row in rows],
        top_k_R=[row.top_k for row in rows],
        top_p_R=[row.top_p for row in rows],
        min_p_R=[row.min_p for row in rows],
        seed_R=[row.seed for row in rows],
        position_R=positions,
    )
    return packed, is_filtered


def draw(
    logits_RV: torch.Tensor,
    rows: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    plans: PlanTable = PLANS,
    **flags: bool,
) -> Drawn:
    packed, is_filtered = pack(rows, positions or range(len(rows)))
    out_2R = torch.full((2, len(rows)), -77, dtype=torch.int32, device=logits_RV.device)
    rows_RF = torch.from_numpy(packed).to(logits_RV.device)
    return sample(logits_RV, rows_RF, plans, is_filtered=is_filtered, out_2R=out_2R, **flags)


def on_host(
    logits_RV: torch.Tensor, rows: Sequence[SamplingParams], positions: Sequence[int] | None = None
) -> np.ndarray:
    host_rows = [
        SampleRow(row, position, np.ones(1 + position, np.int64), 1)
        for row, position in zip(rows, positions or range(len(rows)), strict=True)
    ]
    return sample_on_host(logits_RV.float().cpu().numpy(), host_rows).token_ids_R


def small_plans(folder: Path, num_splits: int = 1) -> PlanTable:
    """Many blocks and chunks of few ids; rows that filter are shared out to so many programs."""
    (folder / "sm_90").mkdir()
    for kernel, config in (
        ("sample_cutoff", {"BLOCK": 16, "NUM_SPLITS": num_splits}),
        ("sample_draw", {"CHUNK": 64, "BLOCK": 16}),
        ("sample_pick", {}),
    ):
        plan = {"config": config, "num_warps": 1, "num_stages": 1, "reason": "test"}
        entry = {"when": {}, "fast": plan, "invariant": plan}
        document = {"kernel": kernel, "arch": "sm_90", "entries": [entry]}
        (folder / "sm_90" / f"{kernel}.json").write_text(json.dumps(document))
    return PlanTable("sm_90", "fast", folder)


# ---------------------------------------------------------------------------- noise


@triton.jit
def _store_noise(key_ptr, bits_ptr, at_ptr, noise32_ptr, noise64_ptr, first, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    seed, position = tl.load(key_ptr), tl.load(key_ptr + 1)
    bits = random_bits_from(seed, position, first, BLOCK)
    tl.store(bits_ptr + place, bits)
    tl.store(at_ptr + place, random_bits_at(seed, position, first + BLOCK - 1 - place))
    tl.store(noise32_ptr + place, gumbel_32(bits))
    tl.store(noise64_ptr + place, gumbel_64(bits))


@pytest.mark.parametrize("seed", [0, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize(("position", "first"), [(0, 0), (9, 64), (2**32 + 3, 0), (2**40, 128_000)])
def test_noise_has_the_host_s_integers(
    seed: int, position: int, first: int, device: torch.device
) -> None:
    size = 64
    bits, at = torch.zeros((2, size), dtype=torch.int32, device=device)
    noise32 = torch.zeros(size, dtype=torch.float32, device=device)
    noise64 = torch.zeros(size, dtype=torch.float64, device=device)

    # As `pack_rows` hands it over: the bits of a uint64.
    key = torch.from_numpy(np.asarray([seed, position], np.uint64).view(np.int64))

    _store_noise[(1,)](
        key.to(device),
        bits,
        at,
        noise32,
        noise64,
        first,
        BLOCK=size,
        enable_fp_fusion=True,
    )

    expected = random_bits(
        np.asarray([seed], np.uint64),
        np.asarray([position]),
        np.zeros(size, np.int64),
        np.arange(first, first + size),
    )
    assert bits.cpu().numpy().view(np.uint32).tolist() == expected.tolist()
    assert at.cpu().numpy().view(np.uint32).tolist() == expected[::-1].tolist()
    exact = gumbel(expected)
    assert np.abs(noise64.cpu().numpy() - exact).max() < 1e-13
    assert np.abs(noise32.cpu().numpy() - exact).max() < 5e-6


@triton.jit
def _store_gumbel(bits_ptr, noise32_ptr, noise64_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + place).to(tl.uint32, bitcast=True)
    tl.store(noise32_ptr + place, gumbel_32(bits))
    tl.store(noise64_ptr + place, gumbel_64(bits))


def test_noise_of_the_rarest_integers_is_as_exact(device: torch.device) -> None:
    middle, last = 2**31, 2**32 - 1
    edges = [0, 1, 2, middle - 1, middle, middle + 1, last - 1, last]
    rare = [last - 3**power for power in range(19)] + [3**power for power in range(19)]
    bits = np.asarray([*edges, *rare, *range(2**32 - 82, 2**32)], np.uint32)
    noise32 = torch.zeros(bits.size, dtype=torch.float32, device=device)
    noise64 = torch.zeros(bits.size, dtype=torch.float64, device=device)
    bits_device = torch.from_numpy(bits.view(np.int32)).to(device)

    _store_gumbel[(1,)](bits_device, noise32, noise64, BLOCK=bits.size, enable_fp_fusion=True)

    exact = gumbel(bits)
    assert bits.size == 128
    assert np.abs(noise32.cpu().numpy() - exact).max() < 5e-6
    assert np.abs(noise64.cpu().numpy() - exact).max() < 1e-12


# ---------------------------------------------------------------------------- filters


def kept_on_device(
    logits: np.ndarray, row: SamplingParams, plans: PlanTable, device: torch.device
) -> set[int]:
    packed, is_filtered = pack([row], [0])
    assert is_filtered
    cutoff, last = torch.full((2, 1), -77, dtype=torch.int32, device=device)
    sample_cutoff(
        torch.from_numpy(logits[None]).to(device),
        torch.from_numpy(packed).to(device),
        cutoff,
        last,
        plans.choose("sample_cutoff", phase="decode", tokens=1),
    )
    values = np.where(logits == 0, np.float32(0), logits)
    bits = values.view(np.int32)
    key = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_kept = (key > int(cutoff)) | ((key == int(cutoff)) & (np.arange(key.size) <= int(last)))
    # Banned ids win no draw, kept or not.
    return set(np.flatnonzero(is_kept & np.isfinite(logits)).tolist())


def assert_kept(logits: np.ndarray, row: SamplingParams, kept: set[int]) -> bool:
    """Same as on the host, but where p ends within rounding; returns whether it was the same."""
    ids = kept_ids(logits, row)
    assert ids is not None
    expected = set(ids[np.isfinite(logits[ids])].tolist())
    if kept == expected:
        return True
    assert row.top_p < 1.0
    unfiltered = kept_ids(logits, params(top_k=row.top_k)) if row.top_k else None
    order = np.argsort(-logits, kind="stable") if unfiltered is None else unfiltered
    scores = logits[order].astype(np.float64) / temperature_of(row)
    reached = np.cumsum(np.exp(scores - scores[0]))
    reached /= reached[-1]
    short, long = sorted((kept, expected), key=len)
    assert short < long
    assert long == set(order[: len(long)].tolist())
    assert np.abs(reached[len(short) - 1 : len(long) - 1] - row.top_p).max() < 1e-6
    return False


FILTERS = [row for row in ALL if kept_ids(logits_of(1, 200)[0], row) is not None]


@pytest.mark.parametrize("size", [2, 75])
def test_the_kept_ids_are_the_host_s(size: int, tmp_path: Path, device: torch.device) -> None:
    plans = small_plans(tmp_path)
    logits = logits_of(1, size, seed=size)[0]
    for row in FILTERS:
        if kept_ids(logits, row) is not None:
            assert assert_kept(logits, row, kept_on_device(logits, row, plans, device)), row


LOGIT = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, float("-inf"), 3e38, -3e38, 1e-45]),
    st.floats(-20, 20, width=32),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    logits=st.lists(LOGIT, min_size=1, max_size=40),
    top_k=st.integers(0, 41),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 0.999)),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.5, 1.0]),
    temperature=st.sampled_from([1e-7, 0.4, 1.0, 2.0]),
)
def test_any_row_keeps_what_the_host_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    row = params(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    values = np.asarray(logits, np.float32)
    if not np.isfinite(values).any() or kept_ids(values, row) is None:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    assert_kept(values, row, kept_on_device(values, row, PLANS, device))


def cutoffs(logits_RV: torch.Tensor, rows: Sequence[SamplingParams], plan: Plan) -> list[list[int]]:
    """[cutoffs, last ids] of the rows."""
    packed, _ = pack(rows, range(len(rows)))
    found = torch.full((2, len(rows)), -77, dtype=torch.int32, device=logits_RV.device)
    sample_cutoff(logits_RV, torch.from_numpy(packed).to(logits_RV.device), *found, plan)
    return found.tolist()


def split_plan(num_splits: int, block: int = 16) -> Plan:
    return Plan({"BLOCK": block, "NUM_SPLITS": num_splits}, 4, 1, "for tests")


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(size: int, **more: Any) -> torch.Tensor:
        return torch.full((size,), 2**62 - 5, **more)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_a_row_shared_out_to_programs_has_the_same_cutoff(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = FILTERS[1::3] if dtype == torch.bfloat16 else FILTERS  # interpreted: a second each
    rows = [*filters, GREEDY, *[params(top_k=5, top_p=0.9)] * 5]
    logits = torch.from_numpy(logits_of(len(rows), 90, seed=4)).to(dtype).to(device)
    logits[2::4] = logits[2::4].round()  # ties, some of them at the border
    bad = len(rows) - 5
    logits[bad, 80], logits[bad + 1, 3] = torch.nan, torch.inf
    logits[bad + 2] = -torch.inf
    logits[bad + 3, 10:] = -torch.inf
    logits[bad + 4] = 0.0
    logits[bad + 4, ::2] = -0.0
    whole = cutoffs(logits, rows, split_plan(1))
    poison_empty(monkeypatch)

    assert cutoffs(logits, rows, split_plan(2, 64)) == whole
    assert -77 not in whole[0] + whole[1]


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    logits=st.lists(LOGIT, min_size=9, max_size=40),
    num_splits=st.integers(2, 5),
    top_k=st.integers(0, 41),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 0.999)),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.5, 1.0]),
    temperature=st.sampled_from([1e-7, 0.4, 1.0, 2.0]),
)
def test_any_row_shared_out_has_the_same_cutoff(
    logits: list[float],
    num_splits: int,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = torch.tensor([logits], device=device)
    rows = [params(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)]

    assert cutoffs(row, rows, split_plan(num_splits, 8)) == cutoffs(row, rows, split_plan(1))


def test_a_short_row_is_shared_out_to_few_programs() -> None:
    assert [num_shares(size, split_plan(4)) for size in (1, 16, 17, 64, 65, 1_000)] == [
        1,
        1,
        2,
        4,
        3,
        4,
    ]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("column", COLUMNS)
def test_few_rows_of_a_large_vocabulary_are_shared_out(arch: str, column: Column) -> None:
    plans = open_plans(arch, column)

    def shares(tokens: int) -> int:
        return num_shares(128_256, plans.choose("sample_cutoff", phase="decode", tokens=tokens))

    assert [shares(tokens) for tokens in (1, 8, 64, 65)] == [16, 16, 4, 1]


@pytest.mark.parametrize("top_k", [1, 2, 5, 6])
def test_ties_at_the_border_go_to_the_lower_ids(
    top_k: int, tmp_path: Path, device: torch.device
) -> None:
    logits = np.zeros(70, np.float32)
    logits[[3, 20, 21, 50, 69]] = 2.0
    logits[33] = 4.0

    kept = kept_on_device(logits, params(top_k=top_k), small_plans(tmp_path), device)

    assert sorted(kept) == sorted([33, 3, 20, 21, 50, 69][:top_k])


# ---------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, torch.bfloat16),
        pytest.param(65, torch.float32, marks=pytest.mark.slow),
        (350, torch.float16),
        pytest.param(1_500, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_are_the_host_s(size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.from_numpy(logits_of(len(ALL), size, seed=size)).to(dtype).to(device)

    drawn = draw(logits, ALL)

    assert drawn.token_R.tolist() == on_host(logits, ALL).tolist()
    assert drawn.status_R.tolist() == [FINE] * len(ALL)


def test_blocks_and_chunks_do_not_matter(tmp_path: Path, device: torch.device) -> None:
    plans = small_plans(tmp_path)
    rows = [GREEDY, params(seed=3), params(seed=3, top_k=20, top_p=0.8)]
    logits = torch.from_numpy(logits_of(3, 139, scale=1.0)).to(torch.bfloat16).to(device)

    many = draw(logits, rows, plans=plans, has_logprobs=True)
    one = draw(logits, rows, has_logprobs=True)

    assert many.token_R.tolist() == one.token_R.tolist() == on_host(logits, rows).tolist()
    assert many.logprob_R is not None
    assert one.logprob_R is not None
    torch.testing.assert_close(many.logprob_R, one.logprob_R, rtol=1e-6, atol=1e-6)


def test_a_row_draws_the_same_whatever_its_neighbours(device: torch.device) -> None:
    logits = torch.from_numpy(logits_of(len(ALL), 131)).to(device)
    together = draw(logits, ALL).token_R.tolist()
    order = [10, 5, 1, 0]

    turned = draw(logits[order], [ALL[i] for i in order], order)

    assert turned.token_R.tolist() == [together[i] for i in order]
    for row in (1, 10):
        alone = draw(logits[row : row + 1], [ALL[row]], [row])
        assert alone.token_R.tolist() == [together[row]]


def test_rows_far_apart_in_memory_are_found(device: torch.device) -> None:
    wide = torch.full((3, 300), torch.nan, device=device)
    wide[:, 40:171] = torch.from_numpy(logits_of(3, 131)).to(device)
    rows = [GREEDY, params(seed=1), params(seed=1, top_p=0.7)]

    drawn = draw(wide[:, 40:171], rows)

    assert drawn.token_R.tolist() == on_host(wide[:, 40:171], rows).tolist()


@pytest.mark.parametrize(
    "bad",
    [
        -float("nan"),
        *(pytest.param(float(bad), marks=pytest.mark.slow) for bad in ("nan", "inf", "-inf")),
    ],
)
def test_a_bad_row_is_reported_and_harms_no_other(bad: float, device: torch.device) -> None:
    rows = [GREEDY, GREEDY, params(seed=1), params(seed=1), params(top_p=0.5), params(top_p=0.5)]
    logits = torch.from_numpy(logits_of(6, 131)).to(device)
    clean = draw(logits, rows).token_R.tolist()
    logits[[1, 3, 5], 130] = bad

    drawn = draw(logits, rows)

    assert drawn.status_R.tolist() == [FINE, NOT_FINITE] * 3
    assert drawn.token_R.tolist() == [clean[0], 0, clean[2], 0, clean[4], 0]


def test_banned_ids_are_never_drawn_and_a_row_without_others_is_stuck(
    device: torch.device,
) -> None:
    rows = [*ALL, GREEDY, params(top_p=0.5), params(), params()]
    logits = torch.from_numpy(logits_of(len(rows), 90, scale=1.0)).to(device)
    allowed = {7, 30, 31, 89}
    logits[:, [i for i in range(90) if i not in allowed]] = float("-inf")
    logits[len(ALL) : len(ALL) + 3] = float("-inf")
    logits[-1, 30] = float("nan")

    drawn = draw(logits, rows, has_bans=True, has_logprobs=True)

    assert set(drawn.token_R[: len(ALL)].tolist()) <= allowed
    assert drawn.status_R.tolist() == [FINE] * len(ALL) + [STUCK] * 3 + [NOT_FINITE]
    assert drawn.token_R[len(ALL) :].tolist() == [0] * 4
    assert drawn.logprob_R is not None
    assert drawn.logprob_R.isfinite().all()
    mask = np.zeros(3, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    # On the host a mask bans; the logits that it hides must be finite.
    shown = np.nan_to_num(logits[: len(ALL)].cpu().numpy(), neginf=0.0)
    host_rows = [
        SampleRow(row, index, np.ones(1 + index, np.int64), 1, mask)
        for index, row in enumerate(ALL)
    ]
    expected = sample_on_host(shown, host_rows).token_ids_R
    assert drawn.token_R[: len(ALL)].tolist() == expected.tolist()


def test_greedy_takes_the_first_of_equals(tmp_path: Path, device: torch.device) -> None:
    logits = torch.zeros((2, 300), device=device)
    logits[1, [70, 200, 299]] = 5.0

    for plans in (PLANS, small_plans(tmp_path)):
        assert draw(logits, [GREEDY] * 2, plans=plans).token_R.tolist() == [0, 70]


def test_extreme_logits_overflow_nothing(device: torch.device) -> None:
    logits = torch.from_numpy(logits_of(4, 60)).to(device) * 2e37
    rows = [GREEDY, params(temperature=1e-7), params(top_p=0.9), params(temperature=1e-7, top_k=9)]

    drawn = draw(logits, rows)

    assert drawn.token_R.tolist() == logits.argmax(dim=1).tolist()


def test_logprobs_are_the_raw_log_softmax(device: torch.device) -> None:
    rows = [GREEDY, params(top_k=3, temperature=0.4), params(seed=2, temperature=1.8)]
    logits = torch.from_numpy(logits_of(3, 1_500)).to(device)

    drawn = draw(logits, rows, has_logprobs=True)

    assert drawn.logprob_R is not None
    expected = [
        token_logprobs(row, token, 0).logprob
        for row, token in zip(logits.cpu().numpy(), drawn.token_R.tolist(), strict=True)
    ]
    assert drawn.logprob_R.tolist() == pytest.approx(expected, abs=2e-6)


def test_scores_closer_than_fp32_rounds_are_told_apart(device: torch.device) -> None:
    """Two ids whose scores differ by 1e-9, either way, by a temperature made for it."""
    rows, positions, expected = [], [], []
    for position in range(40):
        bits = random_bits(
            np.asarray([5], np.uint64), np.asarray([position]), np.zeros(2, np.int64), np.arange(2)
        )
        behind = float(np.subtract(*gumbel(bits)))  # of id 1's noise; its logit makes up for it
        if not 0.5 < behind < 4.0:
            continue
        wins = len(rows) % 2
        rows.append(params(seed=5, temperature=1.0 / (behind + (1e-9 if wins else -1e-9))))
        positions.append(position)
        expected.append(wins)
    assert len(rows) > 8
    logits = torch.tensor([0.0, 1.0], device=device).expand(len(rows), 2)

    drawn = draw(logits, rows, positions)

    assert drawn.token_R.tolist() == expected
    assert on_host(logits, rows, positions).tolist() == expected


def compare_draws(count: int, size: int, device: torch.device) -> int:
    """How many of `count` draws differ from the host's."""
    logits = torch.from_numpy(logits_of(1, size, scale=2.0)).to(device).expand(count, size)
    fields = [SEEDED[0], SEEDED[1], SEEDED[7], SEEDED[0], SEEDED[10]]
    rows = [params(**{"seed": 11, **fields[i % len(fields)]}) for i in range(count)]
    drawn = draw(logits, rows).token_R.cpu().numpy()
    return int((drawn != on_host(logits, rows)).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(40, 400), (4_000, 1_200)])
def test_many_draws_are_the_host_s(count: int, size: int, device: torch.device) -> None:
    num_different = compare_draws(count, size, device)

    print(f"{num_different} of {count} draws differ from the host's")
    assert num_different == 0


# ---------------------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    logits = torch.zeros((2, 8), device=device)
    rows = torch.zeros((2, NUM_FIELDS), dtype=torch.int64, device=device)

    with pytest.raises(ValueError, match="logits is"):
        sample(logits.t(), rows, PLANS, is_filtered=False)
    with pytest.raises(ValueError, match="rows is"):
        sample(logits, rows[:1], PLANS, is_filtered=False)
    with pytest.raises(ValueError, match="out is"):
        sample(logits, rows, PLANS, is_filtered=False, out_2R=torch.zeros((2, 3), device=device))
    with pytest.raises(ValueError, match="ids: 1 to"):
        sample(logits[:, :0], rows, PLANS, is_filtered=False)
    one = {"temperature_R": [1.0], "top_k_R": [0], "top_p_R": [1.0], "min_p_R": [0.0]}
    with pytest.raises(ValueError, match="out is"):
        pack_rows(np.zeros((2, NUM_FIELDS), np.int64), **one, seed_R=[0], position_R=[0])


def test_no_rows_are_no_launch(device: torch.device) -> None:
    logits = torch.zeros((0, 8), device=device)
    rows = torch.zeros((0, NUM_FIELDS), dtype=torch.int64, device=device)

    assert sample(logits, rows, PLANS, is_filtered=True).token_R.tolist() == []
