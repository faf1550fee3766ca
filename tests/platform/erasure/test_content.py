"""What is said is stored nowhere, unless its tenant has asked for answers to be kept; then only sealed."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from loraplex_platform.db import Tenant
from sqlalchemy import update

from tests.platform.erasure.test_erasure import dump
from tests.platform.gateway.stand import BASE, Stand
from tests.support.fake_engine import Script

# Nobody says this by accident.
CANARY = "xylophone quagmire 7713"


@pytest.mark.parametrize("keeps_answers", [False, True])
async def test_no_table_and_no_key_of_redis_has_a_word_of_it(
    db_url: str, redis_url: str, short_tmp_path: Path, keeps_answers: bool
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        async with stand.db.transaction() as session:
            await session.execute(
                update(Tenant)
                .where(Tenant.id == stand.customer.tenant_id)
                .values(replays_answers=keeps_answers)
            )
        said = (await stand.client.completions.create(model=BASE, prompt=CANARY, max_tokens=1)).id
        assert said
        stand.engine.script = Script(token_ids=[ord(c) for c in CANARY])
        for key in ("k1", "k2"):
            async with stand.http() as http:
                answer = await http.post(
                    "/v1/chat/completions",
                    json={
                        "model": BASE,
                        "messages": [{"role": "user", "content": CANARY}],
                        "user": CANARY,
                    },
                    headers={"idempotency-key": key},
                )
            assert answer.status_code == 200, answer.text
        await stand.settled()
        spoken = answer.json()["choices"][0]["message"]["content"]
        assert len(spoken) > 5, "there is an answer to look for"

        text = dump(db_url)

        with psycopg.connect(db_url) as connection:
            stored = connection.execute(
                "select count(*), count(sealed_answer) from idempotent_requests"
            ).fetchone()
        assert stored == (2, 2 if keeps_answers else 0)
        for word in (CANARY, *CANARY.split()[:2], spoken):
            assert word not in text, word
            # Bytes are shown in hex.
            assert word.encode().hex() not in text, word
        import redis

        with redis.Redis.from_url(redis_url) as connection_:
            keys = connection_.keys("*")
            values = [connection_.dump(key) or b"" for key in keys]  # type: ignore[union-attr]
        for value in (*keys, *values):  # type: ignore[misc]
            assert CANARY.split(maxsplit=1)[0].encode() not in value
