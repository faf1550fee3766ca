"""Runs carried out by the worker's part, on a scripted engine: verdicts, limits, faults, alarms, books."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loraplex_engine.protocol import Generate
from loraplex_platform.db import LedgerEntry, OutboxMessage, Request
from loraplex_platform.evals.records import PRIORITY
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.metering.invariants import check_invariants
from sqlalchemy import select, text

from tests.platform.control.stand import BASE, Stand, announce, error_of
from tests.platform.evals.stand import (
    NEVER,
    case,
    ended,
    made,
    read,
    results_of,
    started,
    suite_of,
    working,
)
from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import eventually
from tests.support.fake_engine import FakeEngine, Script


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as opened:
        yield opened


@pytest.fixture
async def tenant(stand: Stand) -> str:
    return str((await stand.tenant("acme"))["id"])


@pytest.fixture
def model(stand: Stand) -> Path:
    return stand.folder / "model"


def ids_of(words: str) -> list[int]:
    """Token ids that say exactly these words."""
    tokenizer = BaseTokenizer(tiny_model.texts())
    try:
        return tokenizer.encode_prompt_now(words)
    finally:
        tokenizer.close()


def says(words: str, **script: Any) -> Script:
    return Script(token_ids=ids_of(words), **script)


async def books_of(stand: Stand) -> list[Request]:
    """Every eval request; all are closed, absorbed, and the identity holds."""
    async with stand.db.sessions() as session:
        requests = (await session.scalars(select(Request).where(Request.endpoint == "eval"))).all()
        accounts = set(
            (
                await session.scalars(
                    select(LedgerEntry.account).where(
                        LedgerEntry.entry_id.in_([request.id for request in requests])
                    )
                )
            ).all()
        )
    assert {request.kind for request in requests} <= {"probe"}
    assert {request.state for request in requests} <= {"settled", "voided"}
    assert accounts <= {"absorbed"}
    return list(requests)


async def has_counts(stand: Stand, tenant: str, run_id: str, counts: dict[str, int]) -> None:
    async def is_there() -> bool:
        return bool((await read(stand, tenant, run_id))["counts"] == counts)

    await eventually(is_there, f"the run has {counts}")


async def alerts(stand: Stand) -> list[dict[str, Any]]:
    async with stand.db.sessions() as session:
        found = await session.scalars(
            select(OutboxMessage.payload).where(OutboxMessage.topic == "alert")
        )
        return list(found)


async def test_a_run_says_of_each_case_what_became_of_it(
    stand: Stand, tenant: str, model: Path
) -> None:
    stand.engine.script = says("Paris, 42")
    suite = await suite_of(
        stand,
        tenant,
        case("right", {"type": "contains", "value": "Paris"}, weight=3),
        case("wrong", {"type": "number", "value": 41}),
        case("chat", messages=[{"role": "user", "content": "Hi"}], prompt=None),
        threshold={"share": 0.8},
    )
    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, await started(stand, tenant, suite))

    assert (run["state"], run["score"], run["counts"]) == ("passed", 0.8, {"pass": 2, "fail": 1})
    assert run["fingerprints"] == [stand.engine.model_fingerprint]
    results = await results_of(stand, tenant, run["id"])
    assert {name: row["output"] for name, row in results.items()} == dict.fromkeys(
        ("right", "wrong", "chat"), "Paris, 42"
    )
    assert results["wrong"]["reason"] == "42 against 41, tolerated 0"
    assert results["right"]["mean_logprob"] < 0
    assert results["right"]["replica_id"] == stand.engine.replica_id
    requests = await books_of(stand)
    assert {f"req_{request.id.hex}" for request in requests} == {
        row["request_id"] for row in results.values()
    }
    assert all(request.windows == [] for request in requests)  # no quota was asked
    asked = [m for m in stand.engine.received_of(Generate) if isinstance(m, Generate)]
    assert {generate.priority for generate in asked} == {PRIORITY}
    assert {generate.sampling.temperature for generate in asked} == {0.0}
    # One salt for the run, and not the tenant's.
    assert len({generate.tenant_salt for generate in asked}) == 1


async def test_a_required_case_outweighs_any_share(stand: Stand, tenant: str, model: Path) -> None:
    suite = await suite_of(
        stand,
        tenant,
        case("a", weight=1000),
        case("must", NEVER, required=True),
        threshold={"share": 0.5},
    )
    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, await started(stand, tenant, suite))

    assert run["state"] == "failed"
    assert run["summary"]["required_not_passed"] == ["must"]


async def test_a_case_that_takes_too_long_times_out_alone(
    stand: Stand, tenant: str, model: Path
) -> None:
    slow = Script(never_answers=True)
    stand.engine.script_for = lambda generate: (
        slow if generate.sampling.max_tokens == 7 else says("yes")
    )
    suite = await suite_of(
        stand, tenant, case("fast"), case("slow", params={"max_tokens": 7}), case("other")
    )
    async with working(stand.db, stand.redis_url, model):
        run_id = await started(stand, tenant, suite, case_timeout_s=1)
        run = await ended(stand, tenant, run_id)

    assert run["counts"] == {"pass": 2, "timeout": 1}
    # Nobody knows whether it would have passed.
    assert run["state"] == "error"
    result = (await results_of(stand, tenant, run["id"]))["slow"]
    assert "no whole answer within" in result["reason"]
    assert len(await books_of(stand)) == 3


async def test_a_run_whose_time_is_over_keeps_what_it_has(
    stand: Stand, tenant: str, model: Path
) -> None:
    stand.engine.script_for = lambda generate: (
        Script(never_answers=True) if generate.sampling.max_tokens == 7 else says("yes")
    )
    suite = await suite_of(
        stand, tenant, case("fast"), case("slow", params={"max_tokens": 7}), case("late")
    )
    async with working(stand.db, stand.redis_url, model):
        run_id = await started(stand, tenant, suite, run_timeout_s=3, concurrency=1)
        run = await ended(stand, tenant, run_id)

    assert run["state"] == "timeout"
    assert run["error"] == "its time was over after 1 of 3 cases"
    assert set(await results_of(stand, tenant, run["id"])) == {"fast"}
    assert {request.error_code for request in await books_of(stand)} == {None, "given_up"}


async def test_a_run_that_goes_on_is_cancelled_within_seconds(
    stand: Stand, tenant: str, model: Path
) -> None:
    stand.engine.script = Script(never_answers=True)
    suite = await suite_of(stand, tenant, case("a"), case("b"))
    async with working(stand.db, stand.redis_url, model):
        run_id = await started(stand, tenant, suite, concurrency=1)
        await eventually(lambda: stand.engine.num_running > 0, "a case is asked")
        await made(stand.admin, f"/tenants/{tenant}/eval-runs/{run_id}/cancel", {}, 200)
        run = await ended(stand, tenant, run_id)
        assert stand.engine.num_running == 0

    assert (run["state"], run["error"]) == ("cancelled", "it was cancelled after 0 of 2 cases")
    await books_of(stand)


async def test_an_engine_that_dies_in_the_middle_is_asked_again_when_it_is_back(
    stand: Stand, tenant: str, model: Path
) -> None:
    crashed: list[Generate] = []

    def script(generate: Generate) -> Script:
        is_first = not crashed
        crashed.append(generate)
        return says("a long answer", crash_after=2 if is_first else None)

    stand.engine.script_for = script
    suite = await suite_of(stand, tenant, case("only", {"type": "exact", "value": "a long answer"}))
    async with working(stand.db, stand.redis_url, model):
        run_id = await started(stand, tenant, suite)
        await eventually(
            lambda: bool(crashed) and stand.engine._socket is None, "the engine has died"
        )
        await stand.engine.start()
        run = await ended(stand, tenant, run_id)

    assert run["state"] == "passed", await results_of(stand, tenant, run_id)
    first, second = sorted(await books_of(stand), key=lambda request: request.id)
    assert (first.error_code, second.error_code) == ("engine_lost", None)
    report = await check_invariants(stand.db.sessions)
    assert [check.code for check in report.checks if not check.ok and check.code != "I3"] == []


async def test_without_any_engine_cases_are_errors_and_nothing_is_asked(
    stand: Stand, tenant: str, model: Path
) -> None:
    await stand.engine.crash()
    suite = await suite_of(stand, tenant, case("a"))
    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, await started(stand, tenant, suite, case_timeout_s=1))

    assert run["state"] == "error"
    result = (await results_of(stand, tenant, run["id"]))["a"]
    assert (result["status"], "no engine was ready" in result["reason"]) == ("error", True)
    assert await books_of(stand) == []


async def test_a_suspended_tenant_is_not_asked_for(stand: Stand, tenant: str, model: Path) -> None:
    run_id = await started(stand, tenant, await suite_of(stand, tenant, case("a")))
    await stand.admin.post(f"/admin/v1/tenants/{tenant}/suspend")
    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, run_id)

    assert run["state"] == "error"
    assert "not active" in run["error"]


async def test_what_fits_no_context_and_what_is_not_finite_is_told_apart(
    stand: Stand, tenant: str, model: Path
) -> None:
    stand.engine.script_for = lambda generate: (
        says("x", error_after=0, error_code="non_finite_logits")
        if generate.sampling.max_tokens == 7
        else says("x")
    )
    suite = await suite_of(
        stand,
        tenant,
        case("long", params={"max_tokens": 4096}),
        case("nan", params={"max_tokens": 7}),
    )
    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, await started(stand, tenant, suite))

    results = await results_of(stand, tenant, run["id"])
    assert (results["long"]["status"], results["nan"]["status"]) == ("error", "fail")
    assert "exceed the context of" in results["long"]["reason"]
    assert "non_finite_logits" in results["nan"]["reason"]


async def test_a_worker_for_another_model_says_so(stand: Stand, tenant: str, model: Path) -> None:
    run_id = await started(stand, tenant, await suite_of(stand, tenant, case("a")))
    async with working(stand.db, stand.redis_url, model, base_model="other"):
        run = await ended(stand, tenant, run_id)

    assert run["state"] == "error"
    assert "LORAPLEX_BASE_MODEL" in run["error"]


# ---------------------------------------------------------------------------- against others


async def test_pairs_judges_and_references(stand: Stand, tenant: str, model: Path) -> None:
    version = await stand.version(tenant)
    path = f"/admin/v1/tenants/{tenant}/deployments/mine"
    deployed = (await stand.admin.put(path, json={"version_id": version})).json()
    base_revision = await revision_of_base(stand)

    def script(generate: Generate) -> Script:
        if generate.sampling.logprobs is None:  # a judge is asked for text alone
            return says("Score: 8" if generate.sampling.max_tokens == 9 else "Better: A")
        return says("the base" if generate.adapter_digest is None else "the adapter")

    stand.engine.script_for = script
    judge = {"model": BASE, "max_tokens": 9}
    suite = await suite_of(
        stand,
        tenant,
        case("same", {"type": "pairwise"}),
        case("judged", {"type": "judge", "judge": judge, "min_score": 8}),
        case("below", {"type": "judge", "judge": judge, "min_score": 8.5}),
        case("pair", {"type": "pairwise", "by": "judge", "judge": {"model": BASE}}),
        case("nobody", {"type": "judge", "judge": {"model": "nobody"}, "min_score": 1}),
        case("scored", {"type": "reference_log_likelihood", "reference": "x", "max_drop": 1}),
    )
    async with working(stand.db, stand.redis_url, model):
        run_id = await started(
            stand,
            tenant,
            suite,
            revision_id=deployed["revision"]["id"],
            baseline_revision_id=base_revision,
        )
        run = await ended(stand, tenant, run_id)

    results = await results_of(stand, tenant, run["id"])
    assert {name: row["status"] for name, row in results.items()} == {
        "same": "fail",
        "judged": "pass",
        "below": "fail",
        "pair": "pass",  # it says A in both orders: it prefers a place
        "nobody": "error",
        "scored": "pass",
    }
    assert results["same"]["baseline_output"] == "the base"
    assert "there is no model nobody" in results["nobody"]["reason"]
    assert run["state"] == "failed"


async def revision_of_base(stand: Stand) -> str:
    async with stand.db.sessions() as session:
        found = await session.scalar(
            text("select current_revision_id from deployments where tenant_id is null")
        )
    assert found is not None
    return f"rev_{found.hex}"


async def test_two_runs_are_compared_case_by_case(stand: Stand, tenant: str, model: Path) -> None:
    suite = await suite_of(
        stand,
        tenant,
        case("a", {"type": "contains", "value": "one"}),
        case("b", {"type": "contains", "value": "two"}),
    )
    async with working(stand.db, stand.redis_url, model):
        stand.engine.script = says("one")
        first = await ended(stand, tenant, await started(stand, tenant, suite))
        stand.engine.script = says("two")
        second = await ended(stand, tenant, await started(stand, tenant, suite))
    path = f"/admin/v1/tenants/{tenant}/eval-runs/{first['id']}/compare"

    found = (await stand.admin.get(path, params={"with": second["id"]})).json()

    assert [(flip["case_id"], flip["second_output"]) for flip in found["broken"]] == [("a", "two")]
    assert [flip["case_id"] for flip in found["mended"]] == ["b"]
    assert (found["num_shared"], found["same_output"], found["mcnemar_p"]) == (2, 0, 1.0)
    assert found["logprob_difference"]["count"] == 2
    other = await started(stand, tenant, await suite_of(stand, tenant, case("x"), name="other"))
    error_of(await stand.admin.get(path, params={"with": other}), 409, "conflict")
    series = await stand.admin.get(
        f"/admin/v1/tenants/{tenant}/eval-series", params={"suite_id": suite}
    )
    assert [point["run_id"] for point in series.json()["data"]] == [first["id"], second["id"]]


async def test_a_changed_answer_of_the_same_build_is_an_alarm_and_of_another_a_lost_pass(
    stand: Stand, tenant: str, model: Path
) -> None:
    suite = await suite_of(
        stand, tenant, case("loose"), case("strict", {"type": "exact", "value": "one"})
    )
    async with working(stand.db, stand.redis_url, model):
        runs = []
        for words in ("one", "one", "two"):
            stand.engine.script = says(words)
            runs.append(await ended(stand, tenant, await started(stand, tenant, suite)))
            if words == "one":
                assert await alerts(stand) == []
    assert runs[1]["summary"].get("changed") is None
    [alert] = await alerts(stand)
    assert alert["kind"] == "eval_changed"
    assert alert["tenant_id"].replace("-", "") == tenant.removeprefix("ten_")
    assert alert["changes"] == [{"kind": "bits", "count": 2, "cases": ["loose", "strict"]}]
    assert runs[2]["summary"]["changed_since"] == runs[1]["id"]

    # Another build: the answer may differ, but what passed must not fail.
    await stand.engine.crash()
    (stand.folder / "b").mkdir()
    async with FakeEngine(
        stand.folder / "b",
        replica_id="fake-b",
        model_fingerprint="another",
        max_model_len=tiny_model.CONTEXT_LENGTH,
        vocab_size=400,
    ) as engine:
        announce(stand.redis_url, engine)
        async with working(stand.db, stand.redis_url, model):
            engine.script = says("one")
            back = await ended(stand, tenant, await started(stand, tenant, suite))
            assert back["state"] == "passed"
            assert len(await alerts(stand)) == 1
    assert back["fingerprints"] == ["another"]


# ---------------------------------------------------------------------------- workers


async def test_two_workers_share_the_runs_and_no_case_is_asked_twice(
    stand: Stand, tenant: str, model: Path
) -> None:
    suite = await suite_of(stand, tenant, *(case(f"c{i}") for i in range(5)))
    runs = [await started(stand, tenant, suite) for _ in range(4)]
    async with (
        working(stand.db, stand.redis_url, model, name="one"),
        working(stand.db, stand.redis_url, model, name="two"),
    ):
        states = {(await ended(stand, tenant, run))["state"] for run in runs}

    assert states == {"passed"}
    requests = await books_of(stand)
    assert len(requests) == 20
    assert {request.owner for request in requests} == {"one", "two"}


async def test_a_worker_that_stops_lets_its_run_go_and_the_next_asks_what_is_missing(
    stand: Stand, tenant: str, model: Path
) -> None:
    is_first = True
    stand.engine.script_for = lambda generate: (
        Script(never_answers=True)
        if is_first and generate.sampling.max_tokens == 7
        else says("yes")
    )
    suite = await suite_of(stand, tenant, case("a"), case("b", params={"max_tokens": 7}), case("c"))
    async with working(stand.db, stand.redis_url, model, name="one"):
        run_id = await started(stand, tenant, suite, concurrency=1)
        await has_counts(stand, tenant, run_id, {"pass": 1})
        await eventually(lambda: stand.engine.num_running > 0, "a case is asked")
    before = (await results_of(stand, tenant, run_id))["a"]
    is_first = False

    async with working(stand.db, stand.redis_url, model, name="two"):
        run = await ended(stand, tenant, run_id)

    assert (run["state"], run["counts"]) == ("passed", {"pass": 3})
    after = await results_of(stand, tenant, run_id)
    assert after["a"] == before
    owners = {f"req_{request.id.hex}": request.owner for request in await books_of(stand)}
    assert [owners[after[name]["request_id"]] for name in ("a", "b", "c")] == ["one", "two", "two"]


async def test_who_has_lost_the_lease_writes_nothing(
    stand: Stand, tenant: str, model: Path
) -> None:
    stand.engine.pause()
    suite = await suite_of(stand, tenant, case("a"))
    async with working(stand.db, stand.redis_url, model, name="one") as first:
        run_id = await started(stand, tenant, suite)
        await eventually(lambda: stand.engine.num_running > 0, "a case is asked")
        # As if it had slept through its lease: the other one takes over.
        async with stand.db.transaction() as session:
            await session.execute(
                text("update eval_runs set lease_token = lease_token + 1, owner = 'two'")
            )
        stand.engine.resume()
        await eventually(lambda: not first._held, "it has let the run go")
        assert await results_of(stand, tenant, run_id) == {}
        assert (await read(stand, tenant, run_id))["state"] == "running"
    await books_of(stand)


# ---------------------------------------------------------------------------- performance


async def test_a_replay_measures_and_holds_what_it_is_told(
    stand: Stand, tenant: str, model: Path
) -> None:
    stand.engine.script = Script(first_token_delay_s=0.02, token_delay_s=0.002)
    lines = [
        {"at_s": i * 0.01, "prompt_tokens": 5 + i, "completion_tokens": 4} for i in range(6)
    ] + [{"at_s": 0.1, "prompt_tokens": 10_000, "completion_tokens": 4}]
    suite = await suite_of(
        stand,
        tenant,
        *lines,
        kind="performance",
        name="replay",
        performance={"ttft_p95_ms": 60_000, "abort_rate": 0},
    )
    strict = await suite_of(
        stand,
        tenant,
        *lines[:2],
        kind="performance",
        name="strict",
        pace="none",
        performance={"ttft_p95_ms": 0.001},
    )
    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, await started(stand, tenant, suite, concurrency=2))
        missed = await ended(stand, tenant, await started(stand, tenant, strict))

    assert run["state"] == "passed", run
    figures = run["summary"]["figures"]
    assert (figures["num_requests"], figures["output_tokens"]) == (7, 28)
    assert (figures["concurrency"], figures["abort_rate"]) == (2, 0.0)
    assert 1 <= figures["max_in_flight"] <= 2
    assert figures["ttft_p50_ms"] >= 20
    assert figures["itl_p50_ms"] >= 2
    assert figures["kv_usage_max"] is not None
    assert run["summary"]["shortened"] == 1
    asked = [m for m in stand.engine.received_of(Generate) if isinstance(m, Generate)]
    assert [len(g.prompt_token_ids) for g in asked][:6] == [5, 6, 7, 8, 9, 10]
    assert all(g.sampling.ignore_eos for g in asked)
    assert missed["state"] == "failed"
    assert missed["summary"]["missed"][0].startswith("ttft_p95_ms is ")
    results = await results_of(stand, tenant, run["id"])
    assert {row["output"] for row in results.values()} == {None}  # numbers, no text
    await books_of(stand)


async def test_a_replay_that_was_cut_begins_anew(stand: Stand, tenant: str, model: Path) -> None:
    stand.engine.script_for = lambda generate: (
        Script(never_answers=True) if len(generate.prompt_token_ids) == 6 else Script()
    )
    lines = [{"at_s": 0, "prompt_tokens": 5 + i, "completion_tokens": 3} for i in range(2)]
    suite = await suite_of(stand, tenant, *lines, kind="performance", name="replay")
    async with working(stand.db, stand.redis_url, model):
        run_id = await started(stand, tenant, suite)
        await has_counts(stand, tenant, run_id, {"pass": 1})
    stand.engine.script_for = None

    async with working(stand.db, stand.redis_url, model):
        run = await ended(stand, tenant, run_id)

    assert run["state"] == "passed"
    assert run["summary"]["figures"]["num_requests"] == 2
    assert set(await results_of(stand, tenant, run_id)) == {"line-1", "line-2"}
