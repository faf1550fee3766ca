"""Random and hostile requests to a gateway with a real engine process behind it, its model tiny and random.

Whatever is sent: an answer comes, it is none of ours to apologise for (no 5xx but the documented 503s), it
never repeats what was sent, the engine is the same process as before, and when all is quiet nothing is
held: no block, no adapter lease, no reservation, and the books balance to the token.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.client import EngineClient
from loraplex_platform.db.session import open_database
from loraplex_platform.gateway.app import open_gateway

from tests.fuzz.hostile_requests import CANARY, HostileRequest, Target, make_request
from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import (
    BASE,
    add_base,
    deploy,
    eventually,
    serving,
    settings_for,
)
from tests.support.adapter_files import make_adapter
from tests.support.engine_process import check_quiet, engine_process
from tests.support.metering import add_customer
from tests.support.postgres import database_settings, serving_url
from tests.support.tiny_fleet import write_model

_CONTEXT_LENGTH = 256
_NUM_AT_ONCE = 12
_NUM_SLOW = int(os.environ.get("LORAPLEX_FUZZ_REQUESTS", "20000"))
_MANY_WRONG = 5  # then the rest is not worth waiting for
_ANSWER_DEADLINE_S = 120.0
# Documented in docs/api.md with Retry-After.
_RETRY_CODES = {"overloaded", "draining", "adapter_unavailable", "engine_unavailable"}
_REFUSALS = {400, 401, 404, 405, 408, 413, 431}


@dataclass
class _Tally:
    """What came of the requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    "count",
    [300, pytest.param(_NUM_SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
async def test_nothing_that_is_sent_breaks_anything(
    db_url: str, redis_url: str, short_tmp_path: Path, count: int
) -> None:
    model = write_model(short_tmp_path / "models")
    # A template that writes tools, calls and their arguments: what it is given must not break it.
    (model / "chat_template.jinja").write_text(tiny_model.CHATML_WITH_TOOLS)
    digest = _store_adapter(short_tmp_path, model)
    settings = settings_for(db_url, redis_url, short_tmp_path, model_dir=model)
    async with (
        engine_process(
            short_tmp_path,
            model,
            redis_url,
            *("--store-url", f"file://{short_tmp_path}/store"),
            *("--max-model-len", str(_CONTEXT_LENGTH)),
            # Short of blocks and queue places, so that both run out.
            *("--num-blocks", "40", "--block-size", "16", "--max-loras", "2"),
            *("--max-num-seqs", "8", "--max-waiting", "8", "--max-num-batched-tokens", "64"),
        ) as address,
        open_database(database_settings(serving_url(db_url))) as db,
        open_gateway(settings) as gateway,
        serving(gateway) as url,
        EngineClient(address, gateway_id="fuzz") as engine,
    ):
        customer = await add_customer(db)
        base_id = await add_base(db, model)
        await deploy(db, base_id, None, BASE)
        await deploy(db, base_id, customer.tenant_id, "tuned", digest=digest)
        await deploy(db, base_id, customer.tenant_id, "gone", digest="sha256:" + "b" * 64)
        await eventually(lambda: gateway.router.num_ready == 1, "the replica", deadline_s=120)
        before = await engine.connect(timeout_s=60)
        tokenizer = gateway.tokenizer
        target = Target(
            [BASE, BASE, BASE, "tuned", "tuned", "gone"], tokenizer.vocab_size, _CONTEXT_LENGTH
        )
        tally = _Tally()

        await _send_all(url, customer.secret, target, count, tally)

        shown = ", ".join(f"{name}: {number}" for name, number in sorted(tally.statuses.items()))
        print(f"fuzz | {count} requests | {shown}")
        print(f"fuzz | codes | {dict(tally.codes.most_common())}")
        assert tally.wrong == []
        assert tally.statuses["sent again"] <= max(2, count / 500)
        assert tally.statuses["200"] > count / 10, "too few requests got through to the engine"
        assert tally.statuses["400"] > count / 10
        stats = await check_quiet(db, [gateway], engine)
        assert stats.generation_tokens_total > 0
        assert stats.max_adapters_in_step >= 1
        after = await engine.connect()
        assert after.incarnation == before.incarnation


# ---------------------------------------------------------------------------- sending


async def _send_all(url: str, key: str, target: Target, count: int, tally: _Tally) -> None:
    draw = random.Random(20_240_229)
    requests = (make_request(draw, target) for _ in range(count))
    headers = {"authorization": f"Bearer {key}"}

    async def work(client: httpx.AsyncClient) -> None:
        for request in requests:  # one generator: each request is taken once
            if len(tally.wrong) >= _MANY_WRONG:
                return
            await _send(client, request, tally)

    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_ANSWER_DEADLINE_S
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(_NUM_AT_ONCE)))


async def _send(
    client: httpx.AsyncClient, request: HostileRequest, tally: _Tally, *, is_second: bool = False
) -> None:
    headers = {name.encode(): value.encode("latin-1") for name, value in request.headers.items()}
    sending = client.request(request.method, request.path, content=request.body, headers=headers)
    try:
        if request.leaves_after_s is None:
            answer = await sending
        else:
            async with asyncio.timeout(request.leaves_after_s):
                answer = await sending
    except TimeoutError:
        tally.statuses["left"] += 1
        return
    except httpx.TimeoutException:
        tally.wrong.append(f"no answer in {_ANSWER_DEADLINE_S:g} s: {_described(request)}")
        return
    except httpx.LocalProtocolError:
        tally.statuses["unsendable"] += 1  # our client refuses to say it
        return
    except (httpx.ReadError, httpx.RemoteProtocolError) as error:
        # An idle connection may be closed just as we take it: then a fresh one works.
        if is_second:
            tally.wrong.append(f"{type(error).__name__}: {_described(request)}")
            return
        tally.statuses["sent again"] += 1
        await _send(client, request, tally, is_second=True)
        return
    except httpx.TransportError as error:
        tally.wrong.append(f"{type(error).__name__}: {_described(request)}")
        return
    tally.statuses[str(answer.status_code)] += 1
    problem = _problem(answer, tally)
    if problem is not None:
        tally.wrong.append(
            f"{problem}: {answer.status_code} {answer.text[:300]} {_described(request)}"
        )


def _described(request: HostileRequest) -> str:
    return f"{request.method} {request.path} {request.body[:1500]!r}"


def _problem(answer: httpx.Response, tally: _Tally) -> str | None:
    """What is wrong with an answer."""
    status = answer.status_code
    if status == 200:
        return _problem_of_success(answer, tally)
    error = _error_of(answer.content)
    if error is None:
        return "no error envelope"
    tally.codes[f"{status} {error['code']}"] += 1
    if status == 503:
        if error["code"] not in _RETRY_CODES or "retry-after" not in answer.headers:
            return "a 503 that is not documented"
    elif status not in _REFUSALS:
        return "a status that is not documented for this"
    if error["code"] == "grammar_unchecked":
        return "a check of ours that crashed"
    if len(error["message"]) > 1_000:
        return "an answer as long as what was sent"
    return _problem_of_words(error)


def _problem_of_words(error: dict[str, Any]) -> str | None:
    """Only messages about a grammar may quote it, and an unknown model is called by its name."""
    may_quote = error["code"].startswith("grammar_") or error["code"] == "model_not_found"
    return "repeats what was sent" if CANARY in json.dumps(error) and not may_quote else None


def _problem_of_success(answer: httpx.Response, tally: _Tally) -> str | None:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return None if _parsed(answer.content) is not None else "no JSON"
    frames = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    if not frames:
        return "a stream without frames"
    if frames[-1] == "[DONE]":
        documents = [_parsed(frame.encode()) for frame in frames[:-1]]
        if any(document is None or "error" in document for document in documents):
            return "a frame that is no chunk"
        reasons: Counter[int] = Counter()
        for document in documents:
            for choice in (document or {})["choices"]:
                reasons[choice["index"]] += choice["finish_reason"] is not None
        return None if set(reasons.values()) == {1} else "a choice that did not end once"
    error = _error_of(frames[-1].encode())
    if error is None:
        return "a stream that ends in neither [DONE] nor an error"
    tally.codes[f"stream {error['code']}"] += 1
    if error["code"] in _RETRY_CODES or error["type"] == "invalid_request_error":
        return _problem_of_words(error)
    return "a stream that failed for a reason of ours"


def _error_of(body: bytes) -> dict[str, Any] | None:
    document = _parsed(body)
    error = document.get("error") if document is not None else None
    is_envelope = isinstance(error, dict) and isinstance(error.get("message"), str)
    return error if is_envelope and error["message"] else None


def _parsed(body: bytes) -> dict[str, Any] | None:
    """A JSON object without NaN or infinities."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        document = json.loads(body, parse_constant=refuse)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


# ---------------------------------------------------------------------------- what it runs on


def _store_adapter(folder: Path, model: Path) -> str:
    shape = ModelShape.from_config_json(model / "config.json")
    adapter = make_adapter(
        folder / "adapter", shape, rank=4, linears=("q_proj", "v_proj"), size=0.3
    )
    AdapterStore(f"file://{folder}/store").put(folder / "adapter", adapter.digest)
    return str(adapter.digest)
