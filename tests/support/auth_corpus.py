"""Requests that must not get in: what has opened other gateways, and what people try by hand.

`strangers(...)` makes them from a credential that is good, so that each is as near to it as can be: an
API that lets one of them in has been fooled, not asked nicely.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from loraplex_platform.tenancy import keys

Header = tuple[str, str | bytes]


@dataclass(frozen=True, slots=True)
class Stranger:
    """One attempt: headers, and whether the credential is put into the query as well."""

    name: str
    headers: list[Header] = field(default_factory=list)
    query: str = ""


def strangers(good: str, stored_mac: bytes, other_kind: str) -> Iterator[Stranger]:
    """Attempts on an API that lets `good` in as a bearer token.

    Args:
        good: a live key.
        stored_mac: what the database holds for it (or would).
        other_kind: a live key of the other API.
    """
    yield Stranger("no header")
    for name, value in _values(good, stored_mac, other_kind):
        yield Stranger(name, [("authorization", value)])
    yield Stranger("twice", [("authorization", f"Bearer {good}")] * 2)
    both: list[Header] = [("authorization", "Bearer x"), ("authorization", f"Bearer {good}")]
    yield Stranger("bad, then good", both)
    yield Stranger("good, then bad", both[::-1])
    for header in (
        "x-api-key",
        "api-key",
        "proxy-authorization",
        "x-authorization",
        "x-forwarded-authorization",
        "x-original-authorization",
        "authentication",
    ):
        yield Stranger(header, [(header, f"Bearer {good}"), (header, good)])
    for cookie in ("authorization", "api_key", "loraplex_session", "session", "token"):
        yield Stranger(f"cookie {cookie}", [("cookie", f"{cookie}={good}")])
    for name in ("api_key", "key", "access_token", "authorization"):
        yield Stranger(f"query {name}", query=f"{name}={good}")
    # Whoever believes these trusts anybody.
    for header, value in (
        ("x-forwarded-user", "admin"),
        ("x-remote-user", "admin"),
        ("remote-user", "admin"),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-real-ip", "127.0.0.1"),
        ("forwarded", "for=127.0.0.1;host=localhost"),
        ("x-original-url", "/live"),
        ("x-rewrite-url", "/live"),
        ("x-http-method-override", "OPTIONS"),
    ):
        yield Stranger(header, [(header, value)])
    for host in (
        "localhost",
        "127.0.0.1",
        "/live",
        "a/live?x=",
        "evil.test:99999",
        "[::1]",
        "x" * 200,
    ):
        yield Stranger(f"host {host[:20]}", [("host", host)])


def _values(good: str, stored_mac: bytes, other_kind: str) -> Iterator[tuple[str, str | bytes]]:
    public_id = keys.parse(good).public_id
    kind = keys.parse(good).kind
    yield "empty", ""
    yield "scheme only", "Bearer"
    yield "scheme and space", "Bearer "
    yield "no scheme", good
    yield "another scheme", f"Token {good}"
    yield "basic", "Basic " + base64.b64encode(f"{good}:".encode()).decode()
    yield "basic, as password", "Basic " + base64.b64encode(f"admin:{good}".encode()).decode()
    yield "two tokens", f"Bearer {good} {good}"
    yield "list", f"Bearer x, Bearer {good}"
    yield "quoted", f'Bearer "{good}"'
    yield "other kind", f"Bearer {other_kind}"
    yield "null", "Bearer null"
    yield "undefined", "Bearer undefined"
    for sql in (
        "' or '1'='1",
        "' or 1=1 --",
        "'; drop table api_keys; --",
        "\\' or 1=1#",
        "%",
        "_",
        "*",
    ):
        yield f"sql {sql}", f"Bearer {sql}"
        yield f"sql in id {sql}", f"Bearer lpx_{kind}_{sql}_{'x' * 40}_000000"
    yield "stored hash, hex", f"Bearer {stored_mac.hex()}"
    yield "stored hash, base64", "Bearer " + base64.b64encode(stored_mac).decode()
    yield "stored hash as the secret", "Bearer " + _key(kind, public_id, stored_mac.hex()[:40])
    yield "another secret of the id", "Bearer " + _key(kind, public_id, "x" * 40)
    yield "hash of the key", "Bearer " + hashlib.sha256(good.encode()).hexdigest()
    yield "public id only", f"Bearer {public_id}"
    yield "lower case", f"Bearer {good.lower()}"
    yield "swapped case", f"Bearer {good.swapcase()}"
    yield "one more", f"Bearer {good}x"
    yield "one fewer", f"Bearer {good[:-1]}"
    yield "padded inside", f"Bearer {good[:20]} {good[20:]}"
    yield "no checksum", f"Bearer {good.rpartition('_')[0]}"
    yield (
        "the other prefix",
        "Bearer " + good.replace(f"_{kind}_", "_ak_" if kind == "sk" else "_sk_"),
    )
    yield "NUL", f"Bearer {good}\0".encode()
    yield "NUL inside", f"Bearer {good[:9]}\0{good[9:]}".encode()
    yield "not UTF-8", f"Bearer {good}".encode() + b"\xff\xfe"
    yield "full width", f"Bearer {good.replace('l', chr(0xFF4C), 1)}".encode()
    yield "huge", "Bearer " + "x" * 60_000
    yield "huge, with the key in it", f"Bearer {good}{'x' * 60_000}"
    for name, token in _tokens():
        yield name, f"Bearer {token}"


def _tokens() -> Iterator[tuple[str, str]]:
    claims = {"sub": "admin", "role": "owner", "platform_role": "admin", "exp": 4_102_444_800}
    for algorithm in ("none", "None", "HS256"):
        head = _base64({"alg": algorithm, "typ": "JWT"})
        body = f"{head}.{_base64(claims)}"
        yield f"JWT {algorithm}, unsigned", f"{body}."
        for secret in ("", "secret"):
            signature = hmac.digest(secret.encode(), body.encode(), "sha256")
            yield f"JWT {algorithm}, signed with {secret!r}", f"{body}.{_raw_base64(signature)}"


def _key(kind: str, public_id: str, secret: str) -> str:
    body = f"lpx_{kind}_{public_id}_{secret}"
    return f"{body}_{keys._checksum(body)}"


def _base64(value: object) -> str:
    return _raw_base64(json.dumps(value).encode())


def _raw_base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
