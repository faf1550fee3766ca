"""URLs with a login in them, judged in our own words: a library's error quotes the part that it could not read,
which is the password as often as not. Imports nothing heavy: every process judges its settings with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import unquote

POSTGRES_SCHEMES: Final = ("postgresql", "postgres")
REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
HTTP_SCHEMES: Final = ("http", "https")
_ENCODE: Final = "its user or password has one of @ / ? # [ ] % as it is: write it as %40 %2F %3F %23 %5B %5D %25"


def url_fault(url: str, schemes: Iterable[str]) -> str | None:
    """Why a URL cannot be read, or would be read as another host, without a part of it; None: it is sound."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme.lower() not in schemes:
        return f"it does not begin with {' or '.join(f'{name}://' for name in schemes)}"
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    path, _, query = rest[len(authority) :].partition("?")
    login, _, hosts = authority.rpartition("@")
    # A query may hold an @ in a value; one before any = is the end of a password with a ? in it.
    if (
        re.search(r"[@\[\]]", login)
        or "@" in path
        or ("@" in query and "=" not in query.partition("@")[0])
        or re.search(r"%(?![0-9A-Fa-f]{2})", authority)
    ):
        return _ENCODE
    for host in hosts.split(","):
        port = re.fullmatch(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::(\d*))?", host)
        if port is None or int(port[1] or 0) > 65535:
            return (
                "after the host comes no port (a number up to 65535); a login stands before an @:"
                f" {scheme}://user:password@host:port"
            )
    return None


def redis_fault(url: str) -> str | None:
    """Why no client of Redis can be made of a URL, without a part of it; None: one can. Connects to nothing."""
    fault = url_fault(url, REDIS_SCHEMES)
    if fault is not None:
        return fault
    import redis

    try:
        pool = redis.ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)  # looks at the options
    except (ValueError, TypeError):
        return "it cannot be read, or has an option that Redis's client does not know: write redis://:password@host:port/0"
    return None


def http_fault(url: str) -> str | None:
    """Why a URL is none of HTTP, without a part of it; None: it is one."""
    fault = url_fault(url, HTTP_SCHEMES)
    if fault is None and not url.partition("://")[2].strip("/"):
        return "it names no host: write http://host:port"
    return fault


def passwords_in(url: str) -> Iterator[str]:
    """What of a URL is secret, as it is written and as it is meant; not what its other parts say as well."""
    _, _, rest = url.partition("://")
    login, _, beyond = rest.rpartition("@")
    user, _, password = login.partition(":")
    given = [password]
    query = rest.partition("?")[2]
    given += [
        value
        for name, _, value in (pair.partition("=") for pair in query.split("&"))
        if name.lower().endswith(("password", "secret", "key", "token"))
    ]
    said = {user, *re.split(r"[/:?]", beyond)}
    for value in given:
        yield from {value, unquote(value)} - said


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """A text with *** for each of these; short ones are words that a text may have anyway."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= MIN_HIDDEN_CHARS:
            text = text.replace(secret, "***")
    return text


MIN_HIDDEN_CHARS: Final = 6
