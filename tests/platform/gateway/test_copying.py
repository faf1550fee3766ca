"""What a rollout has asked after an answer: shadows of the canary, and scores under the stable revision."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any
from uuid import UUID

import msgspec
import pytest
from loraplex_engine.protocol import Generate
from loraplex_platform.db import Attempt, LedgerEntry, Request
from loraplex_platform.gateway import copying, scoring
from loraplex_platform.gateway.queries import ActiveRollout, Revision
from loraplex_platform.gateway.revision_choice import is_scored, is_shadowed
from loraplex_platform.ids import uuid7
from loraplex_platform.metering.records import REFUSED_BY_REVISION
from sqlalchemy import func, select

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import Stand, eventually, says
from tests.platform.gateway.test_rollouts import HELLO, NEW, OLD, Deployed, request_of
from tests.support import rollouts
from tests.support.fake_engine import Script
from tests.support.limits import set_limit, use_of
from tests.support.metering import run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")


def counted(stand: Stand, what: str, **labels: str) -> float:
    name = f"loraplex:gateway_rollout_copies_{what}_total"
    return stand.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


async def copies_of(stand: Stand, request_id: UUID) -> list[Request]:
    """What was asked after a request, in order."""
    await stand.settled()
    async with stand.db.sessions() as session:
        statement = select(Request).where(Request.shadow_of == request_id).order_by(Request.id)
        return list(await session.scalars(statement))


async def shadowed(stand: Stand, *, score_bp: int = 0, **canary: Any) -> Deployed:
    """A deployment in a shadow step of which all is asked again."""
    deployed = await Deployed.make(stand, **canary)
    await deployed.roll_out(state="shadow", shadow_bp=10_000, score_bp=score_bp, step=2)
    return deployed


async def test_the_canary_is_asked_the_same_and_nobody_else_hears_of_it(stand: Stand) -> None:
    deployed = await shadowed(stand)
    stand.engine.script_for = lambda sent: says("new" if sent.adapter_digest == NEW else "old")

    answer = await deployed.ask(max_tokens=32, user="ada", temperature=0.5, logprobs=True)

    assert answer.json()["choices"][0]["message"]["content"] == "old"
    original = await request_of(stand, answer)
    [shadow] = await copies_of(stand, original.id)
    asked, again = stand.generated
    assert (asked.adapter_digest, again.adapter_digest) == (OLD, NEW)
    assert again.prompt_token_ids == asked.prompt_token_ids
    assert again.sampling == msgspec.structs.replace(asked.sampling, logprobs=None)
    assert again.priority == copying.PRIORITY < -1_000
    assert again.tenant_salt != asked.tenant_salt
    assert (original.arm, original.kind, original.shadow_of) == ("stable", "user", None)
    assert (shadow.arm, shadow.kind, shadow.key_id) == ("shadow", "shadow", None)
    assert shadow.revision_id == deployed.canary_id
    same = ("rollout_id", "rollout_step", "subject_key", "endpoint", "deployment_id", "model")
    assert [getattr(shadow, name) for name in same] == [getattr(original, name) for name in same]
    assert (shadow.rollout_step, shadow.finish_reason) == (2, "stop")
    assert shadow.fingerprint == stand.engine.model_fingerprint
    assert shadow.ttft_ms is not None
    async with stand.db.sessions() as session:
        attempt = await session.get_one(Attempt, (shadow.id, 1))
        entry = await session.get_one(LedgerEntry, (shadow.id, "usage", 0))
    assert (attempt.billed, attempt.absorbed) == (0, len(tiny_model.ids_of("new")) + 1)
    assert (entry.account, entry.key_id) == ("absorbed", None)


async def test_a_shadow_ends_where_its_original_would(stand: Stand) -> None:
    """At a stop string too, which engines know nothing of: the sides' lengths would not compare."""
    deployed = await shadowed(stand)
    stand.engine.script_for = lambda _: says("one two three four five six", token_delay_s=0.001)

    answer = await deployed.ask(max_tokens=64, stop=["three"])

    original = await request_of(stand, answer)
    [shadow] = await copies_of(stand, original.id)
    assert shadow.finish_reason == original.finish_reason == "stop"
    async with stand.db.sessions() as session:
        attempts = [await session.get_one(Attempt, (id_, 1)) for id_ in (original.id, shadow.id)]
    assert attempts[0].billed == attempts[1].absorbed == original.completion_tokens
    assert shadow.itl_p95_ms is not None


async def test_answers_of_both_sides_are_scored_under_the_stable_revision(stand: Stand) -> None:
    deployed = await shadowed(stand, score_bp=10_000)
    stand.engine.script_for = lambda sent: says("new" if sent.adapter_digest == NEW else "old")

    answer = await deployed.ask(max_tokens=32)

    original = await request_of(stand, answer)
    copies = await copies_of(stand, original.id)
    [shadow] = [copy for copy in copies if copy.endpoint == "chat.completions"]
    scores = [copy for copy in copies if copy.endpoint == "score"]
    assert len(scores) == 2
    for score in scores:
        assert (score.kind, score.arm, score.revision_id) == ("shadow", None, deployed.stable_id)
        assert (score.rollout_id, score.rollout_step) == (original.rollout_id, 2)
        assert score.finish_reason == "length"
    assert original.stable_logprob == shadow.stable_logprob == -0.5
    forced = {sent.sampling.forced_token_ids for sent in stand.generated}
    assert forced - {()} == {(*tiny_model.ids_of(text), 2) for text in ("old", "new")}
    for sent in stand.generated:
        if sent.sampling.forced_token_ids:
            assert sent.adapter_digest == OLD
            assert sent.prompt_token_ids == stand.generated[0].prompt_token_ids
            assert sent.priority == copying.PRIORITY
            assert sent.tenant_salt not in (b"", stand.generated[0].tenant_salt)


async def test_in_a_canary_step_answers_of_both_sides_are_scored(stand: Stand) -> None:
    deployed = await Deployed.make(stand)
    rollout_id = await deployed.roll_out(weight_bp=10_000, score_bp=10_000)
    of_canary = await deployed.ask()
    await stand.settled()
    await rollouts.change_rollout(stand.db, rollout_id, weight_bp=0)
    of_stable = await deployed.ask()

    for answer, arm in ((of_canary, "canary"), (of_stable, "stable")):
        request = await request_of(stand, answer)
        assert (request.arm, request.stable_logprob) == (arm, -0.5)
        [score] = await copies_of(stand, request.id)
        assert score.revision_id == deployed.stable_id
    assert [sent.adapter_digest for sent in stand.generated] == [NEW, OLD, OLD, OLD]


async def test_each_side_is_asked_with_its_own_parameters(stand: Stand) -> None:
    params = {"system_prompt": "Answer in verse.", "sampling": {"top_k": 9, "max_tokens": 7}}
    deployed = await shadowed(stand, score_bp=10_000, params=params)
    stand.engine.script = says("so it is")

    await deployed.ask(max_tokens=None, seed=5)

    await stand.settled()
    asked, *copies = stand.generated
    [again] = [sent for sent in copies if not sent.sampling.forced_token_ids]
    text = tiny_model.reference().decode(again.prompt_token_ids, skip_special_tokens=False)
    assert "Answer in verse." in text
    assert (again.sampling.top_k, again.sampling.max_tokens, again.sampling.seed) == (9, 7, 5)
    assert asked.sampling.top_k == 0
    # What the canary said is looked at with the eyes of the stable revision, its prompt included.
    scored = [sent for sent in copies if sent.sampling.forced_token_ids]
    assert [sent.prompt_token_ids for sent in scored] == [asked.prompt_token_ids] * 2


async def test_a_long_answer_is_scored_by_its_beginning(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_SCORED_TOKENS", 3)
    deployed = await Deployed.make(stand)
    await deployed.roll_out(weight_bp=0, score_bp=10_000)
    stand.engine.script = says("longer than that", end=False)

    answer = await deployed.ask(max_tokens=9)

    request = await request_of(stand, answer)
    await copies_of(stand, request.id)
    assert (await request_of(stand, answer)).stable_logprob == -0.5
    assert len(stand.generated[1].sampling.forced_token_ids) == 3


# ---------------------------------------------------------------------------- of what nothing is asked


async def test_of_pinned_abandoned_and_refused_requests_nothing_is_asked_again(
    stand: Stand,
) -> None:
    deployed = await shadowed(stand, score_bp=10_000)
    stand.engine.script = Script(reject="invalid_request")
    assert (await deployed.ask()).status_code == 400
    stand.engine.script = Script(token_delay_s=0.02)
    body = {"model": deployed.name, "messages": HELLO, "stream": True, "max_tokens": 200}
    async with stand.http().stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_lines())
    await stand.settled()
    stand.engine.script = Script()
    await rollouts.add_pin(
        stand.db, stand.customer.tenant_id, deployed.id, deployed.stable_id, until=None
    )
    assert (await deployed.ask()).status_code == 200

    await stand.settled()

    assert len(stand.generated) == 3
    assert {sent.adapter_digest for sent in stand.generated} == {OLD}


async def test_what_failed_is_asked_again_but_never_scored(stand: Stand) -> None:
    deployed = await shadowed(stand, score_bp=10_000)
    stand.engine.script_for = lambda sent: (
        Script(error_after=1) if sent.adapter_digest == OLD else says("fine")
    )

    answer = await deployed.ask(max_tokens=16)

    assert answer.status_code == 500
    request = await request_of(stand, answer)
    copies = await copies_of(stand, request.id)
    assert [copy.endpoint for copy in copies][:1] == ["chat.completions"]
    assert request.stable_logprob is None


async def test_a_canary_that_fails_is_on_the_books_and_no_clients_affair(stand: Stand) -> None:
    deployed = await shadowed(stand)
    failed = counted(stand, "failed", kind="shadow", reason="engine_error")
    stand.engine.script_for = lambda sent: (
        Script(error_after=2) if sent.adapter_digest == NEW else says("fine")
    )

    answer = await deployed.ask(max_tokens=16)

    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    [shadow] = await copies_of(stand, (await request_of(stand, answer)).id)
    assert (shadow.state, shadow.finish_reason, shadow.error_code) == (
        "settled",
        "error",
        "engine_error",
    )
    assert counted(stand, "failed", kind="shadow", reason="engine_error") == failed + 1


async def test_a_tenant_with_one_place_for_adapters_keeps_it(stand: Stand) -> None:
    deployed = await shadowed(stand)
    dropped = counted(stand, "dropped", kind="shadow", reason="max_adapters")
    tenant_id = stand.customer.tenant_id
    change = "update tenants set max_adapters = :most where id = :id"
    await run_sql(stand.db, change, most=1, id=tenant_id)
    try:
        await deployed.ask()
        await stand.settled()
    finally:
        await run_sql(stand.db, change, most=None, id=tenant_id)

    assert len(stand.generated) == 1
    assert counted(stand, "dropped", kind="shadow", reason="max_adapters") == dropped + 1


# ---------------------------------------------------------------------------- load


async def test_nothing_is_asked_while_an_engine_has_somebody_waiting(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_WAIT_S", 0.4)
    deployed = await shadowed(stand)
    dropped = counted(stand, "dropped", kind="shadow", reason="busy")
    stand.engine.waiting_by_priority = {0: 1}
    try:
        assert (await deployed.ask()).status_code == 200
        await stand.settled()
        assert len(stand.generated) == 1
        assert counted(stand, "dropped", kind="shadow", reason="busy") == dropped + 1

        stand.engine.waiting_by_priority = {copying.PRIORITY: 3}
        await deployed.ask()
        await stand.settled()
        assert len(stand.generated) == 3
    finally:
        stand.engine.waiting_by_priority = {}


async def test_it_waits_for_its_turn_and_few_wait_with_it(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_WAITING", 2)
    deployed = await shadowed(stand)
    full = counted(stand, "dropped", kind="shadow", reason="full")
    most = stand.gateway.settings.shadow_concurrency // 2  # of one rollout
    stand.engine.waiting_by_priority = {0: 1}
    try:
        for _ in range(most + 4):
            assert (await deployed.ask()).status_code == 200
        await eventually(
            lambda: counted(stand, "dropped", kind="shadow", reason="full") == full + 2,
            "two that found no place",
        )
        assert len(stand.generated) == most + 4
    finally:
        stand.engine.waiting_by_priority = {}
    await stand.settled()
    assert len(stand.generated) == 2 * most + 4 + 2


async def test_a_hanging_canary_holds_up_nobody(stand: Stand) -> None:
    deployed = await shadowed(stand)
    stand.engine.script_for = lambda sent: (
        Script(never_answers=True) if sent.adapter_digest == NEW else Script()
    )
    began_s = time.monotonic()
    for _ in range(2 * stand.gateway.settings.shadow_concurrency):
        assert (await deployed.ask()).status_code == 200
    assert time.monotonic() - began_s < 30
    hanging = list(stand.gateway.copying._shadows)
    assert len(hanging) <= stand.gateway.settings.shadow_concurrency // 2
    stand.engine.script_for = None
    for pump in hanging:
        pump.kill(copying.ShadowGivenUpError("The test is over."))


async def test_hanging_canaries_silence_no_other_rollout_and_no_other_tenant(stand: Stand) -> None:
    hangs, works = await shadowed(stand), await shadowed(stand)
    elsewhere = await shadowed(dataclasses.replace(stand, customer=stand.stranger))
    most = stand.gateway.settings.shadow_concurrency
    copies = stand.gateway.copying

    async def hang(deployed: Deployed, num_hanging: int) -> None:
        stand.engine.script_for = hangs_for_copies
        for _ in range(most):
            assert (await deployed.ask()).status_code == 200
        await eventually(lambda: len(copies._shadows) == num_hanging, "all that may hang")
        stand.engine.script_for = None

    async def ask_three(deployed: Deployed) -> None:
        before = len(stand.generated)
        for _ in range(3):
            assert (await deployed.ask()).status_code == 200
        await eventually(lambda: len(stand.generated) == before + 6, "three shadows", deadline_s=15)

    try:
        await hang(hangs, most // 2)
        await ask_three(works)
        await hang(works, most - 1)
        await ask_three(elsewhere)
    finally:
        stand.engine.script_for = None
        while copies.num_pending:
            for pump in list(copies._shadows):
                pump.kill(copying.ShadowGivenUpError("The test is over."))
            await asyncio.sleep(0.05)


async def test_a_full_line_is_not_one_rollouts(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_WAITING", 3)
    first, second = await shadowed(stand), await shadowed(stand)
    stand.engine.waiting_by_priority = {0: 1}
    try:
        for _ in range(8):
            await first.ask()
        for _ in range(3):
            await second.ask()
        waiting = [len(line) for line in stand.gateway.copying._lines.values()]
        assert sorted(waiting) == [1, 2]
    finally:
        stand.engine.waiting_by_priority = {}
    await stand.settled()


async def test_what_is_too_late_or_of_a_step_that_is_over_is_not_asked(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed = await Deployed.make(stand)
    rollout_id = await deployed.roll_out(state="shadow", shadow_bp=10_000)
    for reason in ("late", "over"):
        dropped = counted(stand, "dropped", kind="shadow", reason=reason)
        if reason == "late":
            monkeypatch.setattr(copying, "MAX_WAIT_S", -1.0)
            await deployed.ask()
            monkeypatch.undo()
        else:
            stand.engine.waiting_by_priority = {0: 1}
            await deployed.ask()
            await rollouts.abort_rollout(stand.db, rollout_id)
        # The engine is busy on: what is over does not wait for it, which would take MAX_WAIT_S.
        await stand.settled()
        stand.engine.waiting_by_priority = {}
        assert counted(stand, "dropped", kind="shadow", reason=reason) == dropped + 1
    assert len(stand.generated) == 2


async def test_a_shadow_that_says_nothing_is_ended_and_counts_against_the_canary(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SHADOW_TIMEOUT_S", 0.3)
    deployed = await shadowed(stand)
    for is_slow, code in ((False, "shadow_hung"), (True, "given_up")):
        stand.engine.script_for = lambda sent, is_slow=is_slow: (
            Script()
            if sent.priority != copying.PRIORITY
            else Script(token_ids=[5] * 300, token_delay_s=0.05)
            if is_slow
            else Script(never_answers=True)
        )
        answer = await deployed.ask(max_tokens=200 if is_slow else 2)
        [shadow] = await copies_of(stand, (await request_of(stand, answer)).id)
        assert (shadow.state, shadow.error_code) == ("settled", code)
        assert shadow.http_status is not None
        assert shadow.http_status >= 500
    stand.engine.script_for = None


async def test_a_shadow_gets_no_more_than_a_quota_paid_of_its_original(own_stand: Stand) -> None:
    stand = own_stand
    deployed = await shadowed(stand, params={"sampling": {"top_k": 9}})
    await set_limit(stand.db, stand.customer, "tokens_total", "40")
    stand.engine.script = says("so it is", end=False)

    answer = await deployed.ask(max_tokens=100)

    clamped = int(answer.headers["x-loraplex-max-tokens"])
    await stand.settled()
    asked, again = stand.generated
    assert (asked.sampling.top_k, again.sampling.top_k) == (0, 9)
    assert asked.sampling.max_tokens == again.sampling.max_tokens == clamped < 100
    await stand.check_books()


async def test_what_only_the_canarys_revision_refuses_is_on_its_books(stand: Stand) -> None:
    deployed = await shadowed(stand, params={"system_prompt": "verse " * 2_000})

    answer = await deployed.ask()

    assert answer.status_code == 200
    original = await request_of(stand, answer)
    [shadow] = await copies_of(stand, original.id)
    assert (shadow.kind, shadow.arm, shadow.state) == ("shadow", "shadow", "voided")
    assert (shadow.http_status, shadow.error_code) == (400, REFUSED_BY_REVISION)
    same = ("rollout_id", "rollout_step", "subject_key", "deployment_id", "model")
    assert [getattr(shadow, name) for name in same] == [getattr(original, name) for name in same]


async def test_a_tenants_quota_and_bill_know_nothing_of_copies(own_stand: Stand) -> None:
    stand = own_stand
    deployed = await shadowed(stand, score_bp=10_000)
    limit_id = await set_limit(stand.db, stand.customer, "tokens_total", "1000")

    answer = await deployed.ask(max_tokens=8)

    usage = answer.json()["usage"]
    await stand.settled()
    assert len(stand.generated) == 4
    async with stand.db.sessions() as session:
        rows = await session.execute(
            select(func.sum(LedgerEntry.prompt_tokens + LedgerEntry.completion_tokens)).where(
                LedgerEntry.account == "revenue"
            )
        )
        assert rows.scalar_one() == usage["total_tokens"]
    assert await use_of(stand.db, limit_id) == (usage["total_tokens"], 0)
    await stand.check_books()


async def test_the_end_of_a_gateway_gives_them_up_and_closes_their_books(
    own_stand: Stand,
) -> None:
    stand = own_stand
    deployed = await shadowed(stand, score_bp=10_000)
    stand.engine.script_for = hangs_for_copies
    answers = [await deployed.ask() for _ in range(6)]
    most = stand.gateway.settings.shadow_concurrency // 2
    await eventually(lambda: len(stand.generated) == 6 + most, "copies under way")

    began_s = time.monotonic()
    await stand.gateway.copying.close()
    assert (await deployed.ask()).status_code == 200  # which wants copies too
    await stand.settled()

    assert time.monotonic() - began_s < 20
    assert len(stand.generated) == 6 + most + 1
    async with stand.db.sessions() as session:
        rows = list(
            await session.scalars(
                select(Request).where(Request.kind == "shadow").order_by(Request.id)
            )
        )
    assert len(rows) == most
    assert {row.state for row in rows} == {"settled"}
    assert {row.error_code for row in rows} == {"given_up"}
    assert all(answer.status_code == 200 for answer in answers)
    await stand.check_books()


def hangs_for_copies(sent: Generate) -> Script:
    return Script(never_answers=True) if sent.priority == copying.PRIORITY else Script()


async def test_shares_are_drawn_independently() -> None:
    rollout = ActiveRollout(
        id=uuid7(), step=0, state="shadow", weight_bp=0, shadow_bp=1_000, score_bp=5_000,
        sticky_by="user", salt=b"", canary=Revision(uuid7(), uuid7(), None, uuid7(), "tiny", "", ""),
    )  # fmt: skip
    ids = [uuid7() for _ in range(20_000)]
    shadows = [id_ for id_ in ids if is_shadowed(id_, rollout)]
    scores = [id_ for id_ in ids if is_scored(id_, rollout)]
    both = set(shadows) & set(scores)

    assert 0.09 < len(shadows) / len(ids) < 0.11
    assert 0.48 < len(scores) / len(ids) < 0.52
    assert 0.45 < len(both) / len(shadows) < 0.55
