"""What both sides of a step did, by SQL: the sums that gates take and the numbers that people read.

One look is one statement, which reads each request once: sums over subjects, histograms, and how much of each
subject's traffic is in the latencies' tails. Which requests count:

| | |
|---|---|
| all | of this step, assigned by the rollout (arm stable and canary; in a shadow step stable and shadow) |
| errors | ended, or without a token for `HUNG_S`, or refused by this side's revision alone (`gateway/unserved.py`); not those refused for what the client sent (4xx), not those that the platform's own parts ended |
| aborts | answered, or ended by the client |
| everything else | answered: ended by the model or by a limit |
| log-probability | answered, and sampled for it |

Pins were not drawn, so they are in neither side.

A look is bounded: of a side with more than `MOST_REQUESTS` it reads a sample, one in 2^k of its subjects, with
the least k that fits. Which subjects those are, their keys say, 64 uniform bits that nobody chose and nothing
but assignment depends on: the sample is a range of an index, it has subjects whole (so it is a step like any other,
with fewer of them), and each is a part of the one before. Each side has its own: a canary of 1 % is read whole
where the stable side is sampled. Never fewer than `LEAST_SUBJECTS` are read, so few heavy ones take as long as
they take.

With each doubling the evidence is that of fewer requests again, so a wrong canary gets a new chance to look
right, and a right one to look wrong: in information from tens of thousands of requests to twice as many, which is where
its process spends about a fiftieth of its alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args
from uuid import UUID

from sqlalchemy import TextClause, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.types import Text

from loraplex_platform.db.base import Json
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.metering.records import REFUSED_BY_REVISION
from loraplex_platform.rollouts.aggregates import (
    BUCKETS_PER_OCTAVE,
    Histogram,
    Latencies,
    Mix,
    SubjectSums,
    value_at,
)
from loraplex_platform.rollouts.gate_kinds import Observation, QuantileGate
from loraplex_platform.rollouts.gates import LEAST_LOGPROB
from loraplex_platform.rollouts.records import StepKind
from loraplex_platform.rollouts.verdicts import GatePlan, Observed

HUNG_S: Final = 120.0
# Neither side's fault: a gateway that died or was stopped, a database that was away, what we ended ourselves.
_OURS: Final = ("gateway_lost", "database_unavailable", "draining", "given_up")
# A shadow is asked after everybody else, and given up first.
_OURS_IN_SHADOW: Final = (
    *_OURS,
    "shadow_given_up",
    "deadline_exceeded",
    "overloaded",
    "queue_full",
    "engine_unavailable",
)
_ARMS: Final[Mapping[StepKind, str]] = {"shadow": "shadow", "canary": "canary"}

# Of one side. Postgres reads a hundred thousand, scattered over a month's pages, in a second or two.
MOST_REQUESTS: Final = 50_000
LEAST_SUBJECTS: Final = 100
_LEAST_KEY: Final = -(2**63)

# One row a request: which side, whose, and what of it counts in which sum. Nulls are left out of sums.
_ASKED_OF: Final = f"""
select
    r.arm <> 'stable' as is_canary,
    r.subject_key,
    r.prompt_tokens,
    @@TOKENS@@ as completion_tokens,
    case
        when r.error_code = any(:ours) then null
        when r.state = 'reserved' then case
            when r.checkpoint_tokens = 0 and r.admitted_at < now() - make_interval(secs => {HUNG_S:g})
            then 1 end
        when r.error_code = '{REFUSED_BY_REVISION}' then 1
        when r.http_status between 400 and 498 then null
        when r.http_status >= 500 or r.finish_reason = 'error'
            or (r.http_status is null and r.error_code is not null) then 1
        else 0
    end as error,
    case
        when r.finish_reason = 'abort' or r.http_status = 499 then 1
        when r.finish_reason in ('stop', 'length') and r.error_code is null then 0
    end as abort,
    case when r.error_code is null then case r.finish_reason when 'length' then 1 when 'stop' then 0 end
    end as by_limit,
    case when r.error_code is null and r.finish_reason in ('stop', 'length') then r.ttft_ms end as ttft,
    case when r.error_code is null and r.finish_reason in ('stop', 'length') then r.itl_p95_ms end as itl,
    case when r.stable_logprob is null or r.finish_reason not in ('stop', 'length') then null
        when r.stable_logprob = 'NaN' then {LEAST_LOGPROB:g}
        else greatest(least(r.stable_logprob, 0), {LEAST_LOGPROB:g})::double precision end as logprob
from requests r
where r.rollout_id = :rollout_id and r.rollout_step = :step
"""  # noqa: S608 # of constants
_ASKED: Final = f"""
    ({_ASKED_OF} and r.arm = 'stable' and r.kind = 'user'
        and r.subject_key <= cast(:last_stable_key as bigint) limit :most_stable)
    union all
    ({_ASKED_OF} and r.arm = :arm and r.subject_key <= cast(:last_canary_key as bigint)
        limit :most_canary)
"""  # of constants

_TOKENS: Final[Mapping[StepKind, str]] = {
    "canary": "r.completion_tokens",
    # Of a shadow nothing is billed: what it said is in its attempt.
    "shadow": "case r.kind when 'user' then r.completion_tokens else (select sum(a.absorbed)::bigint"
    " from attempts a where a.request_id = r.id) end",
}

_SHARES: Final = ("error", "abort", "by_limit")
_MEANS: Final = {
    "length": "ln(greatest(completion_tokens, 1)::double precision)",
    "logprob": "logprob",
}


def _sums_sql() -> str:
    inner = ["count(*) as n", "sum(coalesce(prompt_tokens, 0)) as prompt_tokens"]
    inner.append("sum(coalesce(completion_tokens, 0)) as completion_tokens")
    inner.append("sum(completion_tokens) filter (where by_limit is not null) as answer_tokens")
    for name in _SHARES:
        inner.append(f"count({name}) as n_{name}")
        inner.append(f"coalesce(sum({name}), 0)::double precision as s_{name}")
    for name, value in _MEANS.items():
        where = "where by_limit is not null" if name == "length" else f"where {name} is not null"
        inner.append(f"count(*) filter ({where}) as n_{name}")
        inner.append(f"coalesce(sum({value}) filter ({where}), 0) as s_{name}")
        inner.append(f"coalesce(sum(({value}) * ({value})) filter ({where}), 0) as q_{name}")
    outer = ["count(*) as subjects", "sum(n)::bigint as requests"]
    outer += [
        f"sum({name})::bigint as {name}"
        for name in ("prompt_tokens", "completion_tokens", "answer_tokens")
    ]
    for name in (*_SHARES, *_MEANS):
        square = f"s_{name}" if name in _SHARES else f"q_{name}"
        outer += [
            f"count(*) filter (where n_{name} > 0) as {name}_subjects",
            f"sum(n_{name})::bigint as {name}_n",
            f"sum(s_{name}) as {name}_s",
            f"sum({square}) as {name}_q",
            f"sum(n_{name} * n_{name})::bigint as {name}_nn",
            f"sum(n_{name} * s_{name}) as {name}_ns",
            f"sum(s_{name} * s_{name}) as {name}_ss",
        ]
    return f"""
select is_canary, {", ".join(outer)}
from (
    select is_canary, subject_key, {", ".join(inner)}
    from asked group by is_canary, subject_key
) subjects group by is_canary
"""  # noqa: S608 # of constants


def _bucket_sql(name: str) -> str:
    # `greatest` of nothing and a number is the number.
    return (
        f"case when {name} is not null then floor({BUCKETS_PER_OCTAVE}"
        f" * ln(greatest({name}::double precision, 0.0009765625::double precision))"
        " / ln(2::double precision))::int end"
    )


PARAMETERS: Final = (bindparam("ours", type_=ARRAY(Text())),)
_HISTOGRAMS: Final = """
select is_canary, ttft_bucket as ttft, itl_bucket as itl, count(*) as n
from asked
where ttft is not null or itl is not null
group by 1, 2, 3
"""
# A tail begins at the quantile's bucket, as `Histogram.quantile_bucket` finds it.
_TAILS: Final = """
select is_canary,
    count(*) filter (where n_ttft > 0) as ttft_subjects, sum(n_ttft)::bigint as ttft_n,
    sum(t_ttft)::bigint as ttft_s, sum(n_ttft * n_ttft)::bigint as ttft_nn,
    sum(n_ttft * t_ttft)::bigint as ttft_ns, sum(t_ttft * t_ttft)::bigint as ttft_ss,
    count(*) filter (where n_itl > 0) as itl_subjects, sum(n_itl)::bigint as itl_n,
    sum(t_itl)::bigint as itl_s, sum(n_itl * n_itl)::bigint as itl_nn,
    sum(n_itl * t_itl)::bigint as itl_ns, sum(t_itl * t_itl)::bigint as itl_ss
from (
    select is_canary, subject_key, count(ttft_bucket) as n_ttft, count(itl_bucket) as n_itl,
        count(*) filter (where ttft_bucket >= tail.ttft) as t_ttft,
        count(*) filter (where itl_bucket >= tail.itl) as t_itl
    from asked join (
        select is_canary,
            percentile_disc(cast(:ttft_quantile as double precision))
                within group (order by ttft_bucket) as ttft,
            percentile_disc(cast(:itl_quantile as double precision))
                within group (order by itl_bucket) as itl
        from asked group by is_canary
    ) tail using (is_canary)
    where asked.ttft is not null or asked.itl is not null
    group by is_canary, subject_key
) subjects group by is_canary
"""
# What is read, is read once. JSON has each number as it is.
_LOOK: Final = f"""
with asked as materialized (
    select *, {_bucket_sql("ttft")} as ttft_bucket, {_bucket_sql("itl")} as itl_bucket
    from ({_ASKED} offset 0) both_sides -- computed once, not wherever it is named
), sums as ({_sums_sql()}), histograms as ({_HISTOGRAMS}), tails as ({_TAILS})
select (select coalesce(json_agg(sums), '[]') from sums),
    (select coalesce(json_agg(histograms), '[]') from histograms),
    (select coalesce(json_agg(tails), '[]') from tails)
"""  # noqa: S608 # of constants


# A step is a small part of its month: through the index, whatever the statistics of a rollout begun just now
# say. And what is read a hundred thousand times is not worth compiling.
SETTINGS: Final = (
    text("set local enable_seqscan = off"),
    text("set local jit = off"),
)
# Both by the index alone, and no more of it than has to be known.
_OF_A_SIDE: Final = "rollout_id = :rollout_id and rollout_step = :step and arm = :arm"
_COUNT: Final = text(f"""
select count(*) from (
    select from requests
    where {_OF_A_SIDE} and subject_key <= cast(:last_key as bigint)
    limit :enough
) counted
""")  # noqa: S608 # of constants
_KEY_OF_LAST_OF_LEAST: Final = text(f"""
select distinct subject_key from requests
where {_OF_A_SIDE}
order by subject_key offset :least_subjects - 1 limit 1
""")  # noqa: S608 # of constants

STATEMENTS: Final[Mapping[StepKind, TextClause]] = {
    kind: text(_LOOK.replace("@@TOKENS@@", _TOKENS[kind])).bindparams(*PARAMETERS)
    for kind in get_args(StepKind)
}
_WITHOUT_LIMIT: Final = 2**62

_NOTHING: Final = SubjectSums.of(())


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side of a step, in numbers; None where nothing can be said yet."""

    one_in: int = 1  # of so many subjects one was read; counts are of those
    num_subjects: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer_tokens: int = 0
    sums: Mapping[str, SubjectSums] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    tails: Mapping[str, SubjectSums] = field(
        default_factory=dict
    )  # by latency, at its gate's quantile

    def sum_of(self, name: str) -> SubjectSums:
        """Of `error`, `abort`, `by_limit`, `length` or `logprob`."""
        return self.sums.get(name, _NOTHING)

    def histogram_of(self, name: str) -> Histogram:
        """Of `ttft` or `itl`."""
        return self.histograms.get(name, Histogram({}))

    def share_of(self, name: str) -> float | None:
        """Of the requests that count for it."""
        found = self.sum_of(name)
        return found.mean if found.num_requests else None

    def quantile_ms(self, name: str, quantile: float) -> float | None:
        """Of `ttft` or `itl`, to a sixteenth of an octave."""
        found = self.histogram_of(name)
        return value_at(found.quantile_position(quantile)) if found.num_requests else None


@dataclass(frozen=True, slots=True)
class Look:
    """Both sides, and what the gates are told of them."""

    stable: SideFigures
    canary: SideFigures
    observed: Mapping[str, Observed]

    @property
    def num_read(self) -> int:
        """Requests of both sides."""
        return self.stable.num_requests + self.canary.num_requests

    @property
    def sample(self) -> str | None:
        """In words, of what the numbers are; None: of all."""
        sides = (("stable", self.stable), ("the canary", self.canary))
        words = [f"1 in {side.one_in} of {name}'s" for name, side in sides if side.one_in > 1]
        return f"of a sample of {' and '.join(words)} subjects" if words else None


async def look(
    sessions: SessionFactory,
    rollout_id: UUID,
    step: int,
    kind: StepKind,
    plan: GatePlan | None,
    *,
    at_least: tuple[int, int] = (1, 1),
    most_requests: int = MOST_REQUESTS,
    least_subjects: int = LEAST_SUBJECTS,
) -> Look:
    """Read a step's requests, whoever's they are, in one snapshot of its own.

    Args:
        at_least: `one_in` of stable and canary at the last look at this step: a sample only shrinks.
        most_requests: of a side, if it has subjects enough.
        least_subjects: of a side that is sampled.
    """
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        for setting in SETTINGS:
            await session.execute(setting)
        asked: dict[str, Any] = {
            "rollout_id": rollout_id,
            "step": step,
            "arm": _ARMS[kind],
            "ours": list(_OURS if kind == "canary" else _OURS_IN_SHADOW),
        }
        for name in ("ttft", "itl"):
            asked[f"{name}_quantile"] = _quantile_of(plan, name)
        enough = most_requests + 1
        samples, limits = list(at_least), [enough, enough]
        found = await _ask(session, kind, asked, samples, limits)
        if has_grown := [idx for idx in (0, 1) if found[idx].num_requests == enough]:
            for idx in has_grown:
                side = {
                    "rollout_id": rollout_id,
                    "step": step,
                    "arm": ("stable", _ARMS[kind])[idx],
                    "enough": enough,
                }
                samples[idx], fits = await _choose_sample(
                    session, side, samples[idx], least_subjects
                )
                limits[idx] = enough if fits else _WITHOUT_LIMIT
            found = await _ask(session, kind, asked, samples, limits)
        return _look_of(found, plan)


async def _choose_sample(
    session: AsyncSession, side: Mapping[str, Any], at_least: int, least_subjects: int
) -> tuple[int, bool]:
    """Of how many subjects one is read: the least power of two over `at_least` that fits; and whether one does."""
    values = {**side, "least_subjects": least_subjects}
    needed = (await session.execute(_KEY_OF_LAST_OF_LEAST, values)).scalar_one_or_none()
    one_in = at_least
    while needed is not None and needed <= last_key(2 * one_in):
        one_in *= 2
        if await _count(session, side, one_in) < side["enough"]:
            return one_in, True
    return one_in, False


async def _count(session: AsyncSession, side: Mapping[str, Any], one_in: int) -> int:
    values = {**side, "last_key": last_key(one_in)}
    return int((await session.execute(_COUNT, values)).scalar_one())


def last_key(one_in: int) -> int:
    """Of the subjects that are read, the highest key: uniform ones are at most this with probability 1 / one_in."""
    return _LEAST_KEY + 2**64 // one_in - 1


def _quantile_of(plan: GatePlan | None, name: str) -> float:
    gates = () if plan is None else plan.gates
    found = [
        gate.quantile for gate in gates if isinstance(gate, QuantileGate) and gate.name == name
    ]
    return found[0] if found else 0.5


async def _ask(
    session: AsyncSession,
    kind: StepKind,
    asked: Mapping[str, Any],
    samples: Sequence[int],
    limits: Sequence[int],
) -> tuple[SideFigures, SideFigures]:
    values = {
        **asked,
        "last_stable_key": last_key(samples[0]),
        "last_canary_key": last_key(samples[1]),
        "most_stable": limits[0],
        "most_canary": limits[1],
    }
    sums, histograms, tails = (await session.execute(STATEMENTS[kind], values)).one()
    by_side = _histograms(histograms)
    stable, canary = (
        _figures(
            _of_side(sums, is_canary),
            _of_side(tails, is_canary),
            by_side[is_canary],
            samples[is_canary],
        )
        for is_canary in (False, True)
    )
    return stable, canary


def _of_side(rows: list[Json], is_canary: bool) -> Json | None:
    return next((row for row in rows if row["is_canary"] == is_canary), None)


def _look_of(sides: tuple[SideFigures, SideFigures], plan: GatePlan | None) -> Look:
    observed = {}
    for gate in () if plan is None else plan.gates:
        stable, canary = (_observation(gate.name, side) for side in sides)
        observed[gate.name] = Observed(stable, canary)
    return Look(*sides, observed)


def _figures(
    row: Json | None, tails: Json | None, histograms: dict[str, Histogram], one_in: int
) -> SideFigures:
    if row is None:
        return SideFigures(one_in)
    sums = {name: _sums_of(row, name, "q") for name in (*_SHARES, *_MEANS)}
    return SideFigures(
        one_in=one_in,
        num_subjects=row["subjects"],
        num_requests=row["requests"],
        prompt_tokens=row["prompt_tokens"] or 0,
        completion_tokens=row["completion_tokens"] or 0,
        answer_tokens=row["answer_tokens"] or 0,
        sums=sums,
        histograms=histograms,
        # Each is 1 or 0, and so is its square.
        tails={name: _sums_of(tails, name, "s") for name in ("ttft", "itl")} if tails else {},
    )


def _sums_of(row: Json, name: str, squares: str) -> SubjectSums:
    return SubjectSums(
        num_subjects=row[f"{name}_subjects"],
        num_requests=row[f"{name}_n"],
        total=float(row[f"{name}_s"]),
        total_squares=float(row[f"{name}_{squares}"]),
        square_requests=row[f"{name}_nn"],
        product=float(row[f"{name}_ns"]),
        square_totals=float(row[f"{name}_ss"]),
    )


def _histograms(rows: list[Json]) -> dict[bool, dict[str, Histogram]]:
    counts: dict[bool, dict[str, dict[int, int]]] = {
        is_canary: {"ttft": {}, "itl": {}} for is_canary in (False, True)
    }
    for row in rows:
        for name, found in counts[row["is_canary"]].items():
            bucket = row[name]
            if bucket is not None:
                found[bucket] = found.get(bucket, 0) + row["n"]
    return {
        is_canary: {name: Histogram(found) for name, found in one.items()}
        for is_canary, one in counts.items()
    }


def _observation(name: str, side: SideFigures) -> Observation:
    match name:
        case "error_rate":
            return side.sum_of("error")
        case "abort_rate":
            return side.sum_of("abort")
        case "ttft" | "itl":
            return Latencies(side.histogram_of(name), side.tails.get(name, _NOTHING))
        case "finish_reason":
            by_limit = side.sum_of("by_limit")
            return Mix({"stop": _rest_of(by_limit), "length": by_limit})
        case "output_length":
            return side.sum_of("length")
        case "logprob":
            return side.sum_of("logprob")
    raise AssertionError(f"no sums for the gate {name}")


def _rest_of(share: SubjectSums) -> SubjectSums:
    """The sums of 1 - x: each request is of the one kind or of the other."""
    rest = share.num_requests - share.total
    return SubjectSums(
        num_subjects=share.num_subjects,
        num_requests=share.num_requests,
        total=rest,
        total_squares=rest,
        square_requests=share.square_requests,
        product=share.square_requests - share.product,
        square_totals=share.square_requests - 2 * share.product + share.square_totals,
    )
