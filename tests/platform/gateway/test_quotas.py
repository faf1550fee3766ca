"""Quotas through the gateway: what the engine is asked to do, and what clients are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from loraplex_platform.db import Refusal
from loraplex_platform.ids import format_id, parse_id
from loraplex_platform.quotas.explain import explain
from sqlalchemy import select

from tests.platform.gateway.stand import BASE, Stand, eventually, says
from tests.support.limits import remove_limit, set_limit, use_of
from tests.support.metering import run_sql

pytestmark = pytest.mark.asyncio(loop_scope="package")

_HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(loop_scope="package")
async def limited(stand: Stand) -> AsyncIterator[Stand]:
    """The shared stand, whose limits are removed afterwards."""
    yield stand
    await stand.settled()
    await run_sql(stand.db, "delete from limits")


async def _prompt_tokens(stand: Stand) -> int:
    answer = await stand.client.chat.completions.create(model=BASE, messages=_HELLO, max_tokens=1)
    assert answer.usage is not None
    return int(answer.usage.prompt_tokens)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_max_tokens_is_cut_and_the_answer_says_so(limited: Stand, is_stream: bool) -> None:
    limited.engine.script = says("word " * 60, end=False)
    prompt = await _prompt_tokens(limited)
    limit_id = await set_limit(
        limited.db, limited.customer, "tokens_total", str(prompt + 7), "month"
    )
    used, _ = await use_of(limited.db, limit_id)
    await remove_limit(limited.db, limit_id)
    await set_limit(limited.db, limited.customer, "tokens_total", str(used + prompt + 7), "month")

    raw = await limited.client.chat.completions.with_raw_response.create(
        model=BASE, messages=_HELLO, max_tokens=50, stream=is_stream
    )

    assert raw.headers["x-loraplex-max-tokens"] == "7"
    assert limited.generated[-1].sampling.max_tokens == 7
    if is_stream:
        reasons = [chunk.choices[0].finish_reason async for chunk in raw.parse() if chunk.choices]
        assert reasons[-1] == "length"
    else:
        answer = raw.parse()
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 7
    await limited.settled()
    with pytest.raises(openai.RateLimitError):
        await limited.client.chat.completions.create(model=BASE, messages=_HELLO)


async def test_who_is_not_limited_is_told_of_no_cut(limited: Stand) -> None:
    raw = await limited.client.chat.completions.with_raw_response.create(
        model=BASE, messages=_HELLO, max_tokens=5
    )

    assert "x-loraplex-max-tokens" not in raw.headers


async def test_a_spent_quota_is_a_429_that_is_not_retried_and_can_be_explained(
    limited: Stand,
) -> None:
    await set_limit(limited.db, limited.customer, "requests", "0", "total", scope_kind="key")
    num_generated = len(limited.generated)

    with pytest.raises(openai.RateLimitError) as caught:
        await limited.client.with_options(max_retries=2).chat.completions.create(
            model=BASE, messages=_HELLO
        )

    answer = caught.value.response
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "insufficient_quota",
        "insufficient_quota",
        None,
    )
    assert "this API key on requests in total" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert len(limited.generated) == num_generated
    request_id = answer.headers["x-request-id"]

    async def is_logged() -> bool:
        async with limited.db.sessions() as session:
            rows = (await session.scalars(select(Refusal))).all()
        return any(parse_id("request", request_id) in row.request_ids for row in rows)

    await eventually(is_logged, "the refusal in the log")
    async with limited.db.sessions() as session:
        found = await explain(session, request_id)
        counts = [
            row.count
            for row in await session.scalars(select(Refusal))
            if parse_id("request", request_id) in row.request_ids
        ]
    assert found.outcome == "refused"
    assert found.summary == error["message"]
    assert counts == [1], "the official client sent it once"


async def test_a_request_larger_than_the_whole_budget_is_a_400(limited: Stand) -> None:
    await set_limit(limited.db, limited.customer, "tokens_in", "1", "day")

    with pytest.raises(openai.BadRequestError) as caught:
        await limited.client.chat.completions.create(model=BASE, messages=_HELLO)

    assert caught.value.code == "request_exceeds_budget"
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_a_strangers_limits_are_not_mine(limited: Stand) -> None:
    await set_limit(limited.db, limited.stranger, "requests", "0", "day")

    await limited.client.chat.completions.create(model=BASE, messages=_HELLO, max_tokens=1)
    with pytest.raises(openai.RateLimitError):
        await limited.client_with(limited.stranger.secret).chat.completions.create(
            model=BASE, messages=_HELLO
        )


async def test_what_is_set_for_a_tenant_reaches_the_engine(limited: Stand) -> None:
    sql = (
        "update tenants set priority = :priority, weight = :weight, memory_weight = :memory,"
        " max_adapters = :adapters where id = :id"
    )
    tenant_id = limited.customer.tenant_id
    await run_sql(limited.db, sql, priority=3, weight=2.5, memory=0.5, adapters=2, id=tenant_id)
    try:

        async def has_arrived() -> bool:
            await limited.client.chat.completions.create(model=BASE, messages=_HELLO, max_tokens=1)
            asked = limited.generated[-1]
            shares = (asked.memory_weight, asked.max_adapters)
            return (asked.priority, asked.weight, *shares) == (3, 2.5, 0.5, 2)

        await eventually(has_arrived, f"what was set for {format_id('tenant', tenant_id)}")
    finally:
        await run_sql(
            limited.db, sql, priority=0, weight=1.0, memory=None, adapters=None, id=tenant_id
        )
