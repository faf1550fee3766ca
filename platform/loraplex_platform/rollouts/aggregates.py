"""What gates are told of an arm: sums that SQL can make of the requests of one step, and no request itself.

Requests of one subject are alike (sticky assignment keeps them in one arm), so each sum comes with what its
subjects' own sums look like: from that, `evidence.py` takes how many independent requests they are worth. In SQL,
for a value x of each request and the subject's key that `assignment.py` makes:

    select count(*), sum(n)::bigint, sum(s), sum(q), sum(n * n)::bigint, sum(n * s), sum(s * s) from (
        select count(*) n, sum(x) s, sum(x * x) q from requests where … group by subject_key) t

A value that may be wild (a log-probability of -inf) is clipped there to a stated range.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

BUCKETS_PER_OCTAVE: Final = 16  # a bucket's upper edge is 4.4 % above its lower one
_MIN_VALUE: Final = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSums:
    """One value per request, summed over an arm's requests and over its subjects. All zero: no requests.

    With n_c requests and a sum s_c of each subject c:

    Attributes:
        num_subjects: how many c there are.
        num_requests: sum of n_c.
        total: sum of all values, which is that of s_c. For a share: how many requests had it.
        total_squares: sum of all squared values. For a share: the same as `total`.
        square_requests: sum of n_c^2.
        product: sum of n_c s_c.
        square_totals: sum of s_c^2.

    Raises:
        ValueError: sums that no requests can have, or that are not finite.
    """

    num_subjects: int
    num_requests: int
    total: float
    total_squares: float
    square_requests: int
    product: float
    square_totals: float

    def __post_init__(self) -> None:
        """Check what a wrong query would break."""
        floats = (self.total, self.total_squares, self.product, self.square_totals)
        if not all(math.isfinite(value) for value in floats):
            raise ValueError("a sum is not finite: clip the values before they are summed")
        if not 0 <= self.num_subjects <= self.num_requests <= self.square_requests:
            raise ValueError(
                "sums need subjects <= requests <= sum of squared requests per subject; they are"
                f" {self.num_subjects}, {self.num_requests} and {self.square_requests}"
            )
        if self.square_requests > self.num_requests**2:
            raise ValueError("more squared requests per subject than one subject could have")

    @classmethod
    def of(cls, values: Iterable[tuple[Hashable, float]]) -> SubjectSums:
        """From (subject, value) pairs: what the SQL does."""
        counts: dict[Hashable, int] = {}
        totals: dict[Hashable, float] = {}
        total_squares = 0.0
        for subject, value in values:
            counts[subject] = counts.get(subject, 0) + 1
            totals[subject] = totals.get(subject, 0.0) + value
            total_squares += value * value
        return cls(
            num_subjects=len(counts),
            num_requests=sum(counts.values()),
            total=math.fsum(totals.values()),
            total_squares=total_squares,
            square_requests=sum(count**2 for count in counts.values()),
            product=math.fsum(count * totals[subject] for subject, count in counts.items()),
            square_totals=math.fsum(total**2 for total in totals.values()),
        )

    @property
    def mean(self) -> float:
        """Of all requests; 0 where there are none."""
        return self.total / self.num_requests if self.num_requests else 0.0

    @property
    def square_deviations(self) -> float:
        """Sum over requests of (value - mean)^2."""
        return max(0.0, self.total_squares - self.total * self.mean)

    @property
    def square_subject_deviations(self) -> float:
        """Sum over subjects of (s_c - mean n_c)^2."""
        mean = self.mean
        found = self.square_totals - 2 * mean * self.product + mean**2 * self.square_requests
        return max(0.0, found)

    @property
    def requests_per_request(self) -> float:
        """How many requests its subject has, of the average request: at least 1."""
        return self.square_requests / self.num_requests if self.num_requests else 1.0

    @property
    def num_equal_subjects(self) -> float:
        """How many subjects of equal traffic would weigh alike (Kish): one heavy user among many is about one."""
        return self.num_requests / self.requests_per_request


@dataclass(frozen=True)
class Histogram:
    """Counts of positive values in buckets that grow by 2^(1/16), the same for every arm and rollout.

    Bucket k holds [2^(k/16), 2^((k+1)/16)). In SQL: `floor(16 * ln(greatest(x, 0.0009765625)) / ln(2))::int`, grouped.
    Positions are in buckets, so a ratio of values is a difference of positions; within a bucket values are taken
    to lie evenly.

    Attributes:
        counts: by bucket; buckets without requests may be absent.
    """

    counts: Mapping[int, int]

    def __post_init__(self) -> None:
        """Check the counts."""
        if any(count < 0 for count in self.counts.values()):
            raise ValueError("a bucket's count is negative")

    @classmethod
    def of(cls, values: Iterable[float]) -> Histogram:
        """From the values themselves: what the SQL does."""
        counts: dict[int, int] = {}
        for value in values:
            bucket = bucket_of(value)
            counts[bucket] = counts.get(bucket, 0) + 1
        return cls(counts)

    @cached_property
    def num_requests(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    @cached_property
    def _filled(self) -> list[int]:
        return sorted(bucket for bucket, count in self.counts.items() if count)

    @cached_property
    def _below(self) -> list[int]:
        """Requests in buckets before each filled one, and all of them last."""
        return [0, *accumulate(self.counts[bucket] for bucket in self._filled)]

    def share_below(self, position: float) -> float:
        """The share of values below a position; 0 without requests."""
        idx = bisect_right(self._filled, position) - 1
        if idx < 0:
            return 0.0
        inside = min(1.0, position - self._filled[idx])
        count = self._below[idx] + inside * (self._below[idx + 1] - self._below[idx])
        return count / self.num_requests

    def quantile_bucket(self, quantile: float) -> int:
        """The bucket that holds it. Raises ValueError without requests."""
        return self._filled[self._quantile_idx(quantile)]

    def quantile_position(self, quantile: float) -> float:
        """Where it lies, in buckets. Raises ValueError without requests."""
        idx = self._quantile_idx(quantile)
        wanted = quantile * self.num_requests - self._below[idx]
        return self._filled[idx] + wanted / (self._below[idx + 1] - self._below[idx])

    def _quantile_idx(self, quantile: float) -> int:
        if not self._filled:
            raise ValueError("no requests have no quantile")
        wanted = quantile * self.num_requests
        return next(idx for idx in range(len(self._filled)) if self._below[idx + 1] >= wanted)


def bucket_of(value: float) -> int:
    """The bucket of a value; what is not above 2^-10 goes there."""
    return math.floor(BUCKETS_PER_OCTAVE * math.log2(max(value, _MIN_VALUE)))


def value_at(position: float) -> float:
    """The value at a position in buckets."""
    return float(2.0 ** (position / BUCKETS_PER_OCTAVE))


@dataclass(frozen=True, slots=True)
class Latencies:
    """What a comparison of quantiles needs of an arm.

    Attributes:
        histogram: of all its requests.
        tail: of the same requests, with value 1 where the request's bucket is
            `histogram.quantile_bucket(quantile)` or a later one, else 0: whether the slow ones are a few subjects'.
            A second query, for the first one tells where the tail begins.
    """

    histogram: Histogram
    tail: SubjectSums

    def __post_init__(self) -> None:
        """Both must be of the same requests."""
        if self.tail.num_requests != self.histogram.num_requests:
            raise ValueError(
                f"the tail is of {self.tail.num_requests} requests, the histogram of"
                f" {self.histogram.num_requests}: read both in one snapshot"
            )

    @classmethod
    def of(cls, values: Iterable[tuple[Hashable, float]], quantile: float) -> Latencies:
        """From (subject, value) pairs: what the SQL does."""
        known = list(values)
        histogram = Histogram.of(value for _, value in known)
        if not known:
            return cls(histogram, SubjectSums.of(()))
        tail_bucket = histogram.quantile_bucket(quantile)
        return cls(
            histogram,
            SubjectSums.of(
                (subject, float(bucket_of(value) >= tail_bucket)) for subject, value in known
            ),
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """What a comparison of kinds needs of an arm, each of whose requests is of one kind.

    Attributes:
        shares: by category, sums whose values are 1 for its requests and 0 for all others of the arm.
    """

    shares: Mapping[str, SubjectSums]

    def __post_init__(self) -> None:
        """All must be of the same requests, and each request in one."""
        counts = {sums.num_requests for sums in self.shares.values()}
        total = math.fsum(sums.total for sums in self.shares.values())
        if len(counts) != 1 or not math.isclose(total, max(counts), abs_tol=1e-6):
            raise ValueError(
                "each request is in exactly one category: the shares have"
                f" {', '.join(map(str, sorted(counts))) or 'no'} requests, and {total:g} are in them"
            )

    @classmethod
    def of(cls, values: Iterable[tuple[Hashable, str]], categories: Iterable[str]) -> Mix:
        """From (subject, category) pairs: what the SQL does."""
        known = list(values)
        return cls(
            {
                one: SubjectSums.of((subject, float(kind == one)) for subject, kind in known)
                for one in categories
            }
        )
