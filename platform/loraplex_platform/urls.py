"""Whether a URL names a Postgres, told without a part of it."""

from __future__ import annotations

from loraplex_engine.urls import POSTGRES_SCHEMES, url_fault


def postgres_fault(url: str) -> str | None:
    """Why no connection can be asked for by a URL, without a part of it; None: one can. Connects to nothing."""
    fault = url_fault(url, POSTGRES_SCHEMES)
    if fault is not None:
        return fault
    import psycopg
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        psycopg.conninfo.conninfo_to_dict(url)
        make_url(url)
    except (ArgumentError, psycopg.Error, ValueError):
        return (
            "it cannot be read, or has an option that Postgres does not know: write"
            " postgresql://user:password@host:port/database"
        )
    return None
