"""Settings: what more than one process derives from them."""

from __future__ import annotations

import pytest
from loraplex_platform.variables import with_login
from psycopg.conninfo import conninfo_to_dict
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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///loraplex?user=owner&host=/run/a%20b&password=s3cret",
        "postgresql://owner:s3cret@db/loraplex?user=owner&host=%2Frun%2Fa%20b",
        "postgresql:///loraplex?host=/run/a%20b&us%65r=owner",
    ],
)
def test_the_other_login_leaves_nothing_of_the_owner_in_the_query(url: str) -> None:
    """Found in review: libpq lets the query's user win, and the owner served."""
    changed = with_login(url, "serve", "word")

    assert "owner" not in changed
    assert "s3cret" not in changed
    # What libpq itself makes of it is what counts.
    read = conninfo_to_dict(changed)
    assert (read["user"], read["password"]) == ("serve", "word")
    assert (read["host"], read["dbname"]) == ("/run/a b", "loraplex")
