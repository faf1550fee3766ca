"""Logging in through a real provider process: what gets in, and all that does not."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from loraplex_platform.control.bootstrap import ensure_admin_user
from loraplex_platform.db import User
from loraplex_platform.settings import ControlSettings
from loraplex_platform.users.oidc import Attempt, is_secure
from pydantic import SecretStr, ValidationError
from sqlalchemy import select

from tests.platform.control.people import invite, log_in, member, user_id_of
from tests.platform.control.stand import (
    CONSOLE,
    CONTROL,
    PASSWORD,
    Stand,
    cheap_passwords,
    error_of,
    settings_for,
)
from tests.support.metering import run_sql
from tests.support.oidc_provider import CLIENT_ID, CLIENT_SECRET

ADA = {"sub": "ada-1", "email": "Ada@Example.com"}
FAULTS = (
    "issuer",
    "audience",
    "several audiences",
    "expired",
    "nonce",
    "no exp",
    "no sub",
    "no nonce",
    "unsigned",
    "signed with the client secret",
    "signed with the public key",
    "another key",
    "unknown key",
    "broken signature",
    "no token",
)


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.support.oidc_provider"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
async def oidc_stand(
    db_url: str, redis_url: str, short_tmp_path: Path, issuer: str
) -> AsyncIterator[Stand]:
    async with Stand.open(
        db_url,
        redis_url,
        short_tmp_path,
        oidc_issuer=issuer,
        oidc_client_id=CLIENT_ID,
        oidc_client_secret=CLIENT_SECRET,
        control_public_url=CONTROL,
    ) as stand:
        yield stand


class Visitor:
    """A browser and its way to the provider and back."""

    def __init__(self, stand: Stand, browser: httpx.AsyncClient | None = None) -> None:
        self.browser = browser or stand.client(None)

    async def leave(self, query: str = "") -> str:
        """To the provider; where that leads back to."""
        answer = await self.browser.get(f"/login/oidc{query}")
        assert answer.status_code == 303, answer.text
        return await self._through(answer.headers["location"])

    async def log_in(self, query: str = "") -> httpx.Response:
        return await self.browser.get(await self.leave(query))

    async def leave_to_link(self) -> str:
        answer = await self.browser.post("/login/oidc/link", headers={"origin": CONTROL})
        assert answer.status_code == 200, answer.text
        found = re.search(r'<a href="([^"]+)"', answer.text)
        assert found is not None
        return await self._through(html.unescape(found[1]))

    async def link(self) -> httpx.Response:
        return await self.browser.get(await self.leave_to_link())

    async def _through(self, url: str) -> str:
        async with httpx.AsyncClient() as client:
            back = await client.get(url)
        assert back.status_code == 302, back.text
        return str(back.headers["location"])


async def next_is(issuer: str, **who: Any) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.put(f"{issuer}/_next", json=who)).status_code == 200


async def users(stand: Stand) -> list[dict[str, Any]]:
    return list((await stand.admin.get("/admin/v1/users")).json()["data"])


async def test_a_new_person_gets_an_account_and_the_same_one_next_time(
    oidc_stand: Stand, issuer: str
) -> None:
    await next_is(issuer, **ADA)
    first = Visitor(oidc_stand)

    answer = await first.log_in()

    assert (answer.status_code, answer.headers["location"]) == (303, CONSOLE)
    session = (await first.browser.get("/admin/v1/sessions/current")).json()
    assert (session["user"]["email"], session["user"]["role"]) == ("ada@example.com", None)
    assert session["memberships"] == []
    # Another address at the provider is still the same person there, and so here.
    await next_is(issuer, sub="ada-1", email="ada@another.example")
    second = Visitor(oidc_stand)
    assert (await second.log_in()).status_code == 303
    assert [user["id"] for user in await users(oidc_stand)] == [session["user"]["id"]]
    # There is no password to guess.
    body = {"email": "ada@example.com", "password": PASSWORD}
    assert (await oidc_stand.client(None).post("/admin/v1/sessions", json=body)).status_code == 401
    # An invitation is accepted with the session.
    tenant_id = (await oidc_stand.tenant("acme"))["id"]
    token = (await invite(oidc_stand, tenant_id, "ada@example.com", "developer"))["token"]
    accepted = await first.browser.post("/admin/v1/invitations/accept", json={"token": token})
    assert accepted.status_code == 200
    assert (await second.browser.get(f"/admin/v1/tenants/{tenant_id}")).status_code == 200


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_id_token_that_proves_nothing_opens_nothing(
    oidc_stand: Stand, issuer: str, fault: str
) -> None:
    await next_is(issuer, **ADA, fault=fault)
    visitor = Visitor(oidc_stand)

    answer = await visitor.log_in()

    assert answer.status_code == 403, answer.text
    assert "did not succeed" in answer.text
    assert "loraplex_session" not in visitor.browser.cookies
    assert await users(oidc_stand) == []


async def test_an_address_that_is_not_verified_or_taken_makes_no_account(
    oidc_stand: Stand, issuer: str
) -> None:
    await next_is(issuer, **ADA, email_verified=False)
    refused = await Visitor(oidc_stand).log_in()
    assert (refused.status_code, "verified" in refused.text) == (403, True)

    await oidc_stand.login("admin", "ada@example.com")
    await next_is(issuer, **ADA)
    refused = await Visitor(oidc_stand).log_in()
    assert (refused.status_code, "already" in refused.text) == (403, True)
    assert len(await users(oidc_stand)) == 1


async def test_an_account_is_tied_by_whoever_is_logged_in_and_to_one_identity(
    oidc_stand: Stand, issuer: str
) -> None:
    admin = await oidc_stand.login("admin", "ada@example.com")
    await next_is(issuer, sub="ada-1", email="whatever@example.com")

    assert (await Visitor(oidc_stand, admin).link()).status_code == 303

    visitor = Visitor(oidc_stand)
    assert (await visitor.log_in()).status_code == 303
    session = (await visitor.browser.get("/admin/v1/sessions/current")).json()
    assert (session["user"]["email"], session["user"]["role"]) == ("ada@example.com", "admin")
    # Nobody else gets this identity, and this account no other.
    other = await oidc_stand.login("viewer", "eve@example.com")
    assert (await Visitor(oidc_stand, other).link()).status_code == 403
    await next_is(issuer, sub="eve-1")
    assert (await Visitor(oidc_stand, admin).link()).status_code == 403
    # Without a session there is nothing to tie.
    nobody = await oidc_stand.client(None).post("/login/oidc/link")
    assert (nobody.status_code, "Log in" in nobody.text) == (403, True)
    assert len(await users(oidc_stand)) == 2


async def test_linking_is_begun_by_a_form_of_ours_and_ends_in_the_same_session(
    oidc_stand: Stand, issuer: str
) -> None:
    admin = await oidc_stand.login("admin", "ada@example.com")
    await next_is(issuer, sub="eve-1", email="eve@example.com")
    form = await admin.get("/login/oidc/link")
    assert '<form method="post" action="/login/oidc/link">' in form.text
    # Not by a link that somebody is sent, nor by a form of another site.
    assert (await Visitor(oidc_stand, admin).log_in("?link")).status_code == 303
    again = await oidc_stand.login("admin", "bob@example.com")
    foreign = await again.post("/login/oidc/link", headers={"origin": "https://evil.test"})
    assert error_of(foreign, 403, "cross_origin")
    # Begun in one session, ended in another, of the same person even: nothing is tied.
    back = await Visitor(oidc_stand, again).leave_to_link()
    body = {"email": "bob@example.com", "password": PASSWORD}
    assert (await again.post("/admin/v1/sessions", json=body)).status_code == 201
    refused = await again.get(back)
    assert (refused.status_code, "no longer logged in" in refused.text) == (403, True)
    async with oidc_stand.db.sessions() as session:
        tied = (
            await session.scalars(select(User.email).where(User.oidc_subject.is_not(None)))
        ).all()
    assert tied == ["eve@example.com"]  # an account of her own


async def test_whom_the_provider_knows_takes_over_an_account_that_nobody_proved(
    oidc_stand: Stand, issuer: str
) -> None:
    tenant_id = (await oidc_stand.tenant("acme"))["id"]
    # Whoever holds the invitation chooses a password, and ties an identity of their own.
    thief = await member(oidc_stand, tenant_id, "viewer", "ada@example.com")
    await next_is(issuer, sub="thief-1", email="thief@example.com")
    assert (await Visitor(oidc_stand, thief).link()).status_code == 303

    await next_is(issuer, **ADA)
    ada = Visitor(oidc_stand)
    assert (await ada.log_in()).status_code == 303

    current = (await ada.browser.get("/admin/v1/sessions/current")).json()
    assert current["user"]["email"] == "ada@example.com"
    assert [m["tenant_id"] for m in current["memberships"]] == [tenant_id]  # she was invited
    assert (await thief.get("/admin/v1/sessions/current")).status_code == 401
    body = {"email": "ada@example.com", "password": PASSWORD}
    assert (await oidc_stand.client(None).post("/admin/v1/sessions", json=body)).status_code == 401
    await next_is(issuer, sub="thief-1", email="ada@example.com")
    assert (await Visitor(oidc_stand).log_in()).status_code == 403  # proven now: nobody else's


async def test_an_account_that_becomes_an_operators_keeps_no_login_of_whoever_made_it(
    oidc_stand: Stand, issuer: str
) -> None:
    tenant_id = (await oidc_stand.tenant("evil"))["id"]
    thief = await member(oidc_stand, tenant_id, "owner", "ops@example.com")
    keys = f"/admin/v1/tenants/{tenant_id}/keys"
    body = {"name": "k", "owner_id": await user_id_of(thief)}
    key = (await thief.post(keys, json=body)).json()
    await next_is(issuer, sub="thief-1", email="thief@example.com")
    assert (await Visitor(oidc_stand, thief).link()).status_code == 303
    back = await Visitor(oidc_stand, thief).leave()

    new = SecretStr("another password")
    await ensure_admin_user(oidc_stand.db.sessions, cheap_passwords(), "ops@example.com", new)

    assert (await thief.get("/admin/v1/sessions/current")).status_code == 401
    assert (await thief.get(back)).status_code == 303
    current = (await thief.get("/admin/v1/sessions/current")).json()
    assert (current["user"]["email"], current["user"]["role"]) == ("thief@example.com", None)
    assert (await oidc_stand.admin.get(f"/admin/v1/tenants/{tenant_id}/members")).json()[
        "data"
    ] == []
    assert (await oidc_stand.admin.get(f"{keys}/{key['id']}")).json()["status"] == "revoked"
    ops = await log_in(oidc_stand, "ops@example.com", "another password")
    assert (await ops.get("/admin/v1/sessions/current")).json()["user"]["role"] == "admin"


async def test_a_disabled_account_stays_out(oidc_stand: Stand, issuer: str) -> None:
    await next_is(issuer, **ADA)
    assert (await Visitor(oidc_stand).log_in()).status_code == 303
    await run_sql(oidc_stand.db, "update users set disabled_at = now()")

    refused = await Visitor(oidc_stand).log_in()

    assert (refused.status_code, "disabled" in refused.text) == (403, True)


async def test_an_answer_is_taken_once_by_the_browser_that_asked(
    oidc_stand: Stand, issuer: str
) -> None:
    await next_is(issuer, **ADA)
    victim, attacker = Visitor(oidc_stand), Visitor(oidc_stand)
    answers = await attacker.leave()
    # Somebody is sent the attacker's answer, to be logged in as the attacker.
    assert (await victim.browser.get(answers)).status_code == 403
    await victim.leave()
    assert (await victim.browser.get(answers)).status_code == 403
    # Its own browser takes it, once.
    assert (await attacker.browser.get(answers)).status_code == 303
    assert (await attacker.browser.get(answers)).status_code == 403
    for query in ("", "?code=x", "?error=access_denied&state=x", "?state=&code=x"):
        visitor = Visitor(oidc_stand)
        await visitor.leave()
        assert (await visitor.browser.get(f"/login/oidc/callback{query}")).status_code == 403


async def test_the_code_alone_is_worth_nothing(oidc_stand: Stand, issuer: str) -> None:
    """Whoever reads it from a log or a referrer lacks the verifier, which never left the cookie."""
    await next_is(issuer, **ADA)
    victim, thief = Visitor(oidc_stand), Visitor(oidc_stand)
    code = parse_qs(urlsplit(await victim.leave()).query)["code"][0]
    state = parse_qs(urlsplit(await thief.leave()).query)["state"][0]

    stolen = await thief.browser.get("/login/oidc/callback", params={"code": code, "state": state})

    assert stolen.status_code == 403


async def test_a_provider_that_is_down_is_said_to_be(
    db_url: str, redis_url: str, short_tmp_path: Path, issuer: str, oidc_stand: Stand
) -> None:
    await next_is(issuer, **ADA, fault="down")
    visitor = Visitor(oidc_stand)
    answer = await visitor.log_in()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "loraplex_session" not in visitor.browser.cookies
    # Passwords work all the same.
    await oidc_stand.login("admin", "other@example.com")


async def test_the_cookie_of_an_attempt_cannot_be_made_or_kept() -> None:
    key = SecretStr("k" * 40)
    attempt = Attempt.new(linking_session_id="ses_1")
    sealed = attempt.sealed(key)

    assert Attempt.opened(sealed, key) == attempt
    body, _, mac = sealed.partition(".")
    for forged in ("", ".", body, f".{mac}", f"{body}.", f"{body}x.{mac}", sealed + "x"):
        assert Attempt.opened(forged, key) is None
    assert Attempt.opened(sealed, SecretStr("x" * 40)) is None
    old = Attempt("s", "n", "v", None, attempt.started_unix_s - 601)
    assert Attempt.opened(old.sealed(key), key) is None


async def test_there_is_none_of_it_unless_it_is_configured(stand: Stand) -> None:
    for path in ("/login/oidc", "/login/oidc/callback?code=x&state=y"):
        assert (await stand.client(None).get(path)).status_code == 404
    assert "organisation" not in (await stand.client(None).get("/login")).text


async def test_the_login_page_shows_the_way(oidc_stand: Stand) -> None:
    page = (await oidc_stand.client(None).get("/login")).text

    assert f'href="{CONTROL}/login/oidc"' in page


def test_half_a_configuration_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="LORAPLEX_OIDC_CLIENT_ID is needed"):
        settings_for("postgresql://x/y", "redis://z", tmp_path, oidc_issuer="https://id.test")
    with pytest.raises(ValidationError, match="LORAPLEX_CONTROL_PUBLIC_URL is needed"):
        settings_for(
            "postgresql://x/y",
            "redis://z",
            tmp_path,
            oidc_issuer="https://id.test",
            oidc_client_id="c",
        )
    assert ControlSettings.model_fields["oidc_issuer"].default is None


def test_providers_are_reached_where_nobody_listens() -> None:
    assert is_secure("https://id.example.com")
    assert is_secure("http://127.0.0.1:5556/dex")
    for url in (
        "http://id.example.com",
        "ftp://127.0.0.1",
        "",
        "None",
        "//127.0.0.1",
        "http://127.0.0.1.evil.test",
    ):
        assert not is_secure(url)
