"""Users, sessions, throttling and the login form."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from pathlib import Path

import pytest
from loraplex_platform.control.permissions import ACTIONS
from loraplex_platform.db import AuditLog, User
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.users import throttle
from loraplex_platform.users.visitor import parse_networks, visitor_address
from sqlalchemy import select

from tests.platform.control.people import user_id_of
from tests.platform.control.stand import CONSOLE, CONTROL, PASSWORD, Stand, error_of
from tests.support.metering import run_sql

FORM = {"email": "admin@example.com", "password": PASSWORD}


async def test_a_user_is_made_once_and_never_shows_a_hash(stand: Stand) -> None:
    body = {"email": "Ada@Example.com", "password": PASSWORD, "role": "viewer"}

    made = await stand.admin.post("/admin/v1/users", json=body)

    assert made.status_code == 201
    assert made.json()["email"] == "ada@example.com"
    assert "password" not in made.text
    again = await stand.admin.post("/admin/v1/users", json=body | {"email": "ada@example.com"})
    assert error_of(again, 409, "conflict")["param"] == "email"
    assert (await stand.admin.get("/admin/v1/users")).json()["data"] == [made.json()]
    for change, param in (
        ({"email": "ada"}, "email"),
        ({"email": "a b@c.de"}, "email"),
        ({"email": "a\u0000@c.de"}, "email"),
        ({"password": "short"}, "password"),
        ({"password": "x" * 257}, "password"),
        ({"role": "owner"}, "role"),
    ):
        refused = await stand.admin.post("/admin/v1/users", json=body | change)
        assert error_of(refused, 400, "invalid_request")["param"] == param
        assert "password" not in change or change["password"] not in refused.text


async def test_a_session_is_a_cookie_that_no_script_can_read(stand: Stand) -> None:
    client = await stand.login("admin")

    current = await client.get("/admin/v1/sessions/current")

    assert current.status_code == 200
    assert set(current.json()) == {"object", "user", "memberships", "actions", "expires_at"}
    assert current.json()["user"]["role"] == "admin"
    assert set(current.json()["actions"]) == set(ACTIONS)
    again = await client.post("/admin/v1/sessions", json=FORM)
    cookie = again.headers["set-cookie"]
    assert re.search(r"^loraplex_session=[\w-]{43};", cookie)
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert (await client.post("/admin/v1/tenants", json={"slug": "acme"})).status_code == 201


async def test_the_admin_key_has_no_session(stand: Stand) -> None:
    error_of(await stand.admin.get("/admin/v1/sessions/current"), 404, "not_found")
    error_of(await stand.admin.delete("/admin/v1/sessions/current"), 404, "not_found")


@pytest.mark.parametrize(
    "ending",
    [
        "update sessions set expires_at = now() - interval '1 second'",
        "update sessions set revoked_at = now()",
        "update users set disabled_at = now()",
    ],
)
async def test_a_session_that_is_over_is_over_at_the_next_request(
    stand: Stand, ending: str
) -> None:
    client = await stand.login("admin")

    await run_sql(stand.db, ending)

    error_of(await client.get("/admin/v1/tenants"), 401, "not_authenticated")


async def test_logging_out_ends_the_session_for_every_copy_of_the_cookie(stand: Stand) -> None:
    client = await stand.login("viewer")
    thief = stand.client(None, cookies=dict(client.cookies))

    assert (await client.delete("/admin/v1/sessions/current")).status_code == 204

    assert (await thief.get("/admin/v1/tenants")).status_code == 401


async def test_wrong_and_unknown_get_the_same_answer(stand: Stand) -> None:
    await stand.login("admin")
    client = stand.client(None)

    wrong = await client.post("/admin/v1/sessions", json=FORM | {"password": "not this one"})
    unknown = await client.post("/admin/v1/sessions", json=FORM | {"email": "who@example.com"})
    await run_sql(stand.db, "update users set disabled_at = now()")
    disabled = await client.post("/admin/v1/sessions", json=FORM)

    errors = [error_of(answer, 401, "bad_credentials") for answer in (wrong, unknown, disabled)]
    assert errors[0] == errors[1] == errors[2]


async def test_failed_logins_are_throttled_per_email_from_one_address(stand: Stand) -> None:
    await stand.login("admin")
    wrong = FORM | {"password": "not this one"}
    client = stand.client(None, address="192.0.2.1")

    for _ in range(throttle.MAX_PER_EMAIL):
        error_of(await client.post("/admin/v1/sessions", json=wrong), 401, "bad_credentials")

    refused = await client.post("/admin/v1/sessions", json=FORM)  # even the right password
    error_of(refused, 429, "too_many_attempts")
    assert 0 < int(refused.headers["retry-after"]) <= 15 * 60
    # Its owner, elsewhere, is not locked out by a stranger's guesses.
    elsewhere = stand.client(None, address="192.0.2.2")
    assert (await elsewhere.post("/admin/v1/sessions", json=FORM)).status_code == 201
    window = throttle.WINDOW + timedelta(seconds=1)
    await run_sql(stand.db, "update login_throttle set window_start = now() - :w", w=window)
    assert (await client.post("/admin/v1/sessions", json=FORM)).status_code == 201


async def test_visitors_of_the_console_are_told_apart_and_nobody_else_may_name_one(
    db_url: str, redis_url: str, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "MAX_PER_ADDRESS", 3)
    wrong = FORM | {"password": "not this one"}
    async with Stand.open(
        db_url, redis_url, short_tmp_path, control_trusted_proxies="10.203.7.0/24"
    ) as stand:
        await stand.login("admin")

        async def try_login(peer: str, visitor: str, form: dict[str, str]) -> int:
            client = stand.client(None, address=peer, headers={"x-forwarded-for": visitor})
            return (await client.post("/admin/v1/sessions", json=form)).status_code

        at_console = [await try_login("10.203.7.5", "192.0.2.1", wrong) for _ in range(4)]
        assert at_console == [401, 401, 401, 429]
        assert await try_login("10.203.7.5", "192.0.2.2", FORM) == 201
        # What the visitor claims stands before what the console has seen, and counts for nothing.
        assert await try_login("10.203.7.5", "192.0.2.9, 192.0.2.1", FORM) == 429
        direct = [await try_login("198.51.100.1", f"192.0.2.{n}", wrong) for n in range(10, 14)]
        assert direct == [401, 401, 401, 429]


@pytest.mark.parametrize(
    ("peer", "forwarded", "visitor"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["192.0.2.2"], "192.0.2.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["192.0.2.2"], "192.0.2.2"),
        ("10.0.0.1", ["192.0.2.3, 192.0.2.2"], "192.0.2.2"),
        ("10.0.0.1", ["192.0.2.3", "192.0.2.2,10.0.0.2"], "192.0.2.2"),
        ("10.0.0.1", ["192.0.2.2, junk"], "10.0.0.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("fd00::1", ["2001:db8::2"], "2001:db8::2"),
        ("unix", ["192.0.2.2"], "unix"),
    ],
)
def test_a_visitor_is_who_our_own_proxies_vouch_for(
    peer: str, forwarded: list[str], visitor: str
) -> None:
    trusted = parse_networks("10.0.0.0/8, fd00::/8")

    assert visitor_address(peer, forwarded, trusted) == visitor


async def test_failed_logins_are_throttled_per_address_whatever_the_email(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "MAX_PER_ADDRESS", 5)
    await stand.login("admin")
    # One IPv6 customer, many addresses.
    clients = [stand.client(None, address=f"2001:db8:1:2::{n}") for n in range(6)]

    for n, client in enumerate(clients[:5]):
        body = {"email": f"u{n}@example.com", "password": "guess guess"}
        error_of(await client.post("/admin/v1/sessions", json=body), 401, "bad_credentials")

    error_of(await clients[5].post("/admin/v1/sessions", json=FORM), 429, "too_many_attempts")
    elsewhere = stand.client(None, address="2001:db8:1:3::1")
    assert (await elsewhere.post("/admin/v1/sessions", json=FORM)).status_code == 201


async def test_a_right_login_forgives_the_email(stand: Stand) -> None:
    client = await stand.login("admin")
    wrong = FORM | {"password": "not this one"}

    for _ in range(2):
        for _ in range(throttle.MAX_PER_EMAIL - 1):
            assert (await client.post("/admin/v1/sessions", json=wrong)).status_code == 401
        assert (await client.post("/admin/v1/sessions", json=FORM)).status_code == 201


async def test_the_form_logs_in_and_leads_to_the_console(stand: Stand) -> None:
    await stand.login("admin")
    browser = stand.client(None, headers={"origin": CONTROL})

    page = await browser.get("/login")
    assert page.status_code == 200
    assert '<form method="post" action="/login">' in page.text
    assert not re.search(r"(src|href)=\"(?!data:)", page.text)  # nothing from outside
    assert "script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert CONSOLE in page.headers["content-security-policy"]
    wrong = await browser.post("/login", data=FORM | {"password": "<script>"})
    assert wrong.status_code == 401
    assert "E-mail or password is wrong" in wrong.text
    assert "<script>" not in wrong.text
    answer = await browser.post("/login", data=FORM)
    assert answer.status_code == 303
    assert answer.headers["location"] == CONSOLE
    assert "HttpOnly" in answer.headers["set-cookie"]

    assert (await browser.get("/admin/v1/sessions/current")).status_code == 200
    assert (await browser.get("/login")).headers["location"] == CONSOLE
    out = await browser.post("/logout")
    assert out.headers["location"].startswith("/login")
    assert (await browser.get("/admin/v1/sessions/current")).status_code == 401


async def test_a_malformed_form_is_a_page_not_a_crash(stand: Stand) -> None:
    client = stand.client(None, headers={"content-type": "application/x-www-form-urlencoded"})

    for body in (b"", b"email=a@b.c", b"email=%00&password=x", b"\xff\xfe=%zz", b"x" * 9000):
        answer = await client.post("/login", content=body)
        assert answer.status_code in (400, 413)
        assert answer.headers["content-type"].startswith("text/html")


async def test_what_was_typed_is_escaped(stand: Stand) -> None:
    email = '"><script>alert(1)</script>@x'
    answer = await stand.client(None).post("/login", data={"email": email, "password": "x"})

    assert answer.status_code == 401
    assert "<script>" not in answer.text


async def test_cookie_borne_writes_come_from_our_own_pages(stand: Stand) -> None:
    client = await stand.login("admin")
    ours: list[dict[str, str]] = [
        {},  # a program
        {"origin": CONTROL},
        {"origin": CONSOLE},
        {"sec-fetch-site": "same-site"},
    ]
    foreign = [
        {"origin": "https://evil.test"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://console.test:1"},
        {"sec-fetch-site": "cross-site"},
    ]

    for n, headers in enumerate(ours):
        answer = await client.post("/admin/v1/tenants", json={"slug": f"a{n}"}, headers=headers)
        assert answer.status_code == 201, headers
    for n, headers in enumerate(foreign):
        body = {"slug": f"b{n}"}
        refused = await client.post("/admin/v1/tenants", json=body, headers=headers)
        error_of(refused, 403, "cross_origin")
        assert (await client.post("/login", data=FORM, headers=headers)).status_code == 403
        # The admin key is not sent by browsers on their own.
        keyed = await stand.admin.post("/admin/v1/tenants", json=body, headers=headers)
        assert keyed.status_code == 201


async def test_an_operator_ends_logins_and_the_audit_log_says_so(stand: Stand) -> None:
    boss = await stand.login("admin", "boss@example.com")
    ada = await stand.login("viewer", "ada@example.com")
    path = f"/admin/v1/users/{await user_id_of(ada)}"
    current = "/admin/v1/sessions/current"
    await run_sql(
        stand.db, "update users set oidc_issuer = 'i', oidc_subject = 's' where email ~ 'ada'"
    )

    for method, what in (("POST", "disable"), ("DELETE", "role"), ("POST", "logout")):
        error_of(await ada.request(method, f"{path}/{what}"), 403, "permission_denied")
    short = await boss.post(f"{path}/password", json={"password": "short"})
    assert error_of(short, 400, "invalid_request")["param"] == "password"
    assert (await boss.post(f"{path}/password", json={"password": "a new password"})).is_success
    assert (await ada.get(current)).status_code == 401
    async with stand.db.sessions() as session:
        tied = await session.scalars(select(User.email).where(User.oidc_subject.is_not(None)))
        assert tied.all() == []
    for password, status in ((PASSWORD, 401), ("a new password", 201)):
        body = {"email": "ada@example.com", "password": password}
        assert (await ada.post("/admin/v1/sessions", json=body)).status_code == status
    disabled = await boss.post(f"{path}/disable")
    assert disabled.json()["disabled_at"] is not None
    assert (await boss.post(f"{path}/disable")).json() == disabled.json()  # once is enough
    assert (await ada.get(current)).status_code == 401
    assert (await boss.post(f"{path}/enable")).json()["disabled_at"] is None
    assert (await ada.get(current)).status_code == 401  # sessions do not come back
    assert (await boss.delete(f"{path}/role")).json()["role"] is None
    async with stand.db.sessions() as session:
        actions = await session.scalars(
            select(AuditLog.action)
            .where(AuditLog.object_id == path.rsplit("/", 1)[1], AuditLog.actor_kind == "user")
            .order_by(AuditLog.id)
        )
        found = actions.all()
    assert found == [
        "user.reset_password",
        "user.disable",
        "user.enable",
        "user.remove_role",
    ]
    for user_id in (format_id("user", uuid7()), "usr_x", "x"):
        error_of(await boss.post(f"/admin/v1/users/{user_id}/logout"), 404, "not_found")


async def test_of_two_admins_who_go_at_once_one_stays(stand: Stand) -> None:
    ids = [
        await user_id_of(await stand.login("admin", f"{name}@example.com")) for name in ("a", "b")
    ]

    answers = await asyncio.gather(
        stand.admin.delete(f"/admin/v1/users/{ids[0]}/role"),
        stand.admin.post(f"/admin/v1/users/{ids[1]}/disable"),
    )

    assert sorted(answer.status_code for answer in answers) == [200, 409]
