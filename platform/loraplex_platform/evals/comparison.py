"""Two runs of one suite version side by side: flips, McNemar's exact test, mean log-probability.

Pure. A case counts as passed only if its status is `pass`. Sources: McNemar 1947 with the exact binomial
tail (Fay 2010 on two-sided exact tests: the central one); the interval is Student's, of paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What one run made of one case."""

    case_id: str
    status: str
    reason: str
    output: str | None
    mean_logprob: float | None
    bits_sha256: str | None = None
    build_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval at `LEVEL`; without ends where there are fewer than two pairs."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`broken`: passed in the first and not in the second; `mended`: the other way round."""

    both: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    broken: tuple[str, ...]
    mended: tuple[str, ...]
    same_output: int
    p_value: float
    logprob_difference: Interval | None  # second minus first, nats a token


def compare(first: Mapping[str, CaseOutcome], second: Mapping[str, CaseOutcome]) -> Comparison:
    """By case id."""
    shared = [case_id for case_id in first if case_id in second]
    broken, mended = [], []
    differences: list[float] = []
    same = 0
    for case_id in shared:
        before, after = first[case_id], second[case_id]
        was, is_now = before.status == "pass", after.status == "pass"
        if was and not is_now:
            broken.append(case_id)
        elif is_now and not was:
            mended.append(case_id)
        same += before.output is not None and before.output == after.output
        if before.mean_logprob is not None and after.mean_logprob is not None:
            differences.append(after.mean_logprob - before.mean_logprob)
    return Comparison(
        both=len(shared),
        only_first=tuple(case_id for case_id in first if case_id not in second),
        only_second=tuple(case_id for case_id in second if case_id not in first),
        broken=tuple(broken),
        mended=tuple(mended),
        same_output=same,
        p_value=mcnemar_exact(len(broken), len(mended)),
        logprob_difference=paired_interval(differences) if differences else None,
    )


def mcnemar_exact(broken: int, mended: int) -> float:
    """Two-sided p of so many flips in either direction if both were equally likely."""
    count = broken + mended
    tail, ways = 0, 1
    for k in range(min(broken, mended) + 1):
        tail += ways
        ways = ways * (count - k) // (k + 1)
    # Integers until here: 2**count is beyond any float for large suites.
    p_value: float = (2 * tail) / (1 << count)
    return min(1.0, p_value)


def paired_interval(differences: Sequence[float]) -> Interval:
    """The mean difference and its Student interval.

    Raises:
        ValueError: there are none.
    """
    if not differences:
        raise ValueError("no pairs")
    count = len(differences)
    mean = math.fsum(differences) / count
    if count < 2:
        return Interval(mean, None, None, count)
    half = (
        student_quantile((1 + LEVEL) / 2, count - 1)
        * statistics.stdev(differences, mean)
        / math.sqrt(count)
    )
    return Interval(mean, mean - half, mean + half, count)


def student_quantile(p: float, degrees: int) -> float:
    """Where Student's distribution reaches p, for p > 0.5: exact for 1 and 2 degrees of freedom, else by
    expansion about the normal quantile (Abramowitz & Stegun 26.7.5), 0.2 % off at 3 and less above.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        a = 4 * p * (1 - p)
        return 2 * (p - 0.5) * math.sqrt(2 / a)
    z = statistics.NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / float(degrees) ** (i + 1) for i, term in enumerate(terms))


# ---------------------------------------------------------------------------- the same revision again


@dataclass(frozen=True, slots=True)
class Change:
    """Why the result of an unchanged revision is not the one of the last time."""

    kind: str  # bits | verdict
    case_ids: tuple[str, ...]


def changes_of(
    before: Mapping[str, CaseOutcome], after: Mapping[str, CaseOutcome]
) -> tuple[Change, ...]:
    """What differs between two runs of the same suite version and revision.

    Where the engine's build is the same, the row rule promises the same bits, of tokens and of their
    log-probabilities: any difference is one. Where it is another, or there is none to compare, only a
    case that passed and does not any more is.
    """
    bits, verdicts = [], []
    for case_id, now in after.items():
        then = before.get(case_id)
        if then is None:
            continue
        is_same_build = then.build_sha256 is not None and then.build_sha256 == now.build_sha256
        if is_same_build and then.bits_sha256 is not None and now.bits_sha256 is not None:
            if then.bits_sha256 != now.bits_sha256:
                bits.append(case_id)
        elif then.status == "pass" and now.status == "fail":
            verdicts.append(case_id)
    found = (Change("bits", tuple(bits)), Change("verdict", tuple(verdicts)))
    return tuple(change for change in found if change.case_ids)
