"""Settings: what more than one process derives from them."""

from __future__ import annotations

import pytest
from loraplex_platform.settings import with_login
from sqlalchemy import make_url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://postgres@/loraplex?host=/run/a%20b",
        "postgres://me:p%40ss@db.example:5433/loraplex?sslmode=require",
        "postgresql://db.example/loraplex",
        "postgresql://me@[::1]:5432/loraplex",
    ],
)
def test_another_login_reaches_the_same_database(url: str) -> None:
    before, after = make_url(url), make_url(with_login(url, "serve:r", "p@ss/w:rd"))

    assert (after.username, after.password) == ("serve:r", "p@ss/w:rd")
    for part in ("drivername", "host", "port", "database", "query"):
        assert getattr(after, part) == getattr(before, part)
    assert make_url(with_login(url, "serve")).password is None
