"""What tenants say and the keys they say it with are in no log, no table, no cache and no metric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import LogCapture

from tests.platform.gateway.stand import BASE, Stand, says
from tests.support.everything_stored import database_texts, redis_texts
from tests.support.metering import PEPPER

pytestmark = pytest.mark.asyncio(loop_scope="package")

CANARY = "canary7f3a9b"


@pytest.fixture
def captured_logs() -> Iterator[LogCapture]:
    before = structlog.get_config()
    capture = LogCapture()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, capture])
    yield capture
    structlog.configure(**before)


async def test_nothing_of_a_conversation_or_a_key_is_kept(
    db_url: str,
    _redis_server_url: str,  # noqa: PT019 (its value is used)
    short_tmp_path: Path,
    captured_logs: LogCapture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    redis_url = f"{_redis_server_url}?db=1"
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        good = stand.customer.secret
        stand.engine.script = says(CANARY)
        client = stand.http()
        said = [{"role": "user", "content": f"remember {CANARY}"}]
        chat = {"model": BASE, "messages": said, "max_tokens": 32}
        for body in (chat, chat | {"stream": True}, chat | {"user": CANARY, "n": 2}):
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            # It was said, so there is something to find; a stream says it in pieces.
            assert CANARY in answer.text or "stream" in body
        for path, body in (
            ("/v1/chat/completions", chat | {"model": CANARY}),
            ("/v1/chat/completions", chat | {CANARY: CANARY}),
            ("/v1/chat/completions", chat | {"stop": [CANARY], "temperature": 99}),
            ("/v1/completions", {"model": BASE, "prompt": CANARY, "max_tokens": 0}),
            (f"/v1/{CANARY}", {}),
        ):
            assert (await client.post(path, json=body)).status_code >= 400
        await client.get(f"/v1/models/{CANARY}")
        await client.get(f"/v1/models?key={CANARY}", headers={"x-request-id": CANARY})
        await stand.http(CANARY).get("/v1/models")
        await stand.http(good[:-6] + "000000").get("/v1/models")
        await stand.settled()
        await stand.gateway.key_uses.flush(stand.db.sessions)
        measured = (await stand.http("").get("/metrics")).text

    logged = json.dumps(captured_logs.entries, default=str) + caplog.text
    places = {
        "log": logged,
        "database": "\n".join(database_texts(db_url)),
        "Redis": "\n".join(redis_texts(redis_url)),
        "metrics": measured,
    }
    assert "request" in places["log"]
    assert "chat.completions" in places["database"]
    assert "loraplex:" in places["metrics"]
    for name, text in places.items():
        for secret in (CANARY, good, good.split("_")[3], PEPPER.get_secret_value()):
            assert secret not in text, name
