"""`Idempotency-Key` on completions: what was billed once is not run again."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from loraplex_platform.control import housekeeping
from loraplex_platform.db import IdempotentRequest, LedgerEntry
from loraplex_platform.gateway import idempotency_queries as queries
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.idempotency_queries import Claim
from loraplex_platform.ids import uuid7
from pydantic import SecretStr
from sqlalchemy import func, select

from tests.platform.gateway.stand import BASE, Stand, eventually, says
from tests.support.fake_engine import Script
from tests.support.metering import run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")

_HELLO: list[Any] = [{"role": "user", "content": "hello"}]
_BODY = {"model": BASE, "messages": _HELLO, "max_tokens": 20}
CHAT = "/v1/chat/completions"
_numbers = iter(range(1_000_000))


def fresh_key() -> dict[str, str]:
    """A header with a key that no other test has used."""
    return {"Idempotency-Key": f"test-{next(_numbers)}"}


async def num_billed(stand: Stand) -> int:
    async with stand.db.sessions() as session:
        statement = select(func.count()).where(LedgerEntry.account == "revenue")
        return (await session.execute(statement)).scalar_one()


async def test_the_official_client_is_told_once_and_does_not_pay_twice(stand: Stand) -> None:
    stand.engine.script = says("four")
    headers = fresh_key()
    answer = await stand.client.chat.completions.create(
        model=BASE, messages=_HELLO, max_tokens=20, extra_headers=headers
    )
    billed, asked = await num_billed(stand), len(stand.generated)
    client = stand.client.with_options(max_retries=2)

    with pytest.raises(openai.ConflictError) as caught:
        await client.chat.completions.create(
            model=BASE, messages=_HELLO, max_tokens=20, extra_headers=headers
        )

    assert caught.value.code == "idempotency_completed"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert isinstance(caught.value.body, dict)
    first = caught.value.body["first_request"]
    assert first["id"] == "req_" + answer.id.removeprefix("chatcmpl-")
    assert answer.usage is not None
    assert first["usage"] == answer.usage.model_dump(exclude_none=True) | {
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert first["finish_reason"] == "stop"
    assert first["id"] in caught.value.message
    assert (await num_billed(stand), len(stand.generated)) == (billed, asked)


async def test_while_the_first_runs_others_wait_their_turn_and_hear_of_its_end(
    stand: Stand,
) -> None:
    stand.engine.script = says("a slow story " * 3, token_delay_s=0.02)
    headers = fresh_key()
    first = asyncio.create_task(stand.http().post(CHAT, json=_BODY, headers=headers))
    await eventually(lambda: bool(stand.generated), "the first at the engine")

    meanwhile = await stand.http().post(CHAT, json=_BODY, headers=headers)
    other_body = await stand.http().post(CHAT, json=_BODY | {"top_p": 0.5}, headers=headers)
    other_route = await stand.http().post(
        "/v1/completions", json={"model": BASE, "prompt": "x", "max_tokens": 1}, headers=headers
    )
    stranger = await stand.http(stand.stranger.secret).post(CHAT, json=_BODY, headers=headers)

    assert (meanwhile.status_code, meanwhile.json()["error"]["code"]) == (
        409,
        "idempotency_in_progress",
    )
    assert "x-should-retry" not in meanwhile.headers  # the SDK tries a 409 again by itself
    assert int(meanwhile.headers["retry-after"]) >= 1
    assert (other_body.status_code, other_body.json()["error"]["code"]) == (
        422,
        "idempotency_key_reuse",
    )
    assert other_body.headers["x-should-retry"] == "false"
    assert other_body.json()["error"]["param"] == "Idempotency-Key"
    # Another route and another tenant: other keys.
    assert (other_route.status_code, stranger.status_code) == (200, 200)
    assert (await first).status_code == 200
    assert (await stand.http().post(CHAT, json=_BODY, headers=headers)).json()["error"][
        "code"
    ] == "idempotency_completed"


async def test_of_many_at_once_one_runs(stand: Stand) -> None:
    stand.engine.script = says("one", first_token_delay_s=0.2)
    headers = fresh_key()
    billed = await num_billed(stand)

    answers = await asyncio.gather(
        *(stand.http().post(CHAT, json=_BODY, headers=headers) for _ in range(12))
    )
    await stand.settled()

    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 11
    assert len(stand.generated) == 1
    assert await num_billed(stand) == billed + 1


@pytest.mark.parametrize(
    "fate",
    [Script(error_after=2), Script(reject="queue_full"), says("x")],
    ids=["engine fault", "refused", "bad request"],
)
async def test_a_first_request_that_cost_nothing_frees_the_key(stand: Stand, fate: Script) -> None:
    headers = fresh_key()
    stand.engine.script = fate
    is_bad = fate.error_after is None and fate.reject is None
    body = _BODY | ({"temperature": 7} if is_bad else {})
    failed = await stand.http().post(CHAT, json=body, headers=headers)
    assert failed.status_code in (400, 500, 503)
    await stand.settled()
    stand.engine.script = says("now")

    # Also with another body: the key has bought nothing yet.
    again = await stand.http().post(CHAT, json=_BODY, headers=headers)

    assert again.status_code == 200
    request, _, _ = await stand.last_request()
    third = await stand.http().post(CHAT, json=_BODY, headers=headers)
    assert third.json()["error"]["first_request"]["id"] == f"req_{request.id.hex}"


async def test_leaving_has_a_price_and_keeps_the_key(stand: Stand) -> None:
    stand.engine.script = says("a story for nobody " * 3, token_delay_s=0.03)
    headers = fresh_key()
    async with stand.http().stream(
        "POST", CHAT, json=_BODY | {"stream": True}, headers=headers
    ) as response:
        async for _ in response.aiter_lines():
            break
    await stand.settled()

    again = await stand.http().post(CHAT, json=_BODY | {"stream": True}, headers=headers)

    error = again.json()["error"]
    assert (error["code"], error["first_request"]["finish_reason"]) == (
        "idempotency_completed",
        "abort",
    )


@pytest.mark.parametrize(
    "value", ["", "x" * 256, "tab\tbed", "naïve".encode("latin-1").decode("latin-1")]
)
async def test_keys_that_cannot_be_read_are_refused(stand: Stand, value: str) -> None:
    answer = await stand.http().post(
        CHAT,
        json=_BODY,
        headers=[("Idempotency-Key", value.encode("latin-1"))],  # type: ignore[arg-type] # httpx takes bytes
    )

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"


async def test_two_keys_in_one_request_are_refused(stand: Stand) -> None:
    twice = [("Idempotency-Key", "one"), ("Idempotency-Key", "two")]

    answer = await stand.http().post(CHAT, json=_BODY, headers=twice)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


# ---------------------------------------------------------------------------- kept answers


@pytest.fixture
async def keeping(stand: Stand) -> Any:
    await run_sql(stand.db, "update tenants set replays_answers = slug = 'acme'")
    yield stand
    await run_sql(stand.db, "update tenants set replays_answers = false")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_tenant_that_asked_for_it_gets_the_same_answer_again(
    keeping: Stand, is_stream: bool
) -> None:
    stand = keeping
    stand.engine.script = says("remember me")
    headers = fresh_key()
    body = _BODY | {"stream": is_stream}
    first = await stand.http().post(CHAT, json=body, headers=headers)
    billed, asked = await num_billed(stand), len(stand.generated)

    again = await stand.http().post(CHAT, json=body, headers=headers)
    other_body = await stand.http().post(CHAT, json=body | {"seed": 1}, headers=headers)

    assert again.status_code == 200
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-loraplex-revision"] == first.headers["x-loraplex-revision"]
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-loraplex-first-request-id"] == first.headers["x-request-id"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert other_body.status_code == 422
    assert (await num_billed(stand), len(stand.generated)) == (billed, asked)


async def test_a_kept_answer_is_only_for_who_may_still_call_its_model(own_stand: Stand) -> None:
    stand = own_stand
    stand.engine.script = says("remember me")
    headers, unkept = fresh_key(), fresh_key()
    await stand.http().post(CHAT, json=_BODY, headers=unkept)
    await run_sql(stand.db, "update tenants set replays_answers = true")
    first = await stand.http().post(CHAT, json=_BODY, headers=headers)
    assert first.status_code == 200
    # Remembered as it was for as long as a test takes: what is compared is what counts.
    known = stand.gateway.admissions.keys
    await known.find(stand.customer.secret, "")
    known._ttl_s = 600.0

    await run_sql(
        stand.db,
        "insert into key_model_grants (key_id, tenant_id, target_kind, target_id)"
        " select id, tenant_id, 'deployment', gen_random_uuid() from api_keys where id = :id",
        id=stand.customer.key_id,
    )
    elsewhere = await stand.http().post(CHAT, json=_BODY, headers=headers)
    assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (404, "model_not_found")
    assert (await known.find(stand.customer.secret, "")).key_id == stand.customer.key_id

    await run_sql(
        stand.db,
        "update api_keys set status = 'revoked', revoked_at = now() where id = :id",
        id=stand.customer.key_id,
    )
    for key in (headers, unkept):
        revoked = await stand.http().post(CHAT, json=_BODY, headers=key)
        assert revoked.status_code == 401, revoked.text


async def test_kept_answers_are_sealed_and_of_one_secret_and_place(keeping: Stand) -> None:
    stand = keeping
    stand.engine.script = says("remember me")
    headers = fresh_key()
    await stand.http().post(CHAT, json=_BODY, headers=headers)
    async with stand.db.sessions() as session:
        newest = select(IdempotentRequest).order_by(IdempotentRequest.created_at.desc()).limit(1)
        row = (await session.scalars(newest)).one()
    assert row.sealed_answer is not None
    assert b"remember" not in row.sealed_answer
    claim = Claim(row.tenant_id, row.key_id, row.endpoint, row.key_hash, row.fingerprint)
    async with stand.db.sessions() as session:
        first = await queries.find_first(session, claim)
    assert first is not None
    salt_key = stand.gateway.settings.salt_key

    assert Retries(stand.db.sessions, salt_key)._open(claim, first) is not None
    for secret, place in (
        (SecretStr("another secret of the same length"), claim),
        (salt_key, Claim(uuid7(), claim.key_id, claim.endpoint, claim.key_hash, b"")),
        (salt_key, Claim(claim.tenant_id, claim.key_id, claim.endpoint, b"elsewhere", b"")),
    ):
        assert Retries(stand.db.sessions, secret)._open(place, first) is None


async def test_who_does_not_want_answers_kept_any_more_has_none(keeping: Stand) -> None:
    stand = keeping
    stand.engine.script = says("forget me")
    headers = fresh_key()
    await stand.http().post(CHAT, json=_BODY, headers=headers)
    is_kept = select(func.count()).where(IdempotentRequest.sealed_answer.is_not(None))
    async with stand.db.sessions() as session:
        assert (await session.execute(is_kept)).scalar_one() > 0

    await run_sql(stand.db, "update tenants set replays_answers = false")

    async with stand.db.sessions() as session:
        assert (await session.execute(is_kept)).scalar_one() == 0
    again = await stand.http().post(CHAT, json=_BODY, headers=headers)
    assert again.json()["error"]["code"] == "idempotency_completed"


async def test_nothing_is_kept_unless_asked_for_nor_of_what_is_too_large(
    keeping: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = keeping
    stand.engine.script = says("remember me")
    theirs = fresh_key()
    await stand.http(stand.stranger.secret).post(CHAT, json=_BODY, headers=theirs)
    refused = await stand.http(stand.stranger.secret).post(CHAT, json=_BODY, headers=theirs)
    assert refused.status_code == 409
    async with stand.db.sessions() as session:
        statement = select(func.count()).where(
            IdempotentRequest.tenant_id == stand.stranger.tenant_id,
            IdempotentRequest.sealed_answer.is_not(None),
        )
        assert (await session.execute(statement)).scalar_one() == 0

    monkeypatch.setattr("loraplex_platform.gateway.idempotency.MAX_ANSWER_BYTES", 10)
    monkeypatch.setattr("loraplex_platform.gateway.completions.MAX_ANSWER_BYTES", 10)
    for is_stream in (False, True):
        headers = fresh_key()
        body = _BODY | {"stream": is_stream}
        assert (await stand.http().post(CHAT, json=body, headers=headers)).status_code == 200
        assert (await stand.http().post(CHAT, json=body, headers=headers)).status_code == 409


async def test_expired_keys_are_forgotten(stand: Stand) -> None:
    stand.engine.script = says("x")
    await stand.http().post(CHAT, json=_BODY, headers=fresh_key())
    await run_sql(stand.db, "update idempotent_requests set expires_at = now() - interval '1 s'")

    async with stand.db.transaction() as session:
        await housekeeping.tidy(session)

    async with stand.db.sessions() as session:
        count = select(func.count()).select_from(IdempotentRequest)
        assert (await session.execute(count)).scalar_one() == 0
