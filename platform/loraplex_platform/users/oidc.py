"""Logging in through somebody else's OpenID Connect provider: authorization code with PKCE.

Who comes back is known by (issuer, subject) alone. What is believed of an ID token: its signature by a
key of the provider's own set, with an asymmetric algorithm; issuer, audience, expiry and nonce. Sources:
OpenID Connect Core 1.0 (3.1.3.7), RFC 7636, RFC 9700.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import httpx
import jwt
import structlog
from pydantic import SecretStr

from loraplex_platform.errors import PermissionDeniedError, UnavailableError

log = structlog.get_logger(__name__)

ATTEMPT_S = 600  # how long somebody may take at the provider
TIMEOUT_S = 5.0
LEEWAY_S = 60  # between the provider's clock and ours
METADATA_TTL_S = 3600.0
KEYS_REFRESH_S = 60.0  # at most one look per this time for a key that we do not know
MAX_ANSWER_BYTES = 1 << 20
MAX_SUBJECT_CHARS = 255
# Never "none" and no shared secret: whoever knows the client secret could then be anybody.
ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "EdDSA",
)


class OidcLoginError(PermissionDeniedError):
    """The provider's answer does not prove who this is, or they may not come in."""

    code = "oidc_login_failed"


class OidcUnavailableError(UnavailableError):
    """The provider cannot be reached, or does not answer as a provider does."""

    code = "oidc_unavailable"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who somebody is, as the provider says. `email` only if the provider has verified it."""

    issuer: str
    subject: str
    email: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to the provider and back, kept in the visitor's own cookie.

    `linking_session_id`: the session whose user is to be tied to whoever comes back; None: a login.
    """

    state: str
    nonce: str
    verifier: str
    linking_session_id: str | None
    started_unix_s: int

    @classmethod
    def new(cls, *, linking_session_id: str | None = None) -> Attempt:
        """With fresh random values."""
        return cls(
            state=secrets.token_urlsafe(24),
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            linking_session_id=linking_session_id,
            started_unix_s=int(time.time()),
        )

    @property
    def challenge(self) -> str:
        """PKCE's S256 of the verifier."""
        return _base64(hashlib.sha256(self.verifier.encode()).digest())

    def sealed(self, key: SecretStr) -> str:
        """As a cookie that only we can have made."""
        body = _base64(json.dumps(asdict(self)).encode())
        return f"{body}.{_base64(_seal(key, body))}"

    @classmethod
    def opened(cls, cookie: str, key: SecretStr) -> Attempt | None:
        """From a cookie; None if it is not ours, or too old."""
        body, _, mac = cookie.partition(".")
        if not hmac.compare_digest(mac.encode(), _base64(_seal(key, body)).encode()):
            return None
        attempt = cls(**json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        return attempt if time.time() - attempt.started_unix_s < ATTEMPT_S else None


@dataclass(frozen=True, slots=True)
class _Metadata:
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    read_s: float


class OidcProvider:
    """One provider, where this platform is a client.

    Args:
        issuer: exactly as its ID tokens name it.
        redirect_uri: where it sends people back to, as registered there.
        client: closed by its owner.
    """

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: SecretStr | None,
        redirect_uri: str,
        client: httpx.AsyncClient,
    ) -> None:
        self._issuer = issuer
        self._client_id = client_id
        self._client_secret = client_secret
        self._redirect_uri = redirect_uri
        self._client = client
        self._metadata: _Metadata | None = None
        self._keys: dict[str, jwt.PyJWK] = {}
        self._keys_read_s = -KEYS_REFRESH_S

    async def url_for(self, attempt: Attempt) -> str:
        """Where to send somebody who wants to log in.

        Raises:
            OidcUnavailableError: the provider does not say where that is.
        """
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._redirect_uri,
            "scope": "openid email",
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": attempt.challenge,
            "code_challenge_method": "S256",
        }
        endpoint = (await self._read_metadata()).authorization_endpoint
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def redeem(self, code: str, attempt: Attempt) -> Identity:
        """Who came back with this code.

        Raises:
            OidcLoginError: the provider refuses the code, or its ID token proves nothing.
            OidcUnavailableError: the provider cannot be reached.
        """
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "client_id": self._client_id,
            "code_verifier": attempt.verifier,
        }
        auth = None
        if self._client_secret is not None:
            auth = httpx.BasicAuth(self._client_id, self._client_secret.get_secret_value())
        endpoint = (await self._read_metadata()).token_endpoint
        answer = await self._send("POST", endpoint, data=form, auth=auth)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise _failed("the provider gave no ID token for the code")
        return await self._verify(token, attempt.nonce)

    async def _verify(self, token: str, nonce: str) -> Identity:
        try:
            key = await self._key_of(token)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._client_id,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["iss", "aud", "exp", "iat", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise _failed(f"the ID token is not valid ({type(error).__name__})") from None
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise _failed("the ID token is not the answer to this attempt")
        audience = claims["aud"]
        is_for_several = isinstance(audience, list) and len(audience) > 1
        if is_for_several and claims.get("azp") != self._client_id:
            raise _failed("the ID token was made for another client")
        subject = claims["sub"]
        if (
            not isinstance(subject, str)
            or not 0 < len(subject) <= MAX_SUBJECT_CHARS
            or "\0" in subject
        ):
            raise _failed("the ID token names nobody")
        email = claims.get("email")
        if claims.get("email_verified") is not True or not isinstance(email, str):
            email = None
        return Identity(self._issuer, subject, None if email is None else email.strip().lower())

    async def _key_of(self, token: str) -> jwt.PyJWK:
        head = jwt.get_unverified_header(token)
        if head.get("alg") not in ALGORITHMS:
            raise jwt.InvalidAlgorithmError
        name = str(head.get("kid", ""))
        if name not in self._keys and time.monotonic() - self._keys_read_s >= KEYS_REFRESH_S:
            self._keys_read_s = time.monotonic()
            answer = await self._send("GET", (await self._read_metadata()).jwks_uri)
            found = jwt.PyJWKSet.from_dict(answer).keys
            self._keys = {key.key_id or "": key for key in found if key.key_type != "oct"}
        if name not in self._keys:
            raise jwt.InvalidKeyError
        return self._keys[name]

    async def _read_metadata(self) -> _Metadata:
        known = self._metadata
        if known is not None and time.monotonic() - known.read_s < METADATA_TTL_S:
            return known
        url = self._issuer.rstrip("/") + "/.well-known/openid-configuration"
        answer = await self._send("GET", url)
        if answer.get("issuer") != self._issuer:
            raise _unavailable("it names another issuer than LORAPLEX_OIDC_ISSUER")
        found = _Metadata(
            authorization_endpoint=str(answer.get("authorization_endpoint")),
            token_endpoint=str(answer.get("token_endpoint")),
            jwks_uri=str(answer.get("jwks_uri")),
            read_s=time.monotonic(),
        )
        for endpoint in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
            if not is_secure(endpoint):
                raise _unavailable("it names an endpoint that is not https")
        self._metadata = found
        return found

    async def _send(self, method: str, url: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        try:
            answer = await self._client.request(
                method, url, timeout=TIMEOUT_S, follow_redirects=False, **options
            )
            if len(answer.content) > MAX_ANSWER_BYTES:
                raise _unavailable("its answer is too large")
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise _unavailable(type(error).__name__) from None
        if answer.is_client_error and method == "POST":
            raise _failed("the provider refused the code")
        if not answer.is_success or not isinstance(body, dict):
            raise _unavailable(f"it answered {answer.status_code}")
        return body


def is_secure(url: str) -> bool:
    """Whether nobody between us and there can listen: https, or this machine itself."""
    parts = urlsplit(url)
    is_here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    return parts.scheme == "https" or (parts.scheme == "http" and is_here)


def _failed(reason: str) -> OidcLoginError:
    # Not to the visitor: what exactly was wrong helps only those who forge tokens.
    log.warning("oidc_login_failed", reason=reason)
    return OidcLoginError("The login at your provider did not succeed. Please try again.")


def _unavailable(reason: str) -> OidcUnavailableError:
    log.warning("oidc_unavailable", reason=reason)
    return OidcUnavailableError(
        "Your login provider does not answer as it should. Please try again later.",
        retry_after_s=10,
    )


def _seal(key: SecretStr, body: str) -> bytes:
    return hmac.digest(key.get_secret_value().encode(), b"oidc:" + body.encode(), "sha256")


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
