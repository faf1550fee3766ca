"""What both sides of a step did, by SQL: the sums that gates take and the numbers that people read.

One look is three statements in one snapshot: sums over subjects, histograms, and how much of each subject's
traffic is in the latencies' tails. Which requests count:

| | |
|---|---|
| all | of this step, assigned by the rollout (arm stable and canary; in a shadow step stable and shadow) |
| errors | ended, or without a token for `HUNG_S`; not those refused for what the client sent (4xx), not those that the platform's own parts ended |
| aborts | answered, or ended by the client |
| everything else | answered: ended by the model or by a limit |
| log-probability | answered, and sampled for it |

Pins were not drawn, so they are in neither side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args
from uuid import UUID

from sqlalchemy import TextClause, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.types import Text

from loraplex_platform.db.session import SessionFactory
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

# One row a request: which side, whose, and what of it counts in which sum. Nulls are left out of sums.
_ASKED: Final = f"""
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
    and (r.arm = 'stable' and r.kind = 'user' or r.arm = :arm)
offset 0 -- each of these is computed once, not wherever it is named below
"""  # noqa: S608 # of constants

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
    from ({_ASKED}) asked group by is_canary, subject_key
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
_HISTOGRAMS: Final = f"""
select is_canary, {_bucket_sql("ttft")} as ttft, {_bucket_sql("itl")} as itl, count(*)
from ({_ASKED}) asked
where ttft is not null or itl is not null
group by 1, 2, 3
"""  # noqa: S608 # of constants
_TAILS: Final = f"""
select is_canary,
    count(*) filter (where n_ttft > 0), sum(n_ttft)::bigint, sum(t_ttft)::double precision,
    sum(n_ttft * n_ttft)::bigint, sum(n_ttft * t_ttft)::double precision,
    sum(t_ttft * t_ttft)::double precision,
    count(*) filter (where n_itl > 0), sum(n_itl)::bigint, sum(t_itl)::double precision,
    sum(n_itl * n_itl)::bigint, sum(n_itl * t_itl)::double precision,
    sum(t_itl * t_itl)::double precision
from (
    select is_canary, subject_key, count(ttft) as n_ttft, count(itl) as n_itl,
        count(*) filter (where {_bucket_sql("ttft")} >=
            case when is_canary then :canary_ttft else :stable_ttft end) as t_ttft,
        count(*) filter (where {_bucket_sql("itl")} >=
            case when is_canary then :canary_itl else :stable_itl end) as t_itl
    from ({_ASKED}) asked
    where ttft is not null or itl is not null
    group by is_canary, subject_key
) subjects group by is_canary
"""  # noqa: S608 # of constants


def _statement(sql: str, kind: StepKind) -> TextClause:
    return text(sql.replace("@@TOKENS@@", _TOKENS[kind])).bindparams(*PARAMETERS)


_PATIENTLY: Final = text("set local statement_timeout = '120s'")

# What a look asks, in this order.
STATEMENTS: Final[Mapping[StepKind, Mapping[str, TextClause]]] = {
    kind: {
        "sums": _statement(_sums_sql(), kind),
        "histograms": _statement(_HISTOGRAMS, kind),
        "tails": _statement(_TAILS, kind),
    }
    for kind in get_args(StepKind)
}

_NOTHING: Final = SubjectSums.of(())


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side of a step, in numbers; None where nothing can be said yet."""

    num_subjects: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer_tokens: int = 0
    sums: Mapping[str, SubjectSums] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

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


async def look(
    sessions: SessionFactory, rollout_id: UUID, step: int, kind: StepKind, plan: GatePlan | None
) -> Look:
    """Read a step's requests, whoever's they are, in one snapshot of its own."""
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        # Millions of requests take seconds: nobody waits for them, and the next look is the later for it.
        await session.execute(_PATIENTLY)
        return await _read(session, rollout_id, step, kind, plan)


async def _read(
    session: AsyncSession, rollout_id: UUID, step: int, kind: StepKind, plan: GatePlan | None
) -> Look:
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "step": step,
        "arm": _ARMS[kind],
        "ours": list(_OURS if kind == "canary" else _OURS_IN_SHADOW),
    }
    asked = STATEMENTS[kind]
    rows = {row.is_canary: row for row in await session.execute(asked["sums"], values)}
    histograms = _histograms((await session.execute(asked["histograms"], values)).all())
    sides = {
        is_canary: _figures(rows.get(is_canary), histograms[is_canary])
        for is_canary in (False, True)
    }
    gates = () if plan is None else plan.gates
    latencies = [gate for gate in gates if isinstance(gate, QuantileGate)]
    tails: dict[str, dict[bool, SubjectSums]] = {}
    if latencies:
        bounds = {
            f"{'canary' if is_canary else 'stable'}_{name}": _tail_bucket(
                sides[is_canary], latencies, name
            )
            for is_canary in sides
            for name in ("ttft", "itl")
        }
        tails = _tails((await session.execute(asked["tails"], values | bounds)).all())
    observed = {}
    for gate in gates:
        both: list[Observation] = [
            _observation(gate.name, sides[is_canary], tails, is_canary=is_canary)
            for is_canary in (False, True)
        ]
        observed[gate.name] = Observed(*both)
    return Look(sides[False], sides[True], observed)


def _figures(row: Any, histograms: dict[str, Histogram]) -> SideFigures:  # noqa: ANN401 (a row of _SUMS)
    if row is None:
        return SideFigures()
    values = row._mapping
    return SideFigures(
        num_subjects=row.subjects,
        num_requests=row.requests,
        prompt_tokens=row.prompt_tokens or 0,
        completion_tokens=row.completion_tokens or 0,
        answer_tokens=row.answer_tokens or 0,
        sums={
            name: SubjectSums(
                num_subjects=values[f"{name}_subjects"],
                num_requests=values[f"{name}_n"],
                total=values[f"{name}_s"],
                total_squares=values[f"{name}_q"],
                square_requests=values[f"{name}_nn"],
                product=values[f"{name}_ns"],
                square_totals=values[f"{name}_ss"],
            )
            for name in (*_SHARES, *_MEANS)
        },
        histograms=histograms,
    )


def _histograms(rows: Any) -> dict[bool, dict[str, Histogram]]:  # noqa: ANN401 (rows)
    counts: dict[bool, dict[str, dict[int, int]]] = {
        is_canary: {"ttft": {}, "itl": {}} for is_canary in (False, True)
    }
    for is_canary, ttft, itl, count in rows:
        for name, bucket in (("ttft", ttft), ("itl", itl)):
            if bucket is not None:
                found = counts[is_canary][name]
                found[bucket] = found.get(bucket, 0) + count
    return {
        is_canary: {name: Histogram(found) for name, found in one.items()}
        for is_canary, one in counts.items()
    }


def _tail_bucket(side: SideFigures, gates: list[QuantileGate], name: str) -> int:
    gate = next((gate for gate in gates if gate.name == name), None)
    found = side.histogram_of(name)
    return found.quantile_bucket(gate.quantile) if gate and found.num_requests else 0


def _tails(rows: Any) -> dict[str, dict[bool, SubjectSums]]:  # noqa: ANN401 (rows)
    found: dict[str, dict[bool, SubjectSums]] = {"ttft": {}, "itl": {}}
    for is_canary, *numbers in rows:
        for name, part in (("ttft", numbers[:6]), ("itl", numbers[6:])):
            subjects, requests, total, squares, product, totals = part
            found[name][is_canary] = SubjectSums(
                num_subjects=subjects,
                num_requests=requests,
                total=total,
                total_squares=total,
                square_requests=squares,
                product=product,
                square_totals=totals,
            )
    return found


def _observation(
    name: str,
    side: SideFigures,
    tails: dict[str, dict[bool, SubjectSums]],
    *,
    is_canary: bool,
) -> Observation:
    match name:
        case "error_rate":
            return side.sum_of("error")
        case "abort_rate":
            return side.sum_of("abort")
        case "ttft" | "itl":
            return Latencies(side.histogram_of(name), tails[name].get(is_canary, _NOTHING))
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
