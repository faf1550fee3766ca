"""Tools with the official client and a real engine behind the gateway: one engine, a gateway per format.

The model is tiny and random, so it calls what it must only because the grammar leaves it nothing else.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
import redis.asyncio
from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import EngineStats
from loraplex_platform.db.session import open_database
from loraplex_platform.gateway.app import open_gateway

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, add_base, deploy, eventually, serving, settings_for
from tests.platform.gateway.test_tools import CLOCK, QUESTION, WEATHER, strict
from tests.support.engine_process import check_quiet, engine_process
from tests.support.metering import add_customer
from tests.support.postgres import PostgresServer, database_settings, serving_url
from tests.support.tiny_fleet import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORMATS = ("hermes", "llama", "mistral")
formats = pytest.mark.parametrize("kind", FORMATS)
_SCHEMAS = {"get_weather": WEATHER["function"]["parameters"], "now": {"enum": [{}]}}


@dataclass
class EngineStand:
    """A client for each format, and what the engine has counted."""

    clients: dict[str, openai.AsyncOpenAI]
    engine: EngineClient

    async def stats(self) -> EngineStats:
        return await self.engine.stats()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine_stand(
    postgres_server: PostgresServer, _redis_server_url: str
) -> AsyncIterator[EngineStand]:
    redis_url = f"{_redis_server_url}?db=3"
    async with redis.asyncio.from_url(redis_url) as client:
        await client.flushdb()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lpx-")))
        model = write_model(folder / "models")
        db_url = stack.enter_context(postgres_server.clone())
        enter = stack.enter_async_context
        address = await enter(
            engine_process(
                folder,
                model,
                redis_url,
                *("--max-model-len", "2048", "--num-blocks", "400", "--max-num-seqs", "8"),
            )
        )
        db = await enter(open_database(database_settings(serving_url(db_url))))
        customer = await add_customer(db)
        await deploy(db, await add_base(db, model), None, BASE)
        gateways, clients = [], {}
        for kind in FORMATS:
            settings = settings_for(
                db_url,
                redis_url,
                folder,
                model_dir=gateway_folder(folder / kind, model, kind),
                tool_format=kind if kind == "llama" else "auto",
                gateway_id=f"gw-{kind}",
            )
            gateway = await enter(open_gateway(settings))
            assert gateway.tokenizer.tool_format.name == kind
            gateways.append(gateway)
            url = await enter(serving(gateway))
            clients[kind] = await enter(
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1", api_key=customer.secret, max_retries=0, timeout=120
                )
            )
            await eventually(
                lambda gateway=gateway: gateway.router.num_ready == 1, "it", deadline_s=120
            )
        engine = await enter(EngineClient(address, gateway_id="tests"))
        await engine.connect(timeout_s=60)
        yield EngineStand(clients, engine)
        stats = await check_quiet(db, gateways, engine)
        assert stats.generation_tokens_total > 0


def gateway_folder(folder: Path, model: Path, kind: str) -> Path:
    """The model as this format's gateway sees it."""
    shutil.copytree(model, folder)
    if kind == "hermes":
        (folder / "chat_template.jinja").write_text(tiny_model.CHATML_WITH_TOOLS)
    if kind == "mistral":
        # Its mark is a special token; to the engine that is a number, whatever its name.
        for name in ("tokenizer.json", "chat_template.jinja"):
            text = (folder / name).read_text().replace("<file_sep>", "[TOOL_CALLS]")
            (folder / name).write_text(text)
        (folder / "chat_template.jinja").write_text(
            "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
            "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS]["
            "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
            "{% endif %}{{ c.function | tojson }} {{ c.id }}{% endfor %}]{% else %}"
            "{{ m.role }} {{ m.tool_call_id }} {{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        )
    return folder


@dataclass
class Said:
    """An answer, however it came."""

    content: str | None
    calls: list[tuple[str, str]]
    reason: str | None
    usage: Any
    message: Any = None


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Said:
    answer = await client.chat.completions.create(**body(**fields))
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    return Said(
        choice.message.content,
        [(call.function.name, call.function.arguments) for call in calls],
        choice.finish_reason,
        answer.usage.model_dump(),
        choice.message,
    )


async def ask_streaming(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Said, int]:
    """Put together as clients do; and in how many pieces arguments came."""
    said = Said(None, [], None, None)
    num_deltas = 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(**body(**fields), **options):
        said.usage = chunk.usage.model_dump() if chunk.usage else said.usage
        for choice in chunk.choices:
            said.reason = choice.finish_reason or said.reason
            if choice.delta.content is not None:
                said.content = (said.content or "") + choice.delta.content
            for delta in choice.delta.tool_calls or []:
                num_deltas += 1
                if delta.index == len(said.calls):
                    said.calls.append((delta.function.name, ""))
                name, arguments = said.calls[delta.index]
                said.calls[delta.index] = (name, arguments + (delta.function.arguments or ""))
    return said, num_deltas


def body(**fields: Any) -> dict[str, Any]:
    given = {"model": BASE, "messages": QUESTION, "max_tokens": 200, "seed": 1} | fields
    return {"tools": [WEATHER, CLOCK]} | given


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), _SCHEMAS[name])


async def both_ways(client: openai.AsyncOpenAI, **fields: Any) -> Said:
    """Ask whole and streaming; the same comes out."""
    whole = await ask(client, **fields)
    streamed, num_deltas = await ask_streaming(client, **fields)

    assert (streamed.content, streamed.calls, streamed.reason) == (
        whole.content,
        whole.calls,
        whole.reason,
    )
    assert streamed.usage["completion_tokens"] == whole.usage["completion_tokens"]
    assert streamed.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
    if any(len(arguments) > 30 for _, arguments in whole.calls):
        assert num_deltas > len(whole.calls)
    return whole


@formats
async def test_required_is_calls_and_nothing_else(engine_stand: EngineStand, kind: str) -> None:
    for seed in range(2):
        said = await both_ways(engine_stand.clients[kind], tool_choice="required", seed=seed)
        assert said.calls
        assert said.content is None
        assert said.reason in ("tool_calls", "length")
        check_calls(said.calls if said.reason == "tool_calls" else said.calls[:-1])


@formats
async def test_calls_may_be_parallel_unless_they_may_not(
    engine_stand: EngineStand, kind: str
) -> None:
    # The answer may end after each call; this model would rather not.
    endings = {str(id_): -100 for id_ in (0, 2, *tiny_model.ids_of("]"))}
    fields = {"tools": [CLOCK], "tool_choice": "required", "logit_bias": endings}

    many = await both_ways(engine_stand.clients[kind], **fields)
    one = await both_ways(
        engine_stand.clients[kind],
        **fields | {"parallel_tool_calls": False, "logit_bias": {}},
    )

    assert len(many.calls) > 2
    assert many.reason == "length"
    check_calls(many.calls[:-1])
    assert (len(one.calls), one.reason, one.content) == (1, "tool_calls", None)
    check_calls(one.calls)


@formats
async def test_a_named_function_is_the_one_called(engine_stand: EngineStand, kind: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}

    said = await both_ways(engine_stand.clients[kind], tool_choice=choice)

    assert [name for name, _ in said.calls] == ["get_weather"]
    assert (said.reason, said.content) == ("tool_calls", None)
    check_calls(said.calls)


@formats
async def test_auto_is_free_and_none_calls_nothing(engine_stand: EngineStand, kind: str) -> None:
    client = engine_stand.clients[kind]

    free = await both_ways(client, tool_choice="auto", max_tokens=60)
    none = await both_ways(client, tool_choice="none", max_tokens=60)

    assert free.reason in ("stop", "length", "tool_calls")
    assert none.calls == []
    assert none.content is not None
    assert none.usage["prompt_tokens"] < free.usage["prompt_tokens"]  # it was not shown the tools


@formats
async def test_auto_with_a_format_is_a_valid_call_or_a_valid_answer(
    engine_stand: EngineStand, kind: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tools = [strict(WEATHER), strict(CLOCK)]

    for seed in range(2):
        said = await both_ways(
            engine_stand.clients[kind], tools=tools, response_format=wanted, seed=seed
        )
        if said.content is not None:
            jsonschema.validate(json.loads(said.content), schema)
        elif said.reason == "tool_calls":
            check_calls(said.calls)


@formats
async def test_a_tool_s_result_goes_the_whole_way_round(
    engine_stand: EngineStand, kind: str
) -> None:
    client = engine_stand.clients[kind]
    messages: list[Any] = list(QUESTION)
    prompts = []
    for turn in range(2):
        said = await ask(client, messages=messages, tool_choice="required", seed=40 + turn)
        prompts.append(said.usage["prompt_tokens"])
        messages.append(said.message.model_dump(exclude_none=True))
        assert said.calls
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees"}
            for call in said.message.tool_calls
        ]

    last = await both_ways(client, messages=messages, tool_choice="none", max_tokens=20)

    assert prompts[1] > prompts[0]
    assert last.calls == []
    assert last.content is not None


async def test_choices_call_each_for_themselves(engine_stand: EngineStand) -> None:
    client = engine_stand.clients["llama"]
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "n": 3, "seed": 3}

    answer = await client.chat.completions.create(**body(**fields))

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        [call] = choice.message.tool_calls
        check_calls([(call.function.name, call.function.arguments)])
        assert choice.finish_reason == "tool_calls"
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 3


async def test_what_was_counted_is_what_was_generated(engine_stand: EngineStand) -> None:
    before = (await engine_stand.stats()).generation_tokens_total
    used = 0
    for kind in FORMATS:
        said = await ask(engine_stand.clients[kind], tool_choice="required", seed=5)
        used += said.usage["completion_tokens"]

    assert (await engine_stand.stats()).generation_tokens_total - before == used
