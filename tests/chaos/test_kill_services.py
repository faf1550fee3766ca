"""kill -9 and crowds, on real processes: clients hear of it, the next request works, the bill adds up.

One fleet for all tests here; each leaves it running, with its books in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.fleet import Fleet
from tests.support.processes import until
from tests.support.tiny_fleet import BASE, Customer

LONG = 2000


@pytest.fixture
async def clients(
    fleet: Fleet, customers: list[Customer]
) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """One official client per tenant, without retries: they would hide what is tested."""
    made = [
        openai.AsyncOpenAI(
            base_url=f"{fleet.gateway_url}/v1", api_key=customer.api_key, max_retries=0, timeout=60
        )
        for customer in customers
    ]
    yield made
    for client in made:
        await client.close()


async def open_stream(
    client: openai.AsyncOpenAI, model: str
) -> tuple[openai.AsyncStream[ChatCompletionChunk], list[str]]:
    """A long stream that has begun, and what has come of it so far."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me everything."}],
        max_tokens=LONG,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces: list[str] = []
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            return stream, pieces
    raise AssertionError("the stream ended before its first text")


async def answers(client: openai.AsyncOpenAI, model: str) -> str:
    """A short greedy answer."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return completion.choices[0].message.content or ""


async def answers_again(client: openai.AsyncOpenAI, model: str) -> str:
    """The first answer once the fleet is back; only refusals that say "later" are borne."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await answers(client, model)
            except openai.APIConnectionError:
                pass
            except openai.InternalServerError as error:
                if error.status_code != 503:
                    raise
            await asyncio.sleep(0.1)


async def drain_until_error(stream: openai.AsyncStream[ChatCompletionChunk]) -> Exception | None:
    """Read to the end; the error that the client gets, if any."""
    try:
        async for _ in stream:
            pass
    except (openai.APIError, httpx.TransportError) as error:
        # The SDK lets httpx's own errors through once a stream has begun.
        return error
    return None


async def test_a_killed_gateway_breaks_its_streams_bills_nothing_and_the_next_request_works(
    fleet: Fleet, clients: list[openai.AsyncOpenAI], customers: list[Customer]
) -> None:
    before = await answers(clients[0], "one")
    absorbed_before = fleet.check_books()["identity"]["absorbed"]
    charges_before = fleet.charges(customers[1].id)
    streams = await asyncio.gather(open_stream(clients[0], "one"), open_stream(clients[1], "three"))

    killed = fleet.kill("gateway")
    errors = await asyncio.gather(*(drain_until_error(stream) for stream, _ in streams))

    assert None not in errors
    assert await answers_again(clients[0], "one") == before
    assert fleet.service_pid("gateway") not in {None, killed}
    report = fleet.check_books()
    # The tenants do not pay for what we broke; the engine's work is not lost from the books either.
    for stream, _ in streams:
        broken = fleet.request(stream.response.headers["x-request-id"])
        assert (broken["completion_tokens"], broken["finish_reason"]) == (0, "error")
        assert (broken["state"], broken["error_code"]) == ("settled", "gateway_lost")
    assert fleet.charges(customers[1].id) == charges_before
    assert report["identity"]["absorbed"] > absorbed_before
    await until(lambda: fleet.engine_stats()["num_running"] == 0)
    assert_nothing_held(fleet)


async def test_a_killed_engine_is_an_error_and_the_next_request_works(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    before = await answers(clients[1], "three")
    stream, _ = await open_stream(clients[1], "three")

    killed = fleet.kill("engine")
    error = await drain_until_error(stream)

    assert error is not None
    assert await answers_again(clients[1], "three") == before
    assert fleet.service_pid("engine") not in {None, killed}
    fleet.check_books()


async def test_an_engine_killed_while_it_reads_prompts_bills_nobody(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    prompt = "word " * 700  # thousands of bytes, of which each is a token
    asking = [
        asyncio.create_task(
            clients[0].chat.completions.create(
                model="one",
                messages=[{"role": "user", "content": f"{number} {prompt}"}],
                max_tokens=LONG,  # none has ended by the time it is killed
                extra_body={"ignore_eos": True},
            )
        )
        for number in range(16)
    ]
    await until(lambda: fleet.engine_stats()["num_running"] > 0)

    killed = fleet.kill("engine")
    answers = await asyncio.gather(*asking, return_exceptions=True)

    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert failed
    await answers_again(clients[0], "one")
    assert fleet.service_pid("engine") not in {None, killed}
    fleet.check_books()
    for error in failed:
        assert isinstance(error, openai.InternalServerError), error
        assert error.code in {"engine_lost", "engine_unavailable"}
        if error.code == "engine_lost":
            request = fleet.request(error.response.headers["x-request-id"])
            assert (request["state"], request["completion_tokens"]) == ("settled", 0)


async def test_postgres_killed_under_a_stream_costs_neither_the_answer_nor_its_bill(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    stream, _ = await open_stream(clients[0], "one")

    fleet.kill("postgres")

    assert await drain_until_error(stream) is None
    await answers_again(clients[0], "one")
    await until(lambda: control_answers(fleet), deadline_s=60)
    fleet.check_books()
    request = fleet.request(stream.response.headers["x-request-id"])
    assert (request["state"], request["http_status"]) == ("settled", 200)
    assert (request["finish_reason"], request["completion_tokens"]) == ("length", LONG)
    assert not list((fleet.data_dir / "spool").glob("*.rejected"))


async def test_a_killed_worker_and_control_stop_nobody(
    fleet: Fleet, clients: list[openai.AsyncOpenAI]
) -> None:
    killed = {fleet.kill("worker"), fleet.kill("control")}

    assert await answers(clients[0], BASE)

    await until(
        lambda: None not in {fleet.service_pid("worker"), fleet.service_pid("control")},
        deadline_s=60,
    )
    assert killed.isdisjoint({fleet.service_pid("worker"), fleet.service_pid("control")})
    await until(lambda: control_answers(fleet), deadline_s=60)
    fleet.check_books()


async def test_a_crowd_with_random_aborts_leaves_nothing_behind(
    fleet: Fleet, clients: list[openai.AsyncOpenAI], customers: list[Customer]
) -> None:
    chance = random.Random(0)
    before = fleet.engine_stats()

    async def one(number: int) -> None:
        side = number % len(clients)
        model = chance.choice(customers[side].models)
        is_aborted = chance.random() < 0.4
        # Some that are left would never end before it, however slow this client is beside the engine.
        max_tokens = chance.choice([1, 8, 120, LONG] if is_aborted else [1, 8, 40, 120])
        stream = await clients[side].chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "word " * chance.choice([1, 20, 200])}],
            max_tokens=max_tokens,
            temperature=chance.choice([0.0, 0.9]),
            seed=number,
            stream=True,
            extra_body={"ignore_eos": max_tokens == LONG},
        )
        async with stream:
            num_chunks = 0
            async for _ in stream:
                num_chunks += 1
                if is_aborted and num_chunks > number % 5:
                    break

    await asyncio.gather(*(one(number) for number in range(64)))

    await until(lambda: fleet.engine_stats()["num_running"] == 0, deadline_s=60)
    report = fleet.check_books()
    after = assert_nothing_held(fleet)
    assert after["requests_finished_total"]["error"] == before["requests_finished_total"]["error"]
    assert after["requests_finished_total"]["abort"] > before["requests_finished_total"]["abort"]
    assert after["mixed_steps_total"] > before["mixed_steps_total"]
    assert report["identity"]["generated"] > 0


def assert_nothing_held(fleet: Fleet) -> dict[str, object]:
    """No block, no lease, no request is left in the engine."""
    stats = fleet.engine_stats()
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]
    assert stats["adapter_leases"] == 0
    assert stats["num_running"] == stats["num_waiting"] == 0
    return stats


def control_answers(fleet: Fleet) -> bool:
    from loraplex_platform.admin_client import AdminApiError

    try:
        fleet.engine_stats()
    except (AdminApiError, TypeError, KeyError, IndexError):
        return False
    return True
