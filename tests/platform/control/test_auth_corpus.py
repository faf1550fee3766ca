"""Nothing of the corpus gets into the control API, on any of its routes."""

from __future__ import annotations

from loraplex_platform.tenancy import keys

from tests.platform.control.stand import ADMIN_KEY, Stand
from tests.platform.control.test_access import PUBLIC, filled, operations
from tests.support.auth_corpus import strangers
from tests.support.metering import PEPPER


async def test_nothing_but_the_admin_key_or_a_session_gets_in(stand: Stand, db_url: str) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    made = await stand.admin.post(f"/admin/v1/tenants/{tenant_id}/keys", json={"name": "k"})
    user = await stand.login("admin")
    session = user.cookies["loraplex_session"]
    mac = keys.mac(PEPPER, ADMIN_KEY)
    attempts = list(strangers(ADMIN_KEY, mac, made.json()["secret"]))
    client = stand.client(None)

    reads = [place for place in operations(stand) if place not in PUBLIC and place[0] == "GET"]
    for number, stranger in enumerate(attempts):
        # Every attempt on some route, every route by some attempt: the check is the same for all.
        for method, path in (reads[number % len(reads)], ("GET", "/admin/v1/tenants")):
            url = filled(path, tenant_id=tenant_id)
            answer = await client.request(
                method,
                f"{url}?{stranger.query}" if stranger.query else url,
                headers=stranger.headers,  # type: ignore[arg-type]  # texts and bytes, mixed
            )
            assert answer.status_code == 401, (stranger.name, method, path, answer.text)
            assert ADMIN_KEY not in answer.text
    for cookie in (session[:-1], session + "x", session.swapcase(), "", "null", _stored(db_url)):
        thief = stand.client(None, cookies={"loraplex_session": cookie})
        assert (await thief.get("/admin/v1/tenants")).status_code == 401
    # A bad header is refused even beside a good cookie: falling through would hide mistakes.
    thief = stand.client("x", cookies={"loraplex_session": session})
    assert (await thief.get("/admin/v1/tenants")).status_code == 401
    assert (await user.get("/admin/v1/tenants")).status_code == 200


def _stored(db_url: str) -> str:
    """What a leaked table would show of the session."""
    import psycopg

    with psycopg.connect(db_url) as connection:
        row = connection.execute("select encode(token_mac, 'hex') from sessions").fetchone()
    assert row is not None
    return str(row[0])
