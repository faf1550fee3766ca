"""Nothing of the corpus gets into the data plane, and no answer repeats what was tried."""

from __future__ import annotations

import httpx
import pytest
from loraplex_platform.tenancy import keys

from tests.platform.gateway.stand import BASE, Stand
from tests.support.auth_corpus import Stranger, strangers
from tests.support.metering import PEPPER

pytestmark = pytest.mark.asyncio(loop_scope="package")

ROUTES = (
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{BASE}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
)
# Not let in: unauthorised, or not even understood as a request.
REFUSED = {400, 401, 429, 431}


async def test_nothing_but_the_key_itself_gets_in(stand: Stand) -> None:
    good = stand.customer.secret
    mac = keys.mac(PEPPER, good)
    stand.engine.received.clear()

    num_tried = 0
    for stranger in strangers(good, mac, keys.mint("ak").secret):
        for method, path in ROUTES:
            answer = await attempt(stand, stranger, method, path)
            if answer is None:
                continue  # the server hung up on what is no HTTP
            num_tried += 1
            what = (stranger.name, method, path, answer.status_code)
            assert answer.status_code in REFUSED, what
            assert good not in answer.text, what
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key", what

    assert num_tried > 200
    assert stand.generated == []
    async with stand.http() as client:
        assert (await client.get("/v1/models")).status_code == 200


async def attempt(
    stand: Stand, stranger: Stranger, method: str, path: str
) -> httpx.Response | None:
    body = {"model": BASE, "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    url = f"{path}?{stranger.query}" if stranger.query else path
    async with stand.http("") as client:
        try:
            return await client.request(
                method,
                url,
                headers=stranger.headers,  # type: ignore[arg-type]  # texts and bytes, mixed
                json=body if method == "POST" else None,
            )
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.LocalProtocolError):
            return None
