"""An OpenID Connect provider of its own process, with a real RSA key: small, strict and, if told so, dishonest.

python -m tests.support.oidc_provider   (prints its issuer; ends with its standard input)

`PUT /_next` with {"sub", "email", "email_verified", "fault"} says who logs in next and what is wrong with
their ID token; all else is what a provider does.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID = "loraplex-tests"
CLIENT_SECRET = "client-secret-for-tests"
KEY_ID = "key-1"


class Provider:
    """What the handlers share."""

    def __init__(self) -> None:
        self.issuer = ""
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.next: dict[str, Any] = {}
        self.codes: dict[str, dict[str, str]] = {}
        self.redeemed: list[str] = []

    def jwks(self) -> dict[str, Any]:
        key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return {"keys": [key | {"kid": KEY_ID, "use": "sig", "alg": "RS256"}]}

    def id_token(self, asked: dict[str, str]) -> str:
        who, fault = self.next, self.next.get("fault")
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": "https://evil.test" if fault == "issuer" else self.issuer,
            "aud": "another client" if fault == "audience" else CLIENT_ID,
            "sub": who.get("sub", "subject-1"),
            "iat": now,
            "exp": now - 3600 if fault == "expired" else now + 300,
            "nonce": "another" if fault == "nonce" else asked["nonce"],
            "email": who.get("email", "ada@example.com"),
            "email_verified": who.get("email_verified", True),
        }
        if fault == "several audiences":
            claims["aud"] = [CLIENT_ID, "another client"]
        if fault in ("no exp", "no sub", "no nonce"):
            del claims[fault.removeprefix("no ")]
        if fault == "unsigned":
            return jwt.encode(claims, None, algorithm="none")
        if fault == "signed with the client secret":
            return jwt.encode(claims, CLIENT_SECRET.ljust(32), "HS256", {"kid": KEY_ID})
        if fault == "signed with the public key":
            return _hs256_with_public_key(claims, json.dumps(self.jwks()).encode())
        key = self.stranger if fault == "another key" else self.key
        kid = "key-2" if fault == "unknown key" else KEY_ID
        token = jwt.encode(claims, key, "RS256", {"kid": kid})
        return token[:-8] + "AAAAAAAA" if fault == "broken signature" else token


class Handler(BaseHTTPRequestHandler):
    """Discovery, authorize, token, keys."""

    provider: Provider

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        provider = self.provider
        if url.path == "/.well-known/openid-configuration":
            issuer = provider.issuer
            self._json(
                200,
                {
                    "issuer": issuer,
                    "authorization_endpoint": f"{issuer}/authorize",
                    "token_endpoint": f"{issuer}/token",
                    "jwks_uri": f"{issuer}/keys",
                },
            )
        elif url.path == "/keys":
            self._json(200, provider.jwks())
        elif url.path == "/authorize":
            needed = ("redirect_uri", "state", "nonce", "code_challenge")
            is_complete = all(query.get(name) for name in needed)
            is_ours = query.get("client_id") == CLIENT_ID and query.get("response_type") == "code"
            is_s256 = query.get("code_challenge_method") == "S256"
            if not (is_complete and is_ours and is_s256 and "openid" in query.get("scope", "")):
                self._json(400, {"error": "invalid_request"})
                return
            code = secrets.token_urlsafe(16)
            provider.codes[code] = query
            back = urlencode({"code": code, "state": query["state"]})
            self.send_response(302)
            self.send_header("location", f"{query['redirect_uri']}?{back}")
            self.end_headers()
        else:
            self._json(404, {})

    def do_PUT(self) -> None:
        self.provider.next = json.loads(self._body())
        self._json(200, {})

    def do_POST(self) -> None:
        form = {name: values[0] for name, values in parse_qs(self._body().decode()).items()}
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        asked = self.provider.codes.pop(form.get("code", ""), None)  # a code works once
        challenge = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        is_right = (
            asked is not None
            and self.headers.get("authorization") == f"Basic {basic}"
            and form.get("grant_type") == "authorization_code"
            and form.get("redirect_uri") == asked["redirect_uri"]
            and base64.urlsafe_b64encode(challenge).rstrip(b"=").decode() == asked["code_challenge"]
        )
        if asked is None or not is_right:
            self._json(400, {"error": "invalid_grant"})
        elif self.provider.next.get("fault") == "no token":
            self._json(200, {"access_token": "x", "token_type": "Bearer"})
        elif self.provider.next.get("fault") == "down":
            self._json(500, {})
        else:
            token = self.provider.id_token(asked)
            self._json(200, {"access_token": "x", "token_type": "Bearer", "id_token": token})

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: standard error is the test's."""

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", "0")))

    def _json(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _hs256_with_public_key(claims: dict[str, Any], secret: bytes) -> str:
    """The classic: the public key, which everybody has, as an HMAC secret. PyJWT refuses to make it."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': KEY_ID})}.{part(claims)}"
    signature = hmac.digest(secret, body.encode(), "sha256")
    return f"{body}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def main() -> None:
    """Serve until standard input ends."""
    provider = Provider()
    Handler.provider = provider
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.issuer = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(provider.issuer + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
